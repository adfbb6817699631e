"""Converts values that models write as plain text to JSON, by the type in a tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llmc_runtime.server.tool_calls.json_stream import SPACE, JsonText
from llmc_runtime.server.tool_calls.python_literals import PythonText

STRING = frozenset({"string"})
_MAX_PARTS = 256
_MAX_REFS = 16
_MAX_REF = 1024  # characters
KINDS = ("string", "integer", "number", "boolean", "null", "array", "object")  # JSON types
# Includes Python's names for JSON types, which some clients' tools use.
_TYPES = MappingProxyType(
    {kind: kind for kind in KINDS}
    | {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
)
_NAMES: Mapping[type, str] = MappingProxyType(
    {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array", dict: "object"}
)
_FIRST = MappingProxyType({"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"})


class PartBudget:
    """The number of parts of a schema that may still be read: references can make a small schema infinite.

    The types of a list of values are determined once, however often it is referred to.
    """

    def __init__(self) -> None:
        self._remaining = _MAX_PARTS
        self._listed = dict[int, frozenset[str]]()  # by the identity of the list

    def spend(self) -> bool:
        """Count one part. Return whether the budget covers it."""
        self._remaining -= 1
        return self._remaining >= 0

    def types_of_values(self, values: list[Any]) -> frozenset[str]:
        """Return the JSON types of these values, a list of the schema."""
        if (names := self._listed.get(id(values))) is None:
            names = self._listed[id(values)] = frozenset(_NAMES[kind] for kind in set(map(type, values)))
        return names


def property_of(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of an argument from the schema of all arguments; None if it has none."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    more = schema.get("additionalProperties")
    return more if isinstance(more, dict) else None


def types_of(schema: Any, root: Mapping[str, Any], budget: PartBudget | None = None) -> frozenset[str]:
    """Return the JSON types that a part of the schema `root` allows.

    The result is empty if the schema does not restrict them, or if it has more parts, including references, than
    `budget` covers.
    """
    budget = budget or PartBudget()
    schema = resolved(schema, root)
    if not budget.spend() or schema is None:
        return frozenset()
    if "const" in schema:
        return frozenset({_NAMES[type(schema["const"])]})
    if isinstance(schema.get("enum"), list):
        return budget.types_of_values(schema["enum"])
    types = _declared_types(schema) or _combined_types(schema, root, budget)
    if not types:
        types = {kind for key, kind in (("properties", "object"), ("items", "array")) if key in schema}
    if types and schema.get("nullable") is True:
        types.add("null")
    return frozenset(types)


def _declared_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that the keyword `type` names."""
    names = schema.get("type")
    listed = names if isinstance(names, list) else [names]
    return {_TYPES[name] for name in listed if isinstance(name, str) and name in _TYPES}


def _combined_types(schema: Mapping[str, Any], root: Mapping[str, Any], budget: PartBudget) -> set[str]:
    """Return the types of `anyOf`, `oneOf` (all parts must restrict them), or the first part of `allOf` that does."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            alternatives = [types_of(part, root, budget) for part in schema[key]]
            if alternatives and all(alternatives):
                return set().union(*alternatives)
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        if types := types_of(part, root, budget):
            return set(types)
    return set()


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any] | None:
    """Follow references and return the schema; None if they lead nowhere."""
    for _ in range(_MAX_REFS):
        if not isinstance(schema, dict):
            return None
        path = schema.get("$ref")
        if path is None:
            return schema
        if not isinstance(path, str) or not path.startswith("#/") or len(path) > _MAX_REF:
            return None
        schema = root
        for step in path[2:].split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return None


class ScannedText:
    """A text that is read as one value in the notation of `scan`, with optional white space around it."""

    def __init__(self, scan: JsonText | PythonText) -> None:
        self._scan, self._parts, self._begun, self.failed = scan, list[str](), False, False

    def push(self, text: str) -> None:
        """Append text."""
        if not self._begun:
            text = text.lstrip(SPACE)
            self._begun = bool(text)
        rest = text[self._scan.feed(text, 0) :]
        self._parts.append(self._scan.take())
        self.failed = self._scan.failed or bool(rest.strip(SPACE))

    def json(self) -> str | None:
        """End the text, and return the value as JSON; None if the text is not a value."""
        if not self.failed:
            self.push("\n")  # ends a number or a word
        return "".join(self._parts) if self._scan.done and not self.failed else None


class ValueText:
    """Converts a value that is written as text to JSON. The text is read as it arrives: reading a long one at its end
    would hold the event loop for long.
    """

    def __init__(self) -> None:
        self._text = list[str]()
        self._scans = ScannedText(JsonText()), ScannedText(PythonText())

    def push(self, text: str) -> None:
        """Append text."""
        self._text.append(text)
        for scan in self._scans:
            if not scan.failed:
                scan.push(text)

    def json(self, types: frozenset[str]) -> str:
        """End the text, and return the JSON of the value, preferably of one of `types`.

        A value that can only be read as another type has that type; text that cannot be read otherwise is a string.
        """
        for scan in self._scans if types != STRING else ():
            value = scan.json()
            if value is not None and _kept(_type_of(value), types):
                return value
        return json.dumps("".join(self._text), ensure_ascii=False)


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value written as `text` (see ValueText.json)."""
    value = ValueText()
    value.push(text)
    return value.json(types)


def _kept(kind: str, types: frozenset[str]) -> bool:
    """Return whether a value that can be read as this type should be, instead of as a string."""
    if kind == "string":
        return bool(types) and "string" not in types
    return kind in types or (kind == "integer" and "number" in types) or "string" not in types


def _type_of(value: str) -> str:
    """Return the JSON type of a JSON text."""
    if value[0] in _FIRST:
        return _FIRST[value[0]]
    return "integer" if value.lstrip("-").isdigit() else "number"
