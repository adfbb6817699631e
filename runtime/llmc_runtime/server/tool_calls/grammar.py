"""Builds the Lark grammar, for llguidance, of a response with enforced calls or of an output format after reasoning."""

from __future__ import annotations

import json
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar.definition import Definition, close_objects
from llmc_runtime.grammar.lark_text import Marker, json_rule, slashed
from llmc_runtime.grammar.structural_tag import structural_rules
from llmc_runtime.sched.structured_outputs import MAX_BYTES, StructuredOutputsParams
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.tool_calls.call_format import CallFormat
from llmc_runtime.server.tool_calls.definitions import MAX_CALLS, Tools


def calls_of(tools: Tools, form: type[CallFormat], marker: Marker, free: bool = False) -> str:
    """Return rules in which `calls` matches what the tools allow.

    With `free`, it matches text that contains calls, of which those of strict tools follow their schemas. Raises
    ApiError 400 if the format cannot express a schema.
    """
    rules = {name: f"a{i}" for i, name in enumerate(tools.schemas)}
    max_calls = MAX_CALLS if tools.several and form.several else 1
    texts = [form.free_rules(rules, marker, max_calls, tools.known) if free else form.rules(rules, marker, max_calls)]
    for name, schema in tools.schemas.items():
        try:
            texts.append(form.arguments(rules[name], schema, marker, not free or name in tools.strict))
        except ValueError as e:
            raise ApiError(f"tools: the parameters of {name} cannot be enforced: {e}", param="tools") from None
    return "\n".join(texts)


def form_of(form: StructuredOutputsParams, param: str, marker: Marker) -> str:
    """Return rules in which `form` matches the requested output format. Raises ApiError 400 if that is impossible."""
    if form.kind in ("json", "json_object"):
        try:
            return f"form: {_of_schema(form, param)}"
        except (ValueError, RecursionError) as e:  # a schema given as text has not been parsed before
            raise ApiError(f"{param}: the JSON schema cannot be read: {str(e)[:100]}", param=param) from None
    if form.kind == "structural_tag":
        try:
            return structural_rules(json.loads(form.text), marker, "form", Definition.of(form).json_options)
        except (ValueError, RecursionError) as e:
            raise ApiError(f"{param}: the structural tag cannot be used: {str(e)[:200]}", param=param) from None
    if form.kind == "choice":
        return "form: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(form.text))
    if form.kind == "regex":
        return f"form: /{slashed(form.text)}/"
    if "::=" in form.text:
        cause = "a grammar in GBNF cannot be combined with reasoning or tools: write it in Lark's syntax"
        raise ApiError(f"{param}: {cause}", param=param)
    return f"form: %lark {{\n{form.text}\n}}"


def _of_schema(form: StructuredOutputsParams, param: str) -> str:
    schema = {"type": "object"} if form.json_object else _schema(form.text, param)
    if form.disable_additional_properties:
        close_objects(schema)
    return json_rule(schema, Definition.of(form).json_options)


def answer(parts: list[str], body: str, thought: str | None, param: str) -> StructuredOutputsParams:
    """Combine the rules into one grammar: `body`, after the rule `thought` if there is reasoning.

    Raises ApiError 400 about the field `param` if the grammar is too large.
    """
    start = f"start: {body}" if thought is None else f"start: thought body\nbody: {body}\n{thought}"
    text = "\n".join(["%llguidance {}", start, *parts, ""])
    if len(text.encode(errors="replace")) > MAX_BYTES:
        cause = f"the grammar of the answer has {len(text)} characters, at most {MAX_BYTES}"
        raise ApiError(f"{param}: {cause}; use fewer tools, or smaller schemas", param=param)
    try:
        return StructuredOutputsParams(grammar=text)
    except LlmcError as e:
        raise ApiError(f"{param}: {e.cause}", param=param) from None


def _schema(text: str, param: str) -> dict[str, Any]:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ApiError(f"{param}: a JSON schema is an object", param=param)
    return schema
