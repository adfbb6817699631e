"""Call formats whose outputs consist of messages with headers, declared as parts of headers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from llmc_runtime.grammar.lark_text import ANY, Marker
from llmc_runtime.server.tool_calls.call_format import CallFormat, Malformed, Steps
from llmc_runtime.server.tool_calls.json_shape import Json, Optional, expression

_MAX_HEADER = 256  # maximum characters of a header
_MAX_COMMENTS = 8  # maximum number of comments before an answer or a call


class MessageShape(CallFormat):
    """Messages of `start`, `channel`, a header, `message` and a content. A subclass is a declaration.

    The first message may lack `start`, which its prompt ends with. An output has comments, then an answer or a call of
    a known tool, whose content is the arguments. A grammar requires the headers as declared. A reader takes a message
    whose header contains `recipient` as a call, and other messages as content.

    - `start`: texts before each message;   `channel`, `message`: the texts before and after the header
    - `end`: the text after a comment. None of these texts begins or ends with white space
    - `answer`, `comment`: the headers of answers and comments
    - `call`: the parts of a call's header: texts, among them `recipient`, and Json.NAME, which the reader finds by the
      texts from `recipient` on
    """

    several = False
    between = None
    channels = True
    start: ClassVar[Sequence[str]]
    channel: ClassVar[str]
    message: ClassVar[str]
    end: ClassVar[str]
    answer: ClassVar[str]
    comment: ClassVar[str]
    recipient: ClassVar[str]
    call: ClassVar[Sequence[str | Json]]

    # --- grammar

    @classmethod
    def _lark(cls, marker: Marker, *parts: object) -> str:
        return expression(parts, marker, (*cls.markers, cls.end))

    @classmethod
    def _head(cls, marker: Marker, *parts: str) -> str:
        """Return the Lark expression of a message up to `parts` of its header."""
        return cls._lark(marker, Optional(cls.start, enforced=False), cls.channel, *parts)

    @classmethod
    def after_mark(cls, tools: Mapping[str, str], marker: Marker, max_calls: int) -> str:
        """See CallFormat; this follows `channel`."""
        headers = {name: [name if part is Json.NAME else part for part in cls.call] for name in tools}
        calls = (cls._lark(marker, *headers[name], cls.message, (rule,)) for name, rule in tools.items())
        return f"after_mark: {' | '.join(calls)}"

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, max_calls: int) -> str:
        """See CallFormat."""
        return f"calls: {cls._head(marker)} after_mark\n{cls.after_mark(tools, marker, max_calls)}"

    @classmethod
    def free_rules(cls, tools: Mapping[str, str], marker: Marker, max_calls: int, known: Collection[str]) -> str:
        """See CallFormat."""
        content = cls.message, ("FREE?",)
        comment = f"comment: {cls._head(marker)} {cls._lark(marker, cls.comment, *content, cls.end)}\nFREE: /{ANY}/"
        last = f"last: {cls._head(marker)} ({cls._lark(marker, cls.answer, *content)} | after_mark)"
        return (
            f"calls: comment{{0,{_MAX_COMMENTS}}} last\n{comment}\n{last}\n{cls.after_mark(tools, marker, max_calls)}"
        )

    @classmethod
    def before_answer(cls, marker: Marker) -> str:
        """See CallFormat."""
        return cls._head(marker, cls.answer, cls.message)

    # --- reader

    def _parse(self) -> Steps[None]:
        openers = ("".join(self.start), self.channel, self.end)
        while (opener := (yield from self._content_until(*openers))) is not None:
            if opener == self.end:
                self._mark = None
                continue
            yield from self._attempt(self._parse_calls(opener))

    def _parse_calls(self, opener: str) -> Steps[None]:
        header = ""
        while not (yield from self._optional(self.message)):
            char = yield from self._next(solid=False)
            if not char or len(header) == _MAX_HEADER:
                raise Malformed
            header += char
            self._at += 1
        if self.recipient not in header:
            self._mark = None  # content follows
            return
        before_name = map(str, self.call[self.call.index(self.recipient) : self.call.index(Json.NAME)])
        tool = re.search(rf"{re.escape(''.join(before_name))}([A-Za-z0-9_-]{{1,64}})(?![A-Za-z0-9_-])", header)
        if tool is None or tool[1] not in self._tools:
            raise Malformed
        yield from self._arguments(tool[1])
