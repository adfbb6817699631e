"""Call formats with arguments as JSON between the marks of several model families. See calls.CallFormat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from llmc_runtime.server.tool_calls.call_format import CallFormat, Malformed, Steps
from llmc_runtime.server.tool_calls.lark_text import Marker, choice_of, lark, repeated


class JsonList(CallFormat):
    """A mark, followed by a JSON list of {"name": ..., "arguments": {...}}."""

    between = None

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return cls.markers[0] in template

    @classmethod
    def behind(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        call = choice_of(tools, '{"name": "', '", "arguments": ', "}")
        first = "" if cls.markers[0].endswith("[") else '"[" '
        return f'behind: {first}{repeated("call", lark(", "), most)} "]"\ncall: {call}'

    @classmethod
    def openers(cls) -> Sequence[str]:
        """See CallFormat."""
        return cls.markers

    def _reading(self) -> Steps[None]:
        while (opener := (yield from self._until(*self.markers))) is not None:
            self._at -= opener.endswith("[")
            yield from self._attempt(self._list())


class Granite(JsonList):
    """A JSON list after <|tool_call|> or <tool_call>, used by Granite 3."""

    name = "granite"
    markers = ("<|tool_call|>", "<tool_call>")

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat; Phi-4-mini uses the same mark around tools."""
        return "<|tool_call|>" in template and "<|tool|>" not in template


class Phi4Mini(JsonList):
    """A JSON list after the word functools, used by Phi-4-mini."""

    name = "phi4_mini_json"
    markers = ("functools[",)

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "functools[" in template


class Granite20b(CallFormat):
    """<function_call> {"name": ..., "arguments": {...}}, used by Granite 20B."""

    name = "granite-20b-fc"
    markers = ("<function_call>",)

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "<function_call>" in template

    @classmethod
    def behind(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        calls = choice_of(tools, '{"name": "', '", "arguments": ', "}")
        return f'behind: " " call\ncall: {calls}'

    def _reading(self) -> Steps[None]:
        while (yield from self._until(*self.markers)) is not None:
            yield from self._attempt(self._object())


class Sectioned(CallFormat):
    """A section between `markers[0]` and `markers[1]` with a list of calls.

    Each call consists of `markers[2]`, the name, `markers[3]`, the arguments and `markers[4]`.
    """

    between = None
    line: ClassVar[str] = ""  # text between calls

    @classmethod
    def openers(cls) -> Sequence[str]:
        """See CallFormat."""
        return cls.markers[0], cls.markers[2]

    @classmethod
    def behind(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        _, end, call, middle, call_end = map(marker, cls.markers[:5])
        calls = " | ".join(f"{cls._head(name, middle)} {rule} {cls._tail()}" for name, rule in tools.items())
        one = f"one_call: {call} (call) {call_end}"
        return f"behind: {repeated('one_call', lark(cls.line), most)} {end}\n{one}\ncall: {calls}"

    @classmethod
    def _head(cls, name: str, middle: str) -> str:
        return f"{lark(name)} {middle}"

    @classmethod
    def _tail(cls) -> str:
        return ""

    def _reading(self) -> Steps[None]:
        while (opener := (yield from self._until(*self.openers()))) is not None:
            if (yield from self._attempt(self._section(opener))):
                yield from self._optional(self.markers[1])

    def _section(self, opener: str) -> Steps[None]:
        """Parse the calls after the section's mark, or after a call's mark if the former was left out."""
        if opener == self.markers[0]:
            yield from self._expect(self.markers[2])
        yield from self._one()
        while (yield from self._optional(self.markers[2])):
            yield from self._one()

    def _one(self) -> Steps[None]:
        yield from self._next()
        name = yield from self._name()
        if not self._is_name(name) or (yield from self._next()) not in ("{", "n"):
            raise Malformed
        yield from self._arguments(name)
        self._mark = self._at
        yield from self._closed()
        self._mark = self._at

    def _name(self) -> Steps[str]:
        """Consume the name and everything up to the arguments, and return the name."""
        name = yield from self._word()
        yield from self._expect(self.markers[3])
        return name

    def _closed(self) -> Steps[None]:
        """Consume what follows the arguments."""
        yield from self._expect(self.markers[4])


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)


class DeepSeekV31(Sectioned):
    """<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>, used by DeepSeek V3.1."""

    name = "deepseek_v31"
    markers = _DEEPSEEK

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "<｜tool▁call▁begin｜>" in template and "```json" not in template


class DeepSeekV3(Sectioned):
    """<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, the arguments, and <｜tool▁call▁end｜>.

    Used by DeepSeek V3 and R1. The arguments are in a Markdown code block.
    """

    name = "deepseek_v3"
    markers = _DEEPSEEK
    line = "\n"

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "<｜tool▁call▁begin｜>" in template and "```json" in template

    @classmethod
    def _head(cls, name: str, middle: str) -> str:
        return f'"function" {middle} {lark(name + chr(10) + "```json" + chr(10))}'

    @classmethod
    def _tail(cls) -> str:
        return lark("\n```")

    def _name(self) -> Steps[str]:
        kind = yield from self._word()
        yield from self._expect(self.markers[3])
        if kind != "function":
            raise Malformed
        yield from self._next()
        name = yield from self._word()
        yield from self._expect("```json")
        return name

    def _closed(self) -> Steps[None]:
        yield from self._expect("```")
        yield from self._expect(self.markers[4])


class KimiK2(Sectioned):
    """<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>, used by Kimi K2."""

    name = "kimi_k2"
    markers = (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    )  # fmt: skip

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "<|tool_calls_section_begin|>" in template

    @classmethod
    def call_id(cls, name: str, index: int) -> str:
        """See CallFormat; the template writes the id in place of a call's name."""
        return f"functions.{name}:{index}"

    @classmethod
    def _head(cls, name: str, middle: str) -> str:
        return f"{lark(f'functions.{name}:')} /[0-9]{{1,3}}/ {middle}"

    def _name(self) -> Steps[str]:
        name = yield from self._word()
        if (yield from self._next(solid=False)) == ".":
            self._at += 1
            if name != "functions":
                raise Malformed
            name = yield from self._word()
        if (yield from self._next(solid=False)) == ":":
            self._at += 1
            if not (yield from self._word()).isdigit():
                raise Malformed
        yield from self._expect(self.markers[3])
        return name
