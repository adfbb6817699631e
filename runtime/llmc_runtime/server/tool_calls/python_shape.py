"""Calls as a list of Python calls with keyword arguments and literals as values. They are parsed, not evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmc_runtime.grammar.lark_text import Marker, json_rule, lark, regex, repeated
from llmc_runtime.server.requests.request_fields import FUNCTION_NAME
from llmc_runtime.server.tool_calls.call_format import Malformed, Steps
from llmc_runtime.server.tool_calls.python_literals import PythonText
from llmc_runtime.server.tool_calls.tagged_args import APART, MAX_FIELDS, ArguedFormat, Field
from llmc_runtime.server.tool_calls.text_values import types_of
from llmc_runtime.server.tool_calls.unmarked import Unmarked

_CONSTANTS = ((None, "null"), (True, "boolean"), (False, "boolean"))  # values that JSON spells differently
_CONSTANT_TYPES = (frozenset({"null"}), frozenset({"boolean"}))


class PythonShape(Unmarked, ArguedFormat):
    """[NAME(KEY=VALUE, ...), ...]. A subclass is a declaration.

    The notation is declared once, by the texts below; a reader allows white space around them.
    """

    between = None
    bracket = "["
    _BETWEEN, _END = ", ", "]"  # text between calls, and after the last one
    _ARGUMENTS, _IS, _NEXT, _CALL_END = "(", "=", ", ", ")"

    # --- reader

    def _parse_calls(self, opener: str) -> Steps[None]:
        yield from self._symbol(self.bracket)
        separator = end = self._BETWEEN.strip()
        while end == separator:
            yield from self._next()
            name = yield from self._word()
            if not self._is_name(name):
                raise Malformed
            self._open(name)
            yield from self._keywords()
            end = yield from self._symbol(separator + self._END)

    def _keywords(self) -> Steps[None]:
        """Parse the arguments of a call, with an optional comma after the last one."""
        yield from self._symbol(self._ARGUMENTS)
        separator = end = self._NEXT.strip()
        while end == separator:
            if (yield from self._next()) == self._CALL_END:
                yield from self._symbol(self._CALL_END)
                break
            key = yield from self._word()
            if not FUNCTION_NAME.fullmatch(key):
                raise Malformed
            yield from self._symbol(self._IS)
            yield from self._keyword(key)
            end = yield from self._symbol(separator + self._CALL_END)
        self._close()

    def _keyword(self, key: str) -> Steps[None]:
        """Parse an argument's value, and emit it as it arrives."""
        begun, scan = False, PythonText()

        def take(text: str) -> None:
            nonlocal begun
            if not begun:
                self._key(key)
            begun = True
            self._emit_arguments(text)
            self._mark = self._at - scan.unsaid

        yield from self._value(take, scan)

    # --- grammar

    @classmethod
    def after_mark(cls, tools: Mapping[str, str], marker: Marker, max_calls: int) -> str:
        """See CallFormat."""
        end = lark(cls._CALL_END)
        calls = " | ".join(f"{lark(name + cls._ARGUMENTS)} {rule} {end}" for name, rule in tools.items())
        whole = f"after_mark: {lark(cls.bracket)} {repeated('call', lark(cls._BETWEEN), max_calls)} {lark(cls._END)}"
        return "\n".join([whole, f"call: {calls}", *cls._shared(marker)])

    @classmethod
    def _opening(cls, name: str) -> str:
        return f"{regex(cls.bracket)} ?{name}{regex(cls._ARGUMENTS)}"

    @classmethod
    def _closing(cls, rule: str, max_calls: int) -> str:
        more = "" if max_calls == 1 else f"({lark(cls._BETWEEN)} call){{0,{max_calls - 1}}}"
        return f"{rule} {lark(cls._CALL_END)} {more} {lark(cls._END)}"

    @classmethod
    def _openings(cls, names: str) -> str:
        return rf"{regex(cls.bracket)}[ \t\r\n]*({names}){regex(cls._ARGUMENTS)}"

    @classmethod
    def _any(cls, rule: str, marker: Marker) -> str:
        values = " | ".join([*_constants({}, {}), f"{rule}_json"])
        pair = f"{rule}_one: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {lark(cls._IS)} ({values})"
        pairs = repeated(f"{rule}_one", lark(cls._NEXT), MAX_FIELDS)
        return f"{rule}: ({pairs})?\n{pair}\n{rule}_json: {json_rule({})}"

    @classmethod
    def _joined(cls, rule: str, fields: Sequence[Field]) -> Sequence[str]:
        """Return rules for the arguments in order.

        `RULE_hI` matches the arguments from number I on if none was written before, and `RULE_tI` if some were.
        """
        lines = []
        for i, field in enumerate(fields):
            later = f"{rule}_t{i + 1}"
            or_without, optional = ("", "") if field.required else (f" | {rule}_h{i + 1}", "?")
            lines.append(f"{rule}_h{i}: {field.rule} {later}{or_without}")
            lines.append(f"{rule}_t{i}: ({lark(cls._NEXT)} {field.rule}){optional} {later}")
        end = len(fields)
        return [f"{rule}: {rule}_h0", *lines, f'{rule}_h{end}: ""', f'{rule}_t{end}: ""']

    @classmethod
    def _field(cls, field: Field, marker: Marker) -> Sequence[str]:
        if not FUNCTION_NAME.fullmatch(field.key):
            raise cls._inexpressible(f"the property {field.key[:60]!r}")
        lines, values = [], []
        for i, schema in enumerate(cls._alternatives(field)):
            literals, rules = cls._literals(f"{field.rule}_{i}", schema, field.root)
            values += literals
            lines += rules
        return [f"{field.rule}: {lark(field.key + cls._IS)} ({' | '.join(values)})", *lines]

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
    ids = [set(map(id, values)) for values in listed]  # True == 1, but they are different objects

    def admits(constant: object, kind: str) -> bool:
        return (not types or kind in types) and all(id(constant) in allowed for allowed in ids)

    return [lark(repr(constant)) for constant, kind in _CONSTANTS if admits(constant, kind)]
