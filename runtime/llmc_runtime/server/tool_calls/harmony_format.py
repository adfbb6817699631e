"""The call format of gpt-oss, whose messages have headers. It is not declared as a shape."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from llmc_runtime.server.tool_calls.call_format import CallFormat, Malformed, Steps
from llmc_runtime.server.tool_calls.lark_text import ANY, Marker, lark, regex

_HEADER = 256  # maximum characters of a message header


class OpenAI(CallFormat):
    """Harmony messages, used by gpt-oss.

    A message is <|channel|>final<|message|> and content, or <|channel|>commentary to=functions.NAME and arguments; each
    but the first follows <|start|>assistant. The analysis channel before them is reasoning. Only known tools are
    called.

    This format is not a JsonShape, because its channels also enclose answers, and because the reader accepts the parts
    of a header in any order while the grammar fixes one. Both sides use the constants below.
    """

    name = "openai"
    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
    shown = ("<|channel|>", "<|message|>")
    several = False
    between = None
    channels = True
    _START, _CHANNEL, _CONSTRAIN, _MESSAGE = markers
    _END = "<|end|>"
    _ROLE, _ANSWERS, _CALLS = "assistant", "final", "commentary"
    _RECIPIENT, _FUNCTIONS = " to=", "functions."

    @classmethod
    def _head(cls, marker: Marker) -> str:
        """Return the Lark expression of a message's start, up to the name of its channel."""
        return f"({marker(cls._START)} {lark(cls._ROLE)})? {marker(cls._CHANNEL)}"

    @classmethod
    def behind(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat; this follows the channel's mark."""
        head = cls._CALLS + cls._RECIPIENT + cls._FUNCTIONS
        end = f'{marker(cls._CONSTRAIN)} "json" {marker(cls._MESSAGE)}'
        return "behind: " + " | ".join(f"{lark(f'{head}{name} ')} {end} {rule}" for name, rule in tools.items())

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        return f"calls: {cls._head(marker)} behind\n{cls.behind(tools, marker, most)}"

    @classmethod
    def free_rules(cls, tools: Mapping[str, str], marker: Marker, most: int, known: Collection[str]) -> str:
        """See CallFormat: messages to the user, then the answer or a call."""
        head, content = cls._head(marker), f"{marker(cls._MESSAGE)} FREE?"
        preamble = f"preamble: {head} {lark(cls._CALLS)} {content} {marker(cls._END)}\nFREE: /{ANY}/"
        last = f"last: {head} ({lark(cls._ANSWERS)} {content} | behind)"
        return f"calls: preamble{{0,8}} last\n{preamble}\n{last}\n{cls.behind(tools, marker, most)}"

    @classmethod
    def before_answer(cls, marker: Marker) -> str:
        """See CallFormat."""
        return f"{cls._head(marker)} {lark(cls._ANSWERS)} {marker(cls._MESSAGE)}"

    def _reading(self) -> Steps[None]:
        openers = (self._START + self._ROLE, self._CHANNEL, self._END)
        while (opener := (yield from self._until(*openers))) is not None:
            if opener == self._END:
                self._mark = None
                continue
            yield from self._attempt(self._calls(opener))

    def _calls(self, opener: str) -> Steps[None]:
        header = ""
        while not (yield from self._optional(self._MESSAGE)):
            char = yield from self._next(solid=False)
            if not char or len(header) == _HEADER:
                raise Malformed
            header += char
            self._at += 1
        recipient = regex(self._RECIPIENT + self._FUNCTIONS)
        tool = re.search(rf"{recipient}([A-Za-z0-9_-]{{1,64}})(?![A-Za-z0-9_-])", header)
        if self._RECIPIENT not in header:
            self._mark = None  # content follows
        elif tool is not None and tool[1] in self._tools:
            yield from self._arguments(tool[1])
        else:
            raise Malformed
