"""The formats of tool calls that models write; each is a reader of text and a grammar (see calls.CallFormat)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from llmc_runtime.server.tools.calls import NAME, CallFormat, Malformed, Steps, choice_of, lark, repeated

Marker = Callable[[str], str]
_HEADER = 256  # characters of the longest


class Hermes(CallFormat):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen write it."""

    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")

    @classmethod
    def fits(cls, template: str) -> bool:
        """Models of other families have the mark, too, and XML within."""
        others = ("<function=", "<arg_key>", "<parameter=")
        return "<tool_call>" in template and "arguments" in template and not any(one in template for one in others)

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        begin, end = map(marker, cls.markers)
        calls = choice_of(tools, '{"name": "', '", "arguments": ', "}")
        one = f'one: {begin} "\\n" call "\\n" {end}'
        return f"calls: {repeated('one', lark(chr(10)), most)}\n{one}\ncall: {calls}"

    def _reading(self) -> Steps[None]:
        while (yield from self._until("<tool_call>")) is not None:
            if (yield from self._attempt(self._object())):
                yield from self._optional("</tool_call>")


class Llama3Json(CallFormat):
    """{"name": ..., "parameters": {...}} at the beginning of a line or behind <|python_tag|>, as Llama 3 writes it.
    There is no other mark, so the name has to be a tool's."""

    name = "llama3_json"
    markers = ("<|python_tag|>",)
    several = False

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "parameters" in template and any(one in template for one in ("<|python_tag|>", "ipython"))

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        return "calls: " + choice_of(tools, '{"name": "', '", "parameters": ', "}")

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
                if not tagged and not (yield from self._optional("{", consume=False)):
                    self._say(";")

    def _is_name(self, name: str) -> bool:
        return name in self._names


class Mistral(CallFormat):
    """[TOOL_CALLS] with a list of {"name": ..., "arguments": {...}}, or NAME[ARGS]{...} for each call."""

    name = "mistral"
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    short_ids = True

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "[TOOL_CALLS]" in template

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        begin = marker("[TOOL_CALLS]")
        call = choice_of(tools, '{"name": "', '", "arguments": ', "}")
        return f'calls: {begin} " "? "[" {repeated("call", lark(", "), most)} "]"\ncall: {call}'

    def _reading(self) -> Steps[None]:
        while (yield from self._until("[TOOL_CALLS]")) is not None:
            first = yield from self._next()
            readers = {"[": self._list, "{": self._object}
            yield from self._attempt(readers.get(first, self._named)())

    def _list(self) -> Steps[None]:
        yield from self._symbol("[")
        end = ","
        while end == ",":
            yield from self._object()
            self._mark = self._at  # what follows makes sense, or is content
            end = yield from self._symbol(",]")

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

    def _word(self) -> Steps[str]:
        """Characters of a name, as many as there are, and one more than are allowed."""
        word = ""
        while len(word) <= 64:
            char = yield from self._next(solid=False)
            if not NAME.fullmatch(char):
                break
            word += char
            self._at += 1
        return word


class MistralArgs(Mistral):
    """The newer of Mistral's two forms where calls are enforced; both are read."""

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "[TOOL_CALLS]" in template and "[ARGS]" in template

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        begin, args, call_id = map(marker, cls.markers)
        middle = f"({call_id} /[A-Za-z0-9]{{9}}/)? {args}"
        call = " | ".join(f"{lark(name)} {middle} {rule}" for name, rule in tools.items())
        return f"calls: one{{1,{most}}}\none: {begin} (call)\ncall: {call}"


class OpenAI(CallFormat):
    """gpt-oss's messages: <|channel|>final<|message|> and content, or commentary to=functions.NAME and arguments; each
    but the first behind <|start|>assistant. The analysis in front is reasoning. Only tools are called."""

    name = "openai"
    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
    several = False
    channels = True

    @classmethod
    def fits(cls, template: str) -> bool:
        """See CallFormat."""
        return "<|channel|>" in template and "<|message|>" in template

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        start, channel, constrain, message = map(marker, cls.markers)
        end = f'{constrain} "json" {message}'
        calls = " | ".join(
            f"{lark(f'commentary to=functions.{name} ')} {end} {arguments}" for name, arguments in tools.items()
        )
        return f'calls: ({start} "assistant")? {channel} (call)\ncall: {calls}'

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
            self._mark = None  # what follows is content
        elif to is not None and to[1] in self._names:
            yield from self._arguments(to[1])
        else:
            raise Malformed


FORMATS: Sequence[type[CallFormat]] = (
    MistralArgs,
    Mistral,
    OpenAI,
    Hermes,
    Llama3Json,
)  # of one name, the first that fits
