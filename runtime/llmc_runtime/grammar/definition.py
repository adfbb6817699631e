"""A grammar on its way to a grammar process, and what llguidance makes of it there."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from llmc_runtime.grammar.limits import PARSER_LIMITS
from llmc_runtime.sched.structured import StructuredOutputsParams

# Keywords of JSON Schema whose values are schemas, or lists of them, and those whose values are schemas by name.
_OF_SCHEMAS = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems", "additionalItems")
_OF_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class Refused(Exception):
    """llguidance does not take the grammar."""


class Definition(NamedTuple):
    """The fields of StructuredOutputsParams, the grammar itself as text (see `StructuredOutputsParams.text`)."""

    kind: str
    text: str
    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: str | None

    @classmethod
    def of(cls, wanted: StructuredOutputsParams) -> Definition:
        """The definition of a request's structured outputs."""
        flags = (wanted.disable_any_whitespace, wanted.disable_additional_properties, wanted.whitespace_pattern)
        return cls(wanted.kind, wanted.text, *flags)

    def encode(self) -> bytes:
        """As bytes, for another process."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Definition:
        """The definition that `encode` wrote."""
        return cls(*json.loads(data))


def compile_matcher(llguidance: Any, vocabulary: Any, wanted: Definition) -> Any:
    """An LLMatcher at the beginning of a text. Raises Refused."""
    try:
        text = _llguidance_text(llguidance, wanted)
    except (ValueError, RecursionError, AttributeError, TypeError) as e:  # a schema that is no object, a bad GBNF
        raise Refused(first_line(str(e))) from None
    limits = llguidance.LLParserLimits(**PARSER_LIMITS)
    matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise Refused(first_line(matcher.get_error()))
    return matcher


def _llguidance_text(llguidance: Any, wanted: Definition) -> str:
    """The grammar in llguidance's own form."""
    if wanted.kind in ("json", "json_object"):
        schema = {"type": "object"} if wanted.kind == "json_object" else json.loads(wanted.text)
        if wanted.disable_additional_properties:
            close_objects(schema)
        options: dict[str, Any] = {"whitespace_flexible": not wanted.disable_any_whitespace}
        if wanted.whitespace_pattern is not None:
            options["whitespace_pattern"] = wanted.whitespace_pattern
        return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    if wanted.kind == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(wanted.text))
        return str(llguidance.LLMatcher.grammar_from_lark(f"start: {texts}"))
    return str(llguidance.grammar_from(wanted.kind, wanted.text))


def close_objects(schema: Any) -> None:
    """Forbid further properties, in place, in every object that names its properties and does not say what others are.

    An allOf of several parts keeps all objects open: its parts describe one object together, and closing each of them
    would exclude the properties of the others.
    """
    if '"allOf":' not in json.dumps(schema) or not _composed(schema):
        _close(schema)


def _composed(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_composed, schema))
    if not isinstance(schema, dict):
        return False
    parts = schema.get("allOf")
    together = isinstance(parts, list) and (len(parts) > 1 or "properties" in schema)
    return together or any(map(_composed, schema.values()))


def _close(schema: Any) -> None:
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("properties"), dict):
        schema.setdefault("additionalProperties", False)
    for key in _OF_NAMED_SCHEMAS:
        if isinstance(schema.get(key), dict):
            for part in schema[key].values():
                _close(part)
    for key in _OF_SCHEMAS:
        found = schema.get(key)
        for part in found if isinstance(found, list) else [found]:
            _close(part)


def first_line(text: str) -> str:
    """The first line of an error message that says something, cut to 200 characters."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[0][:200] if lines else ""
