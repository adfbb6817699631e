"""Rewritten JSON schemas: their grammars accept exactly the values that are valid under the original schema."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import pytest
from llmc_runtime.grammar.definition import Definition, Refused, compile_matcher
from llmc_runtime.grammar.json_schema import supported
from llmc_runtime.sched.structured_outputs import StructuredOutputsParams

llguidance = pytest.importorskip("llguidance")
BYTES = llguidance.LLTokenizer("byte")
BITS = {"int8": 8, "int16": 16, "int32": 32, "uint8": 8, "uint16": 16, "uint32": 32}


def accepts(schema: Any, value: Any) -> bool:
    definition = Definition.of(StructuredOutputsParams(json=schema))
    matcher = compile_matcher(llguidance, BYTES, definition)
    text = json.dumps(value).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize("form", BITS)
def test_integer_formats_are_bounds(form: str) -> None:
    bits = BITS[form]
    low, high = (0, 2**bits - 1) if form.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)

    inner = [random.randint(low, high) for _ in range(8)]
    for value in (low, high, *inner):
        assert accepts({"type": "integer", "format": form}, value), value
    for value in (low - 1, high + 1, 10 * high + 7):
        assert not accepts({"type": "integer", "format": form}, value), value


def test_formats_join_a_schemas_own_bounds() -> None:

    for _ in range(40):
        low, high = sorted(random.randint(-300, 300) for _ in range(2))
        exclusive: Any = random.choice([None, True, False, random.randint(-300, 300)])
        schema: dict[str, Any] = {"type": "integer", "format": "int8", "minimum": low, "maximum": high}
        first = low
        if exclusive is not None:
            schema["exclusiveMinimum"] = exclusive
            first = low + exclusive if isinstance(exclusive, bool) else max(low, exclusive + 1)
        first, last = max(first, -128), min(high, 127)
        for value in {first - 1, first, last, last + 1, random.randint(-300, 300)}:
            if first <= last:
                assert accepts(schema, value) == (first <= value <= last), (schema, value)


@pytest.mark.parametrize("form, low", [("int64", -(2**63)), ("uint64", 0), ("int", -(2**63)), ("uint", 0)])
def test_formats_of_64_bits_exclude_a_few_values(form: str, low: int) -> None:
    schema = {"type": "integer", "format": form}
    for value in (low + 1024 * (low < 0), 2**63 - 1024, 2**53 + 1):
        assert accepts(schema, value), value
    for value in (low - 1, 2**64, -(2**70)):
        assert not accepts(schema, value), value


def test_bounds_that_allow_all_of_64_bits() -> None:
    """As in schemas generated from the types of a language."""
    for schema in (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": ["integer", "null"], "exclusiveMinimum": -(10**20), "exclusiveMaximum": 2**64},
    ):
        for value in (-(2**63) + 1024, 0, 2**63 - 2048):
            assert accepts(schema, value), value
        assert not accepts(schema, 10**19) and not accepts(schema, -(10**19))
    double = {"type": "number", "minimum": -sys.float_info.max, "maximum": sys.float_info.max}
    assert accepts(double, 0.5) and accepts({**double, "minimum": 0}, 7) and not accepts({**double, "minimum": 0}, -1)


@pytest.mark.parametrize("other", [1, 0.5, 0.001, -1, -0.5, -0.001])
@pytest.mark.parametrize("flag", [True, False])
def test_an_exclusive_bound_of_zero_excludes_zero(other: float, flag: bool) -> None:
    """With the flag of JSON Schema draft 4, and with a bound of its own."""
    near, exclusive, far = ("minimum", "exclusiveMinimum", "maximum")
    if other < 0:
        near, exclusive, far = "maximum", "exclusiveMaximum", "minimum"
    schema = {"type": "number", far: other, **({near: 0, exclusive: True} if flag else {exclusive: 0})}
    for value in (0, 0.0, -0.0, -other, 2 * other):
        assert not accepts(schema, value), value
    for value in (other, other / 2, other / 8):
        assert accepts(schema, value), value
    stricter = {"type": "number", near: other / 4, exclusive: 0, far: other}
    assert accepts(stricter, other / 4) and not accepts(stricter, other / 8)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 10**20, "maximum": 10**20 + 5}, {"type": "integer", "maximum": -(10**20)},
        {"type": "integer", "exclusiveMinimum": 2**63}, {"type": "number", "maximum": 1e20}, {"minimum": -(2**63)},
    ],
)  # fmt: skip
def test_bounds_that_no_grammar_has_are_refused(schema: Any) -> None:
    """llguidance would replace those of integers by the outermost integers of 64 bits, which violate the schema."""
    with pytest.raises(Refused, match=r"(minimum|maximum|exclusiveMinimum) is beyond 64 bits: "):
        accepts({"type": "array", "items": schema}, [])


def test_formats_hold_in_every_part() -> None:
    byte = {"type": "integer", "format": "uint8"}
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"$ref": "#/$defs/b"}},
            "c": {"anyOf": [byte, {"type": "null"}]},
        },
        "required": ["a", "c"],
        "additionalProperties": False,
        "$defs": {"b": byte},
    }
    assert accepts(schema, {"a": [255, 0], "c": None}) and accepts(schema, {"a": [], "c": 255})
    assert not accepts(schema, {"a": [256], "c": None}) and not accepts(schema, {"a": [], "c": 256})
    assert accepts({"type": ["integer", "null"], "format": "int8"}, None)
    assert accepts({"type": "number", "format": "int8"}, -128) and not accepts(
        {"type": "number", "format": "int8"}, 0.5
    )
    assert accepts({"type": "number", "format": "float"}, 0.5)
    example = {"const": {"type": "integer", "format": "int8"}}
    assert supported(example) == example  # a value, not a schema


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "integer", "format": "unix-time"}, "unknown format of integers: 'unix-time'"),
        ({"type": "object", "properties": {"a": {"type": "integer", "format": "int128"}}}, "'int128'"),
        ({"type": "string", "format": "int64"}, "Unknown format: int64"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"type": "object", "propertyNames": {"pattern": "a"}, "properties": {"b": {}}}, "propertyNames"),
    ],
)
def test_unsupported_keywords_are_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(Refused, match=message):
        accepts(schema, 0)


def test_a_schema_in_a_grammar_is_refused_in_the_same_words() -> None:
    with pytest.raises(Refused, match=r"^Unimplemented keys"):
        compile_matcher(llguidance, BYTES, Definition("grammar", 'start: %json {"not": {}}', False, False, None))


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False}, {"propertyNames": {"type": "string"}}, {"propertyNames": True}, {"propertyNames": {}},
        {"unevaluatedProperties": True}, {"not": False}, {"dependentRequired": {}}, {"dependencies": {}},
    ],
)  # fmt: skip
def test_keywords_that_allow_everything_are_left_out(keywords: dict[str, Any]) -> None:
    for value in ([1, 1], {"a": 1}):
        assert accepts({"type": ["array", "object"], **keywords}, value)


def test_names_of_properties() -> None:
    pattern = {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}}
    assert accepts(pattern, {"ab": 1, "ac": 2}) and accepts(pattern, {})
    assert not accepts(pattern, {"b": 1}) and not accepts(pattern, {"a": "x"})
    names = {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}}
    assert accepts(names, {"a": [1], "b": 2}) and not accepts(names, {"c": 1})


def test_options_with_a_discriminator() -> None:
    """As pydantic writes unions of classes whose kind has a default, and which therefore is not required."""

    def one(kind: str, form: str) -> dict[str, Any]:
        kinds = {"const": kind, "default": kind, "type": "string"}
        return {"type": "object", "properties": {"kind": kinds, "x": {"type": form}}, "required": ["x"]}

    schema = {
        "$defs": {"A": one("a", "integer"), "B": one("b", "string")},
        "discriminator": {"mapping": {"a": "#/$defs/A", "b": "#/$defs/B"}, "propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    }
    before = json.dumps(schema)
    assert accepts(schema, {"kind": "a", "x": 1}) and accepts(schema, {"kind": "b", "x": "1"})
    assert not accepts(schema, {"kind": "b", "x": 1}) and not accepts(schema, {"x": 1})
    assert json.dumps(schema) == before
    with pytest.raises(Refused, match="options of oneOf that do not exclude each other; use anyOf"):
        accepts({name: value for name, value in schema.items() if name != "discriminator"}, {})


@pytest.mark.parametrize("kind", ["json", "json_object"])
def test_white_space_between_parts_has_a_limit(kind: str) -> None:
    """Up to 32 characters, without options: a model could continue more up to the end of its budget."""
    text = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}) if kind == "json" else ""
    for spaces, allowed in ((0, True), (32, True), (33, False), (1000, False)):
        matcher = compile_matcher(llguidance, BYTES, Definition(kind, text, False, False, None))
        assert matcher.consume_tokens(list(b"{" + b" \n" * (spaces // 2) + b" " * (spaces % 2) + b'"a":')) is allowed
