"""Calls as a list of Python calls with keyword arguments and literals as values; nothing is evaluated.

See tagged_args.ArguedFormat. As the format has no required mark, the name has to be that of a tool.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from llmc_runtime.server.tool_calls.call_format import Malformed, Steps
from llmc_runtime.server.tool_calls.definitions import NAME
from llmc_runtime.server.tool_calls.lark_text import Marker, json_rule, lark, led, regex, repeated
from llmc_runtime.server.tool_calls.python_literals import PythonText
from llmc_runtime.server.tool_calls.tagged_args import ArguedFormat, Field
from llmc_runtime.server.tool_calls.text_values import types_of

_MOST_FIELDS = 64  # maximum number of arguments without a schema
_WORDS = MappingProxyType({"boolean": '"True" | "False"', "null": '"None"'})


class Pythonic(ArguedFormat):
    """[NAME(KEY=VALUE, ...), ...] at the start of a line, or between `markers[0]` and `markers[1]`."""

    name = "pythonic"
    markers = ("<|python_start|>", "<|python_end|>")
    between = None
    hidden: ClassVar[Sequence[str]] = ("<|python_start|>",)
    pattern: ClassVar[re.Pattern[str] | None] = re.compile(r"\[func_name1\(|name\s*[+~]\s*['\"]\(")

    def _reading(self) -> Steps[None]:
        while (opener := (yield from self._until(self.markers[0], "["))) is not None:
            if opener == "[":
                self._at -= 1
                if not self._fresh_line:
                    self._mark = None
                    self._at += 1
                    self._say("[")
                    continue
            if (yield from self._attempt(self._python_calls())) and opener != "[":
                yield from self._optional(self.markers[1])

    def _python_calls(self) -> Steps[None]:
        yield from self._symbol("[")
        end = ","
        while end == ",":
            yield from self._next()
            name = yield from self._word()
            if name not in self._tools:
                raise Malformed
            self._open(name)
            yield from self._keywords()
            end = yield from self._symbol(",]")

    def _keywords(self) -> Steps[None]:
        yield from self._symbol("(")
        end = ","
        while end == ",":
            if (yield from self._next()) == ")":
                end = yield from self._symbol(")")
                break
            key = yield from self._word()
            if not NAME.fullmatch(key):
                raise Malformed
            yield from self._symbol("=")
            yield from self._keyword(key)
            end = yield from self._symbol(",)")
        self._close()

    def _keyword(self, key: str) -> Steps[None]:
        """Parse an argument's value, and emit it as it arrives."""
        begun, scan = False, PythonText()

        def take(text: str) -> None:
            nonlocal begun
            if not begun:
                self._key(key)
            begun = True
            self._argue(text)
            self._mark = self._at - scan.unsaid

        yield from self._value(take, scan)

    # --- grammars

    @classmethod
    def behind(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        calls = " | ".join(f'{lark(name + "(")} {rule} ")"' for name, rule in tools.items())
        whole = f'behind: "[" {repeated("call", lark(", "), most)} "]"'
        return "\n".join([whole, f"call: {calls}", *cls._shared(marker)])

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat; there is no mark before the calls."""
        return f"calls: behind\n{cls.behind(tools, marker, most)}"

    @classmethod
    def free_rules(cls, tools: Mapping[str, str], marker: Marker, most: int, known: Collection[str]) -> str:
        """See CallFormat."""
        (begin, end), never = cls.markers, rf"\[[ \t\r\n]*({'|'.join(map(regex, known))})\("
        closing = '")" "]"' if most == 1 else f'")" (", " call){{0,{most - 1}}} "]"'
        whole = led(tools, lambda name: rf"\[ ?{name}\(", closing, never, begin, marker, f"{marker(end)}?")
        return f"{whole}\n{cls.behind(tools, marker, most)}"

    @classmethod
    def _any(cls, rule: str, marker: Marker) -> str:
        one = f'{rule}_one: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" ({" | ".join(_WORDS.values())} | {rule}_json)'
        return f"{rule}: ({repeated(f'{rule}_one', lark(', '), _MOST_FIELDS)})?\n{one}\n{rule}_json: {json_rule({})}"

    @classmethod
    def _joined(cls, rule: str, fields: Sequence[Field]) -> Sequence[str]:
        """Return rules for the arguments in order.

        `RULE_hI` matches the arguments from number I on if none was written before, and `RULE_tI` if some were.
        """
        lines, last = [], len(fields)
        for i, field in enumerate(fields):
            rest, mark = f"{rule}_t{i + 1}", "" if field.required else "?"
            lines.append(f"{rule}_h{i}: {field.rule} {rest}{'' if field.required else f' | {rule}_h{i + 1}'}")
            lines.append(f'{rule}_t{i}: (", " {field.rule}){mark} {rest}')
        return [f"{rule}: {rule}_h0", *lines, f'{rule}_h{last}: ""', f'{rule}_t{last}: ""']

    @classmethod
    def _field(cls, field: Field, marker: Marker) -> Sequence[str]:
        if not NAME.fullmatch(field.key):
            raise cls._unsaid(f"the property {field.key[:60]!r}")
        lines, values = [], []
        for i, one in enumerate(cls._alternatives(field)):
            rule, types = f"{field.rule}_{i}", types_of(one, field.root)
            word = (
                _WORDS.get(next(iter(types))) if len(types) == 1 and "enum" not in one and "const" not in one else None
            )
            found, more = (word, []) if word else cls._json(rule, one, field.root)
            values.append(found)
            lines += more
        return [f"{field.rule}: {lark(field.key + '=')} ({' | '.join(values)})", *lines]


class Llama4Pythonic(Pythonic):
    """The same between <|python_start|> and <|python_end|>, or without them, used by Llama 4."""

    name = "llama4_pythonic"
    shown = ("<|header_start|>",)
    hidden = ()


class Lfm2(Pythonic):
    """The same between <|tool_call_start|> and <|tool_call_end|>, used by LFM2."""

    name = "lfm2"
    markers = ("<|tool_call_start|>", "<|tool_call_end|>")
    shown = ("<|tool_call_start|>",)
    hidden = ()
    pattern = None
    token = "<|tool_call_start|>"

    @classmethod
    def rules(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        begin, end = map(marker, cls.markers)
        return f"calls: {begin} behind {end}\n{cls.behind(tools, marker, most)}"
