"""Call formats as JSON with simple marks: Hermes, Llama 3, Mistral and gpt-oss. See calls.CallFormat."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping
from typing import ClassVar

from llmc_runtime.server.tool_calls.call_format import CallFormat, Malformed, Steps
from llmc_runtime.server.tool_calls.lark_text import ANY, Marker, choice_of, lark, led, regex, repeated

_HEADER = 256  # maximum characters of a message header


class Hermes(CallFormat):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, used by Hermes and Qwen."""

    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template matches; other families use the same mark with XML inside."""
        others = ("<function=", "<arg_key>", "<parameter=")
        return "<tool_call>" in template and "arguments" in template and not any(one in template for one in others)

    @classmethod
    def behind(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        calls = choice_of(tools, '{"name": "', '", "arguments": ', "}")
        return f'behind: "\\n" call "\\n" {marker(cls.markers[1])}\ncall: {calls}'

    def _reading(self) -> Steps[None]:
        while (yield from self._until("<tool_call>")) is not None:
            if (yield from self._attempt(self._object())):
                yield from self._optional("</tool_call>")


class Llama3Json(CallFormat):
    """{"name": ..., "parameters": {...}} at the start of a line or after <|python_tag|>, used by Llama 3.

    As the format has no required mark, the name has to be that of a tool.
    """

    name = "llama3_json"
    markers = ("<|python_tag|>",)
    several = False
    between = None

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "parameters" in template and any(one in template for one in ("<|python_tag|>", "ipython"))

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


class Mistral(CallFormat):
    """[TOOL_CALLS] with a list of {"name": ..., "arguments": {...}}, or NAME[ARGS]{...} for each call, used by
    Mistral.
    """

    name = "mistral"
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    short_ids = True
    between: ClassVar[str | None] = None

    @classmethod
    def call_id(cls, name: str, index: int) -> str:
        """See CallFormat."""
        return uuid.uuid4().hex[:9]

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "[TOOL_CALLS]" in template

    @classmethod
    def behind(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        call = choice_of(tools, '{"name": "', '", "arguments": ', "}")
        return f'behind: " "? "[" {repeated("call", lark(", "), most)} "]"\ncall: {call}'

    def _reading(self) -> Steps[None]:
        while (yield from self._until("[TOOL_CALLS]")) is not None:
            first = yield from self._next()
            readers = {"[": self._list, "{": self._object}
            yield from self._attempt(readers.get(first, self._named)())

    def _named(self) -> Steps[None]:
        name = yield from self._word()
        if not self._is_name(name):
            raise Malformed
        if (yield from self._optional("[CALL_ID]")):
            yield from self._word()
        yield from self._optional("[ARGS]")
        if (yield from self._next()) != "{":
            raise Malformed
        yield from self._arguments(name)


class MistralArgs(Mistral):
    """Mistral with the newer of its two formats in grammars; the parser accepts both."""

    between = ""

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "[TOOL_CALLS]" in template and "[ARGS]" in template

    @classmethod
    def behind(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        args, call_id = map(marker, cls.markers[1:])
        middle = f"({call_id} /[A-Za-z0-9]{{9}}/)? {args}"
        return "behind: " + " | ".join(f"{lark(name)} {middle} {rule}" for name, rule in tools.items())


class OpenAI(CallFormat):
    """Harmony messages, used by gpt-oss.

    A message is <|channel|>final<|message|> and content, or <|channel|>commentary to=functions.NAME and arguments; each
    but the first follows <|start|>assistant. The analysis channel before them is reasoning. Only known tools are
    called.
    """

    name = "openai"
    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
    several = False
    between = None
    channels = True

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "<|channel|>" in template and "<|message|>" in template

    @classmethod
    def behind(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat; this follows the channel's mark."""
        _, _, constrain, message = map(marker, cls.markers)
        end = f'{constrain} "json" {message}'
        calls = (f"{lark(f'commentary to=functions.{name} ')} {end} {rule}" for name, rule in tools.items())
        return "behind: " + " | ".join(calls)

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        start, channel = map(marker, cls.markers[:2])
        return f'calls: ({start} "assistant")? {channel} behind\n{cls.behind(tools, marker, most)}'

    @classmethod
    def free_rules(cls, tools: Mapping[str, str], marker: Marker, most: int, known: Collection[str]) -> str:
        """See CallFormat: messages to the user, then the answer or a call."""
        start, channel, _, message = map(marker, cls.markers)
        head, said = f'({start} "assistant")? {channel}', f"{message} FREE?"
        told = f'told: {head} "commentary" {said} {marker("<|end|>")}\nFREE: /{ANY}/'
        last = f'last: {head} ("final" {said} | behind)'
        return f"calls: told{{0,8}} last\n{told}\n{last}\n{cls.behind(tools, marker, most)}"

    @classmethod
    def before_answer(cls, marker: Marker) -> str:
        """See CallFormat."""
        start, channel, _, message = map(marker, cls.markers)
        return f'({start} "assistant")? {channel} "final" {message}'

    def _reading(self) -> Steps[None]:
        while (opener := (yield from self._until("<|start|>assistant", "<|channel|>", "<|end|>"))) is not None:
            if opener == "<|end|>":
                self._mark = None
                continue
            yield from self._attempt(self._message())

    def _message(self) -> Steps[None]:
        header = ""
        while not (yield from self._optional("<|message|>")):
            char = yield from self._next(solid=False)
            if not char or len(header) == _HEADER:
                raise Malformed
            header += char
            self._at += 1
        to = re.search(r" to=functions\.([A-Za-z0-9_-]{1,64})(?![A-Za-z0-9_-])", header)
        if " to=" not in header:
            self._mark = None  # content follows
        elif to is not None and to[1] in self._tools:
            yield from self._arguments(to[1])
        else:
            raise Malformed
