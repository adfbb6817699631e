"""CallFormat, the base class of formats of tool calls: a streaming parser that splits text into content and calls.

Invariants, for any text in pieces of any size: the joined output does not depend on the pieces; emitted output is never
taken back; the arguments of a call are a complete JSON object, or a prefix of one if the text ends or is malformed
inside it; everything else is content, except the marks around calls, up to MAX_SPACE of white space next to them, and
an unfinished call at the end of an output that was cut off.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from llmc_runtime.grammar.lark_text import Marker, after_text, json_rule, lark, repeated, text_without
from llmc_runtime.server.requests.request_fields import FUNCTION_NAME
from llmc_runtime.server.tool_calls.definitions import enforced
from llmc_runtime.server.tool_calls.json_stream import SPACE, JsonText
from llmc_runtime.server.tool_calls.marks import begun_mark, first_mark

MAX_SPACE = 64
_BRACKETS = ("{", "[")  # they may start a call or any other text

T = TypeVar("T")
Steps = Generator[None, None, T]  # a parser as a generator; it yields to wait for more text


@dataclass(frozen=True)
class CallPiece:
    """New output of call number `index`: the first piece has its `name`, further ones its arguments as they arrive."""

    index: int
    name: str | None
    arguments: str


class Scan(Protocol):
    """An incremental scanner of one value, which converts it to JSON (see json_stream.JsonText)."""

    done: bool
    failed: bool

    @property
    def promising(self) -> bool:
        """Whether enough of the value has been read for output."""

    def feed(self, text: str, at: int) -> int:
        """Read on from position `at`, and return the position where reading stopped."""

    def take(self) -> str:
        """Return the JSON read since the last call."""


class Malformed(Exception):
    """The text is not a call."""


class CallFormat(ABC):
    """A format of tool calls. An instance is the parser of one output; `tools` maps names to schemas of arguments.

    - `aliases`: other names that select the format.
    - `markers`: texts that may be special tokens and have to be visible; the first one starts calls.
    - `short_ids`: ids of calls consist of nine letters and digits.
    - `several`: a response may have more than one call.
    - `between`: the text between the marks of several calls; None if all calls follow one mark.
    - `bracket`: the text with which a call starts that has no mark, at the start of a line; "" if a mark is required
      (see unmarked.Unmarked).
    - `channels`: there are marks around answers as well.
    - `shown`, `hidden`, `pattern`: a chat template shows calls in this format if it contains all of `shown`, none of
      `hidden`, and a match of `pattern`.
    - `token`: a special token that tells the format if the template shows no calls.
    - `id_format`: the ids of calls, with {name} and {index}; random ids if "".
    """

    name: ClassVar[str]
    aliases: ClassVar[Sequence[str]] = ()
    markers: ClassVar[Sequence[str]]
    short_ids: ClassVar[bool] = False
    several: ClassVar[bool] = True
    between: ClassVar[str | None] = "\n"
    bracket: ClassVar[str] = ""
    channels: ClassVar[bool] = False
    shown: ClassVar[Sequence[str]] = ()
    hidden: ClassVar[Sequence[str]] = ()
    pattern: ClassVar[re.Pattern[str] | None] = None
    token: ClassVar[str | None] = None
    id_format: ClassVar[str] = ""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._tools = tools
        self._text, self._at, self._ended = "", 0, False
        self._mark: int | None = None  # start of the text that may become a call
        self._space = ""  # white space held back: it is dropped if a call follows
        self._fresh_line = True  # whether only white space followed the last newline
        self._out: list[str | CallPiece] = []
        self._count = 0
        self._cut = self._is_call = False  # `_is_call`: the current attempt has read the name of a tool
        self._work = self._read()
        next(self._work)

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether a chat template shows calls in this format; False if it has neither `shown` nor `pattern`."""
        if not (cls.shown or cls.pattern) or any(text in template for text in cls.hidden):
            return False
        return all(text in template for text in cls.shown) and (not cls.pattern or bool(cls.pattern.search(template)))

    @classmethod
    def openers(cls) -> Sequence[str]:
        """Return the texts with which calls may start."""
        return cls.markers[:1]

    @classmethod
    def call_id(cls, name: str, index: int) -> str:
        """Return a new id for a call, the index-th of its conversation."""
        if cls.id_format:
            return cls.id_format.format(name=name, index=index)
        random = uuid.uuid4().hex
        return random[:9] if cls.short_ids else f"call_{random[:24]}"

    @classmethod
    @abstractmethod
    def after_mark(cls, tools: Mapping[str, str], marker: Marker, max_calls: int) -> str:
        """Return Lark rules in which `after_mark` matches what follows the first mark.

        That is one call, or up to `max_calls` calls if `between` is None. `tools` maps names to the rules of their
        arguments.
        """

    @classmethod
    def arguments(cls, rule: str, schema: dict[str, Any], marker: Marker, exact: bool) -> str:
        """Return Lark rules in which `rule` matches arguments of this schema, or any arguments unless `exact`.

        Raises ApiError 400 if the format cannot express the schema.
        """
        whole = json_rule(enforced(schema)) if exact else json_rule({"type": "object"}, {})
        return f"{rule}: {whole}"

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, max_calls: int) -> str:
        """Return Lark rules in which `calls` matches 1 to `max_calls` calls."""
        times = 1 if cls.between is None else max_calls
        whole = repeated("one", lark(cls.between or ""), times)
        return f"calls: {whole}\none: {marker(cls.markers[0])} after_mark\n{cls.after_mark(tools, marker, max_calls)}"

    @classmethod
    def free_rules(cls, tools: Mapping[str, str], marker: Marker, max_calls: int, known: Collection[str]) -> str:
        """Return Lark rules in which `calls` matches a text with up to `max_calls` calls, each complete once its mark
        has been written.

        `known` are the names of all tools, of which `tools` may be called.
        """
        begin, openers = cls.markers[0], cls.openers()
        times = max_calls if cls.between is not None else 1
        lead, rules = after_text(begin, marker, openers)
        parts = [f"calls: one{{0,{times}}} FREE?", f"one: {lead} after_mark", f"FREE: {text_without(openers)}", *rules]
        return "\n".join([*parts, cls.after_mark(tools, marker, max_calls)])

    @classmethod
    def before_answer(cls, marker: Marker) -> str:
        """Return the Lark rule for what precedes an answer without calls."""
        return ""

    def push(self, text: str) -> list[str | CallPiece]:
        """Append text, and return the content (as str) and the pieces of calls that are now certain."""
        start = self._at if self._mark is None else self._mark
        self._text, self._at = self._text[start:] + text, self._at - start
        self._mark = None if self._mark is None else 0
        next(self._work)
        return self._take_output()

    def finish(self, *, cut: bool = False) -> list[str | CallPiece]:
        """End the text and return the remaining output.

        With `cut`, the output was cut off, for example at max_tokens; an unfinished call is then dropped instead of
        becoming content.
        """
        self._ended, self._cut = True, cut
        if not (cut and self._in_call()):
            next(self._work, None)
        if self._space and not self._count:
            self._out.append(self._space)
        return self._take_output()

    def _parse(self) -> Steps[None]:
        """Parse the whole text."""
        while (opener := (yield from self._content_until(*self.openers()))) is not None:
            if opener == self.bracket and not self._fresh_line:
                self._mark = None
                self._emit_content(opener)
                continue
            self._at -= opener == self.bracket or opener.endswith("[")  # the bracket is part of the call
            if (yield from self._attempt(self._parse_calls(opener))):
                yield from self._closing_marks(opener)

    @abstractmethod
    def _parse_calls(self, opener: str) -> Steps[None]:
        """Parse the calls after `opener`. Raises Malformed."""

    def _closing_marks(self, opener: str) -> Steps[None]:
        """Consume the marks that may follow the calls after `opener`."""
        yield from ()

    def _read(self) -> Steps[None]:
        yield
        yield from self._parse()

    def _in_call(self) -> bool:
        """Return whether the current text is part of a call, or of another call after the first."""
        if self._mark is None:
            return False
        marks = tuple(opener for opener in self.openers() if opener not in _BRACKETS)
        return self._is_call or self._count > 0 or self._text.startswith(marks, self._mark)

    def _take_output(self) -> list[str | CallPiece]:
        out, self._out = self._out, []
        return out

    # --- output

    def _emit_content(self, text: str) -> None:
        """Emit content."""
        *lines, last = text.split("\n")
        self._fresh_line = (bool(lines) or self._fresh_line) and not last.strip(SPACE)
        text = self._space + text
        sure = max(len(text.rstrip(SPACE)), len(text) - MAX_SPACE)
        self._space = text[sure:]
        if sure:
            self._out.append(text[:sure])

    def _emit_name(self, name: str) -> None:
        """Emit the start of a call."""
        self._out.append(CallPiece(self._count, name, ""))
        self._count += 1
        self._space, self._mark, self._fresh_line = "", None, True

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._out.append(CallPiece(self._count - 1, None, text))

    # --- input

    def _content_until(self, *openers: str) -> Steps[str | None]:
        """Emit everything before the first of `openers` as content. Returns the opener, which is consumed, or None at
        the end.
        """
        while True:
            mark = first_mark(self._text, openers, self._at)
            end = len(self._text) - self._partial(openers) if mark is None else mark[0]
            self._emit_content(self._text[self._at : end])
            self._at = end
            if mark is not None:
                self._mark, self._at = self._at, self._at + len(mark[1])
                return mark[1]
            if self._ended:
                return None
            yield

    def _partial(self, openers: Sequence[str]) -> int:
        """Return the length of the longest prefix of one of `openers` with which the text ends."""
        next_call = self._cut and self._count > 0  # a partial mark after a call is dropped as another call's
        return 0 if self._ended and not next_call else begun_mark(self._text, openers, self._at)

    def _attempt(self, reader: Steps[None]) -> Steps[bool]:
        """Try to parse calls. If the text is malformed, what follows the last mark becomes content. Returns whether
        there was a call.
        """
        before, self._is_call = self._count, False
        try:
            yield from reader
        except Malformed:
            if self._mark is not None:
                self._emit_content(self._text[self._mark : self._at])
        self._mark = None
        return self._count > before

    def _next_marker(self, *markers: str, consume: bool = True) -> Steps[str | None]:
        """Return which of `markers` follows, after white space, and consume both; consume nothing if there is none."""
        longest = MAX_SPACE + 1 + max(map(len, markers))
        while True:
            ahead = self._text[self._at : self._at + longest]
            bare = ahead.lstrip(SPACE)
            space = len(ahead) - len(bare)
            marker = next((marker for marker in markers if bare.startswith(marker)), None)
            if marker is not None and space <= MAX_SPACE:
                self._at += space + len(marker) if consume else 0
                return marker
            begun = space <= MAX_SPACE and any(marker.startswith(bare) for marker in markers)
            if self._ended and self._cut and begun:
                self._at = len(self._text)  # the rest of the mark was cut off
            if self._ended or not begun:
                return None
            yield

    def _optional(self, marker: str) -> Steps[bool]:
        """Return whether `marker` follows, after white space, and consume both; consume nothing otherwise."""
        return (yield from self._next_marker(marker)) is not None

    def _expect(self, marker: str) -> Steps[None]:
        """Consume `marker`, after white space, or raise Malformed."""
        if not (yield from self._optional(marker)):
            raise Malformed

    def _next(self, *, solid: bool = True) -> Steps[str]:
        """Return the next character without consuming it, after skipping white space if `solid`; "" at the end."""
        while True:
            while self._at < len(self._text):
                char = self._text[self._at]
                if not solid or char not in SPACE:
                    return char
                self._at += 1
            if self._ended:
                return ""
            yield

    def _symbol(self, allowed: str) -> Steps[str]:
        """Consume one of the allowed characters, after white space, or raise Malformed."""
        char = yield from self._next()
        if not char or char not in allowed:
            raise Malformed
        self._at += 1
        return char

    def _word(self) -> Steps[str]:
        """Consume the characters of a name, at most one more than the maximum length."""
        word = ""
        while len(word) <= 64:
            char = yield from self._next(solid=False)
            if not FUNCTION_NAME.fullmatch(char):
                break
            word += char
            self._at += 1
        return word

    def _value(self, take: Callable[[str], None] | None = None, scan: Scan | None = None) -> Steps[str]:
        """Consume a value and return it as JSON.

        `scan` reads another notation than JSON. `take` receives the value incrementally instead.
        """
        scan, parts = scan or JsonText(), list[str]()
        yield from self._next()
        while True:
            self._at = scan.feed(self._text, self._at)
            if scan.promising:
                (take or parts.append)(scan.take())
            if scan.done:
                return "".join(parts)
            if scan.failed or self._ended:
                raise Malformed
            yield

    def _string(self) -> Steps[str]:
        if (yield from self._next()) != '"':
            raise Malformed
        return str(json.loads((yield from self._value())))

    def _is_name(self, name: str) -> bool:
        return FUNCTION_NAME.fullmatch(name) is not None

    def _arguments(self, name: str | None) -> Steps[str]:
        """Consume the arguments, and emit the call if its name is known; else return them. null counts as {}."""
        first = yield from self._next()
        if first == "n" and (yield from self._value()) == "null":
            if name is not None:
                self._emit_name(name)
                self._emit_arguments("{}")
            return "{}"
        if first != "{":
            raise Malformed
        if name is None:
            return (yield from self._value())
        begun = False

        def take(text: str) -> None:
            nonlocal begun
            if not begun:
                self._emit_name(name)
            begun = True
            self._emit_arguments(text)

        return (yield from self._value(take))
