"""The tools of a request: which may or must be called, and the schemas of their arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from llmc_runtime.grammar.json_schema import OF_NAMED_SCHEMAS
from llmc_runtime.sched.structured_outputs import is_over
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.requests.request_fields import FUNCTION_NAME, MAX_TOOLS

MAX_BYTES = 256 << 10  # maximum bytes of all definitions together, as JSON
MAX_CALLS = 32  # maximum calls in a response whose calls are enforced
_NAMES = "1 to 64 of the characters A-Z a-z 0-9 _ -"
_NOTES = ("title", "description", "examples", "default", "$comment", "deprecated", "readOnly", "writeOnly", "$schema")
_CLOSED = ("items", "additionalProperties", "anyOf", "properties", "$defs", "definitions")


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    - `shown`: the definitions that the template shows.
    - `known`: the schemas of all tools' arguments, by name; `schemas`: of those that may be called.
    - `forced`: the response has to consist of calls; `several`: there may be more than one.
    - `strict`: the tools whose calls follow their schema even if calls are not forced.
    """

    shown: list[dict[str, Any]]
    known: Mapping[str, dict[str, Any]]
    schemas: Mapping[str, dict[str, Any]]
    forced: bool
    several: bool
    strict: frozenset[str]


def tools_of(tools: list[dict[str, Any]] | None, choice: Any, parallel: bool | None) -> Tools | None:
    """Parse `tools`, `tool_choice` and `parallel_tool_calls`; None if nothing may be called. Raises ApiError 400."""
    tools = tools or []
    definitions = _definitions(tools)
    known = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in definitions}
    allowed, forced = _choice(choice, list(known))
    if not allowed:
        return None
    schemas = {name: schema for name, schema in known.items() if name in allowed}
    strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))
    shown = definitions if forced else [tool for tool in definitions if tool["function"]["name"] in schemas]
    named = isinstance(choice, dict) and choice.get("type") == "function"  # it is called once
    return Tools(shown, known, schemas, forced, parallel is not False and not named, strict & schemas.keys())


def _definitions(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check the definitions of tools and their number, size and names. Raises ApiError 400."""
    if len(tools) > MAX_TOOLS:
        raise ApiError(f"tools: up to {MAX_TOOLS}, not {len(tools)}", param="tools")
    definitions = [_definition(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if is_over(definitions, MAX_BYTES) or len(msgspec.json.encode(definitions)) > MAX_BYTES:
        cause = f"tools: their definitions have more than {MAX_BYTES} bytes; send fewer, or shorter schemas"
        raise ApiError(cause, param="tools")
    names = [tool["function"]["name"] for tool in definitions]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ApiError(f"tools: {repeated!r} is defined twice; each tool needs a name of its own", param="tools")
    return definitions


def _definition(definition: dict[str, Any], where: str) -> dict[str, Any]:
    """Check a definition and return a copy without `strict`, which is not meant for the model."""
    function = definition.get("function")
    if definition.get("type") != "function" or not isinstance(function, dict):
        raise ApiError(f'{where}: of the form {{"type": "function", "function": {{"name": NAME, ...}}}}', param=where)
    name, where = function.get("name"), f"{where}.function"
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise ApiError(f"{where}.name: {_NAMES}", param=f"{where}.name")
    if not isinstance(function.get("description"), str | None):
        raise ApiError(f"{where}.description: a string", param=f"{where}.description")
    if not isinstance(function.get("strict"), bool | None):
        raise ApiError(f"{where}.strict: true or false", param=f"{where}.strict")
    schema = function.get("parameters")
    if not isinstance(schema, dict | None) or (schema or {}).get("type", "object") != "object":
        raise ApiError(f'{where}.parameters: a JSON schema with "type": "object"', param=f"{where}.parameters")
    return {
        **definition,
        "function": {key: value for key, value in function.items() if key != "strict" and value is not None},
    }


def _choice(choice: Any, names: list[str]) -> tuple[list[str], bool]:
    """Return (the names of the tools that may be called, whether one must be called)."""
    if choice is None or choice == "auto":
        return names, False
    if choice == "none":
        return [], False
    if choice == "required":
        if not names:
            raise ApiError("tool_choice: required needs tools", param="tool_choice")
        return names, True
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        allowed = allowed if isinstance(allowed, dict) else {}
        listed, mode = allowed.get("tools"), allowed.get("mode")
        if not isinstance(listed, list) or not listed or mode not in ("auto", "required"):
            cause = 'allowed_tools: {"mode": "auto" or "required", "tools": [{"type": "function", ...}, ...]}'
            raise ApiError(f"tool_choice.{cause}", param="tool_choice.allowed_tools")
        return [_named(tool, names) for tool in listed], mode == "required"
    return [_named(choice, names)], True


def _named(choice: Any, names: list[str]) -> str:
    """Return the name in {"type": "function", "function": {"name": NAME}}, which has to be one of `names`."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        cause = 'none, auto, required, or {"type": "function", "function": {"name": NAME}}'
        raise ApiError(f"tool_choice: {cause}", param="tool_choice")
    if name not in names:
        raise ApiError(f"tool_choice: {name[:64]!r} is not one of the tools", param="tool_choice")
    return name


def enforced(schema: dict[str, Any]) -> dict[str, Any]:
    """Prepare a schema of arguments for enforcement.

    Annotations are removed. Objects that list their properties are closed unless they state otherwise or the schema
    uses allOf, whose parts apply together. An empty schema means that there are no arguments.
    """
    closed = '"allOf":' not in json.dumps(schema)
    return {"type": "object", **_plain(schema or {"properties": {}}, closed)}


def _plain(schema: Any, closed: bool) -> Any:
    if isinstance(schema, list):
        return [_plain(inner_schema, closed) for inner_schema in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        inner = closed and key in _CLOSED
        if key in OF_NAMED_SCHEMAS and isinstance(value, dict):
            out[key] = {name: _plain(inner_schema, inner) for name, inner_schema in value.items()}
        elif key in ("enum", "const", "required"):
            out[key] = value
        elif key not in _NOTES:
            out[key] = _plain(value, inner)
    if closed and "properties" in out:
        out.setdefault("additionalProperties", False)
    return out
