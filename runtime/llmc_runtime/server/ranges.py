"""What values the fields of requests may have, in JSON Schema, for the API's description; they are checked elsewhere.

What depends on the model (token ids, lengths) or on other fields (stream_options needs stream) is not said here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llmc_runtime.sched.params import MAX_ALLOWED, MAX_BAD_WORDS, MAX_INT, MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS
from llmc_runtime.sched.step import BIASES, STOPS
from llmc_runtime.server.lengths import (
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_SALT,
    MAX_TEMPLATE_KWARGS,
    MAX_TOOLS,
)
from llmc_runtime.server.prompting import MAX_PROMPTS
from llmc_runtime.server.serving import MOST_SECONDS
from llmc_runtime.server.tools.calls import NAME

TIMEOUT: Mapping[str, Any] = MappingProxyType({"type": "number", "exclusiveMinimum": 0, "maximum": MOST_SECONDS})
_FUNCTION: Mapping[str, Any] = MappingProxyType(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"], "properties": {"type": {"const": "object"}}},
            "strict": {"type": ["boolean", "null"]},
        },
        "required": ["name"],
    }
)


def _between(low: float, high: float) -> dict[str, Any]:
    return {"minimum": low, "maximum": high}


def ranges() -> dict[str, dict[str, dict[str, Any]]]:
    """By the name of a field, for each type of JSON that it may be given as: what is said of it."""
    penalty, scores = _between(-2, 2), _between(0, MAX_LOGPROBS)
    text, token = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
    ids = {"type": "array", "items": token, "minItems": 1}
    shape = {"type": {"const": "function"}, "function": dict(_FUNCTION)}
    tool = {"type": "object", "properties": shape, "required": ["type", "function"]}
    return {
        "n": {"integer": _between(1, MAX_N)},
        "temperature": {"number": _between(0, 100)},
        "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
        "top_k": {"integer": _between(-1, MAX_INT)},
        "min_p": {"number": _between(0, 1)},
        "repetition_penalty": {"number": _between(0.001, 1000)},
        "presence_penalty": {"number": penalty},
        "frequency_penalty": {"number": penalty},
        "seed": {"integer": _between(-(2**63), 2**64 - 1)},
        "max_tokens": {"integer": _between(0, MAX_INT)},
        "max_completion_tokens": {"integer": _between(1, MAX_INT)},
        "min_tokens": {"integer": _between(0, MAX_INT)},
        "logprobs": {"integer": scores},
        "top_logprobs": {"integer": scores},
        "prompt_logprobs": {"integer": scores},
        "priority": {"integer": _between(-(2**31), 2**31 - 1)},
        "stop": {"string": text, "array": {"items": text, "maxItems": MAX_STOP_STRINGS}},
        "stop_token_ids": {"array": {"items": token, "maxItems": STOPS}},
        "allowed_token_ids": {"array": {"items": token, "minItems": 1, "maxItems": MAX_ALLOWED}},
        "bad_words": {"array": {"items": text, "maxItems": MAX_BAD_WORDS}},
        "logit_bias": {"object": {"maxProperties": BIASES, "propertyNames": {"pattern": "^[0-9]+$"}}},
        "cache_salt": {"string": {"maxLength": MAX_SALT}},
        "messages": {"array": {"minItems": 1, "maxItems": MAX_MESSAGES}},
        "documents": {"array": {"maxItems": MAX_DOCUMENTS}},
        "chat_template_kwargs": {"object": {"maxProperties": MAX_TEMPLATE_KWARGS}},
        "tools": {"array": {"items": tool, "maxItems": MAX_TOOLS}},
        "tool_choice": {"string": {"enum": ["none", "auto", "required"]}},
        "tokens": {"array": {"items": token}},
        "prompt": {
            "array": {
                "minItems": 1,
                "anyOf": [
                    {"items": {"type": "string"}, "maxItems": MAX_PROMPTS},
                    {"items": token},
                    {"items": ids, "maxItems": MAX_PROMPTS},
                ],
            }
        },
    }


def narrowed(schemas: dict[str, Any]) -> dict[str, Any]:
    """The schemas of requests by name, their fields limited to their ranges."""
    limits = ranges()
    return {
        name: {**schema, "properties": _properties(schema["properties"], limits)} for name, schema in schemas.items()
    }


def _properties(given: dict[str, Any], limits: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    return {name: _narrow(schema, limits.get(name, {})) for name, schema in given.items()}


def _narrow(schema: dict[str, Any], by_type: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [_narrow(one, by_type) for one in schema["anyOf"]]}
    return {**schema, **by_type.get(schema.get("type", ""), {})}
