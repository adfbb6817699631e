"""JSON call formats that are no JsonShape: Llama 3's without a required mark, and gpt-oss's messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from llmc_runtime.server.tool_calls.call_format import CallFormat, Malformed, Steps
from llmc_runtime.server.tool_calls.lark_text import ANY, Marker, choice_of, lark, led, regex

_HEADER = 256  # maximum characters of a message header


class Llama3Json(CallFormat):
    """{"name": ..., "parameters": {...}} at the start of a line or after <|python_tag|>, used by Llama 3.

    As the format has no required mark, the name has to be that of a tool.
    """

    name = "llama3_json"
    markers = ("<|python_tag|>",)
    shown = ("parameters",)
    pattern = re.compile(r"<\|python_tag\|>|ipython")
    token = "<|python_tag|>"
    several = False
    between = None

    @classmethod
    def behind(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        return "behind: " + choice_of(tools, '{"name": "', '", "parameters": ', "}")

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat; there is no mark before the call."""
        return f"calls: behind\n{cls.behind(tools, marker, most)}"

    @classmethod
    def free_rules(cls, tools: Mapping[str, str], marker: Marker, most: int, known: Collection[str]) -> str:
        """See CallFormat."""
        key = r'\{[ \n]*("type" ?: ?"function", ?)?"name" ?: ?'
        never = (
            rf'\{{(?s:.*)"name"[ \n\t\r]*:[ \n\t\r]*"({"|".join(map(regex, known))})"'  # an object that names a tool
        )
        spaced = {name: f'" "? {rule}' for name, rule in tools.items()}

        def opening(name: str) -> str:
            return f'{key}"{name}" ?,[ \\n]*"parameters" ?:'

        return (
            f"{led(spaced, opening, lark('}'), never, cls.markers[0], marker, '')}\n{cls.behind(tools, marker, most)}"
        )

    def _reading(self) -> Steps[None]:
        while (opener := (yield from self._until("<|python_tag|>", "{"))) is not None:
            if opener == "{":
                self._at -= 1
                if not self._fresh_line:
                    self._mark = None
                    self._at += 1
                    self._say("{")
                    continue
            if (yield from self._attempt(self._object())) and (yield from self._optional(";")):
                tagged = yield from self._optional("<|python_tag|>", consume=False)
                if not tagged and not (yield from self._optional("{", consume=False)) and not self._cut:
                    self._say(";")

    def _is_name(self, name: str) -> bool:
        return name in self._tools


class OpenAI(CallFormat):
    """Harmony messages, used by gpt-oss.

    A message is <|channel|>final<|message|> and content, or <|channel|>commentary to=functions.NAME and arguments; each
    but the first follows <|start|>assistant. The analysis channel before them is reasoning. Only known tools are
    called.

    This format is no JsonShape because its channels also enclose answers, and because the reader accepts the parts of a
    header in any order while the grammar fixes one. Both sides use the constants below.
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
        preamble = f"told: {head} {lark(cls._CALLS)} {content} {marker(cls._END)}\nFREE: /{ANY}/"
        last = f"last: {head} ({lark(cls._ANSWERS)} {content} | behind)"
        return f"calls: told{{0,8}} last\n{preamble}\n{last}\n{cls.behind(tools, marker, most)}"

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
            yield from self._attempt(self._message())

    def _message(self) -> Steps[None]:
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
