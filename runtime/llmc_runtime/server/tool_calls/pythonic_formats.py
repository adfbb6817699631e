"""Calls as a list of Python calls with keyword arguments and literals as values; nothing is evaluated.

See tagged_args.ArguedFormat. As the format has no required mark, the name has to be that of a tool.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from llmc_runtime.server.tool_calls.call_format import Malformed, Steps
from llmc_runtime.server.tool_calls.definitions import NAME
from llmc_runtime.server.tool_calls.lark_text import Marker, json_rule, lark, led, regex, repeated
from llmc_runtime.server.tool_calls.python_literals import PythonText
from llmc_runtime.server.tool_calls.tagged_args import APART, ArguedFormat, Field
from llmc_runtime.server.tool_calls.text_values import types_of

_MOST_FIELDS = 64  # maximum number of arguments without a schema
_CONSTANTS = ((None, "null"), (True, "boolean"), (False, "boolean"))  # values that JSON spells differently
_CONSTANT_TYPES = (frozenset({"null"}), frozenset({"boolean"}))


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
        values = " | ".join([*_constants({}, {}), f"{rule}_json"])
        one = f'{rule}_one: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" ({values})'
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
            literals, rules = cls._literals(f"{field.rule}_{i}", one, field.root)
            values += literals
            lines += rules
        return [f"{field.rule}: {lark(field.key + '=')} ({' | '.join(values)})", *lines]

    @classmethod
    def _literals(cls, rule: str, schema: dict[str, Any], root: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return expressions for the values of a schema, and the rules that they require.

        null and booleans are written as in Python, and as JSON too if the schema has other types, `enum` or `const`.
        If it has parts that apply together, such as allOf, only JSON can express it.
        """
        constants = _constants(schema, root)
        if types_of(schema, root) in _CONSTANT_TYPES and "enum" not in schema and "const" not in schema:
            return constants, []
        as_json, rules = cls._json(rule, schema, root)
        return [as_json] if any(key in schema for key in APART) else [*constants, as_json], rules


def _constants(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
    """Return Lark literals of the Python constants that the type, `enum` and `const` of a schema admit."""
    listed = [schema["enum"]] if isinstance(schema.get("enum"), list) else []
    listed += [[schema["const"]]] if "const" in schema else []
    types = types_of({key: part for key, part in schema.items() if key not in ("enum", "const", "nullable")}, root)
    return [
        lark(repr(constant))
        for constant, kind in _CONSTANTS  # compared by identity, as True == 1
        if (not types or kind in types) and all(any(value is constant for value in values) for values in listed)
    ]


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
