"""A grammar as it is sent to a grammar process, and its translation for llguidance."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from llmc_runtime.grammar.json_schema import OF_NAMED_SCHEMAS, OF_SCHEMAS, supported
from llmc_runtime.grammar.limits import PARSER_LIMITS
from llmc_runtime.grammar.structural_tag import structural_rules, vocabulary_marker
from llmc_runtime.sched.structured_outputs import StructuredOutputsParams

_WHERE = "failed to compile JSON schema: "  # ends the position of a schema in a grammar with several
_EXCLUDE = "options of oneOf that do not exclude each other; use anyOf"
_WHITESPACE = r"[ \n\r\t]{0,32}"  # a model may never end white space that has no limit


class Refused(Exception):
    """llguidance rejected the grammar."""


class Definition(NamedTuple):
    """The fields of StructuredOutputsParams; `text` is the grammar (see `StructuredOutputsParams.text`)."""

    kind: str
    text: str
    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: str | None

    @classmethod
    def of(cls, outputs: StructuredOutputsParams) -> Definition:
        """Return the definition of a request's structured outputs."""
        flags = outputs.disable_any_whitespace, outputs.disable_additional_properties
        return cls(outputs.kind, outputs.text, *flags, outputs.whitespace_pattern)

    @property
    def json_options(self) -> dict[str, Any]:
        """llguidance's options for JSON."""
        options: dict[str, Any] = {"whitespace_flexible": not self.disable_any_whitespace}
        pattern = self.whitespace_pattern
        if pattern is None and not self.disable_any_whitespace:
            pattern = _WHITESPACE
        if pattern is not None:
            options["whitespace_pattern"] = pattern
        return options

    def encode(self) -> bytes:
        """Serialize for another process."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Definition:
        """Parse what `encode` wrote."""
        return cls(*json.loads(data))


def compile_matcher(llguidance: Any, vocabulary: Any, definition: Definition) -> Any:
    """Compile the grammar into an LLMatcher at the start of the text. Raises Refused."""
    try:
        text = _llguidance_text(llguidance, vocabulary, definition)
    except json.JSONDecodeError as e:
        raise Refused(f"it is not JSON: {e}") from None
    except (ValueError, RecursionError, AttributeError, TypeError) as e:  # such as a schema that is not an object
        raise Refused(first_line(str(e))) from None
    limits = llguidance.LLParserLimits(**PARSER_LIMITS)
    matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
    if matcher.is_error():
        cause = first_line(matcher.get_error())
        cause = cause.partition(_WHERE)[2] or cause
        raise Refused(_EXCLUDE if "coerce_one_of" in cause else cause)
    return matcher


def _llguidance_text(llguidance: Any, vocabulary: Any, definition: Definition) -> str:
    """Translate the grammar into llguidance's own format."""
    if definition.kind == "structural_tag":
        document, marker = json.loads(definition.text), vocabulary_marker(vocabulary)
        rules = structural_rules(document, marker, "start", definition.json_options)
        return str(llguidance.LLMatcher.grammar_from_lark(f"%llguidance {{}}\n{rules}\n"))
    if definition.kind in ("json", "json_object"):
        schema = {"type": "object"} if definition.kind == "json_object" else json.loads(definition.text)
        if definition.disable_additional_properties:
            close_objects(schema)
        overrides = definition.json_options
        return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(supported(schema)), overrides=overrides))
    if definition.kind == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(definition.text))
        return str(llguidance.LLMatcher.grammar_from_lark(f"start: {texts}"))
    return str(llguidance.grammar_from(definition.kind, definition.text))


def close_objects(schema: Any) -> None:
    """Forbid additional properties, in place, in every object that lists its properties and does not mention others.

    If several schemas describe one object together, all objects stay open: closing one of these schemas would exclude
    the properties of the others. They are the parts of an allOf, or an option of anyOf or oneOf that has properties and
    the properties next to it.
    """
    if not _composed(schema):
        _close(schema)


def _composed(schema: Any) -> bool:
    """Whether a schema, or a part of it, combines properties of several schemas by allOf."""
    if isinstance(schema, list):
        return any(map(_composed, schema))
    if not isinstance(schema, dict):
        return False
    parts = schema.get("allOf")
    together = isinstance(parts, list) and (len(parts) > 1 or "properties" in schema)
    if "properties" in schema and not together:
        options = [option for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for option in schema[key]]
        together = any(isinstance(option, dict) and ("properties" in option or "$ref" in option) for option in options)
    return together or any(map(_composed, schema.values()))


def _close(schema: Any) -> None:
    """Exclude properties that a schema and its parts do not list, unless they say otherwise."""
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("properties"), dict):
        schema.setdefault("additionalProperties", False)
    for key in OF_NAMED_SCHEMAS:
        if isinstance(schema.get(key), dict):
            for part in schema[key].values():
                _close(part)
    for key in OF_SCHEMAS:
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else [parts]:
            _close(part)


def first_line(text: str) -> str:
    """Return the first nonempty line of an error message, cut to 200 characters.

    If it ends with a colon, the line with the reason ("error: unclosed group") is added.
    """
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    reasons = [line.removeprefix("error:") for line in lines if line.startswith("error:")]
    return (lines[0] + reasons[0] if lines[0].endswith(":") and reasons else lines[0])[:200]
