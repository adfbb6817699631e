"""Base of call formats that write each argument separately, by name, instead of one JSON object.

In their grammars, arguments follow the order of the schema's properties, and unknown arguments are excluded.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc_runtime.grammar.lark_text import ANY, Marker, charged, json_rule, slashed
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.tool_calls.call_format import CallFormat
from llmc_runtime.server.tool_calls.definitions import enforced
from llmc_runtime.server.tool_calls.text_values import KINDS, PartBudget, resolved

APART = ("allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "dependentSchemas", "$ref")
MAX_FIELDS = 64  # maximum number of arguments without a schema
# Keywords of a schema of arguments that only JSON can express, or that restrict which properties an object has.
_RESTRICTING = (*APART, "minProperties", "maxProperties", "dependentRequired")


@dataclass(frozen=True)
class Field:
    """An argument in a grammar: the name of its rule, its key, its schema, the schema of all arguments, and whether it
    is required.
    """

    rule: str
    key: str
    schema: Any
    root: Mapping[str, Any]
    required: bool


class ArguedFormat(CallFormat):
    """A format that writes arguments one by one; this class assembles them to a JSON object."""

    _call: str | None = None  # the tool of the current call, until its first output
    _fields = 0  # number of arguments so far

    def _open(self, name: str) -> None:
        """Start a call of this tool. It is emitted with its first argument, or at its end."""
        self._call, self._fields, self._is_call = name, 0, name in self._tools

    def _key(self, key: str) -> None:
        """Emit the key of an argument; its value follows."""
        self._certain()
        self._emit_arguments(f"{', ' if self._fields else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._fields += 1

    def _close(self) -> None:
        """End the call."""
        self._certain()
        self._emit_arguments("}" if self._fields else "{}")
        self._mark = self._at

    def _certain(self) -> None:
        if self._call is not None:
            self._emit_name(self._call)
            self._call = None

    # --- grammars

    @classmethod
    def arguments(cls, rule: str, schema: dict[str, Any], marker: Marker, exact: bool) -> str:
        """See CallFormat."""
        if not exact or _admits_any(schema):
            return cls._any(rule, marker)
        schema = enforced(schema)
        keyword = next((key for key in _RESTRICTING if key in schema), None)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if keyword is not None or not isinstance(properties, dict) or not isinstance(required, list):
            raise cls._inexpressible(keyword or "properties")
        undeclared = [name for name in required if name not in list(properties)]
        if undeclared:
            raise cls._inexpressible(f"required: {str(undeclared[0])[:60]!r}, which is not one of its properties")
        fields = [
            Field(f"{rule}_{i}", key, value, schema, key in required)
            for i, (key, value) in enumerate(properties.items())
        ]
        lines = [charged(line) for field in fields for line in cls._field(field, marker)]
        return "\n".join([*cls._joined(rule, fields), *lines])

    @classmethod
    def _inexpressible(cls, feature: str) -> ApiError:
        """Return the ApiError for a part of a schema that a grammar of this format cannot express."""
        cause = f"tools: a schema of arguments has {feature}, which a grammar of the format {cls.name} cannot express"
        remedy = "leave it out, or use tool_choice auto, without strict"
        return ApiError(f"{cause}. Try: {remedy}", param="tools")

    @classmethod
    def _shared(cls, marker: Marker) -> Sequence[str]:
        """Return rules that are shared by the values of many arguments."""
        return [f"any_{kind}: {json_rule({'type': kind})}" for kind in KINDS]

    @classmethod
    def _json(cls, rule: str, schema: dict[str, Any], root: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Return the rule for JSON of this schema, which may be `rule` or a shared one, and the rules it requires."""
        if set(schema) == {"type"} and schema["type"] in KINDS:
            return f"any_{schema['type']}", []
        return rule, [f"{rule}: {json_rule(whole(schema, root))}"]

    @classmethod
    def _patterns(cls, field: Field, schema: Mapping[str, Any]) -> list[str]:
        """Return regular expressions that a string of this schema has to match. Raises ApiError 400 if they do not
        cover the schema.
        """
        bad = next((key for key in APART if key in schema), None)
        try:
            if bad is None:
                return patterns_of(schema)
        except Inexpressible as e:
            bad = str(e)
        raise cls._inexpressible(f"{bad} for the property {field.key[:60]!r}")

    @classmethod
    def _alternatives(cls, field: Field) -> list[dict[str, Any]]:
        """Return schemas of which an argument's value matches one. Raises ApiError 400 if they cannot be determined."""
        try:
            return alternatives(field.schema, field.root)
        except Inexpressible as e:
            raise cls._inexpressible(f"{e} for the property {field.key[:60]!r}") from None

    @classmethod
    @abstractmethod
    def _any(cls, rule: str, marker: Marker) -> str:
        """Return rules in which `rule` matches any arguments."""

    @classmethod
    @abstractmethod
    def _field(cls, field: Field, marker: Marker) -> Sequence[str]:
        """Return rules in which `field.rule` matches the argument."""

    @classmethod
    @abstractmethod
    def _joined(cls, rule: str, fields: Sequence[Field]) -> Sequence[str]:
        """Return rules in which `rule` matches all required `fields` and any of the others."""


def _admits_any(schema: dict[str, Any]) -> bool:
    """Whether a schema of arguments admits any object. An empty schema is that of a tool without arguments."""
    if not schema or "properties" in schema or schema.get("additionalProperties") is False:
        return False
    return not any(key in schema for key in _RESTRICTING)


class Inexpressible(Exception):
    """A part of a schema that a grammar of plain values cannot express; the message names it."""


def alternatives(schema: Any, root: Mapping[str, Any], budget: PartBudget | None = None) -> list[dict[str, Any]]:
    """Resolve a schema into alternatives of which a value matches one, without references and with a single type each.

    Raises Inexpressible if there are more than `budget` covers, or if references cannot be resolved.
    """
    budget = budget or PartBudget()
    target = {} if schema is True else resolved(schema, root)
    has_siblings = target is not schema and isinstance(schema, dict) and len(schema) > 1  # keywords next to a $ref
    if not budget.spend() or target is None or has_siblings:
        raise Inexpressible("a $ref that cannot be resolved or has other keywords next to it")
    if list(target) == ["allOf"] and isinstance(target["allOf"], list) and len(target["allOf"]) == 1:
        return alternatives(target["allOf"][0], root, budget)
    for key in ("anyOf", "oneOf"):
        if list(target) == [key] and isinstance(target[key], list):
            return [option for part in target[key] for option in alternatives(part, root, budget)]
    if isinstance(target.get("type"), list):
        return [{**target, "type": name} for name in target["type"]]
    return [target]


def whole(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of the schema `root` together with its definitions, so that it can be used by itself."""
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


def patterns_of(schema: Mapping[str, Any]) -> list[str]:
    """Return regular expressions that a string of this schema has to match, for its length and its pattern.

    Raises Inexpressible if the schema is invalid.
    """
    min_length, max_length, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern", "")
    if type(min_length) is not int or type(max_length) not in (int, type(None)) or not isinstance(pattern, str):
        raise Inexpressible("minLength, maxLength or pattern of the wrong type")
    patterns: list[str] = []
    if min_length or max_length is not None:
        maximum = "" if max_length is None else max_length
        patterns.append(f"(?s:.{{{min_length},{maximum}}})")
    if pattern:
        body = pattern.removeprefix("^")
        begin = ANY if body == pattern else ""
        end = "" if body.endswith("$") and not body.endswith("\\$") else ANY
        patterns.append(slashed(f"{begin}({body if end else body[:-1]}){end}"))
    return patterns or [ANY]
