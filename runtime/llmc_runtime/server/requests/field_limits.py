"""Limits on the lengths of request fields, checked on the decoded JSON before the contents are examined.

A check takes constant time: it only reads the lengths of lists, objects and strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llmc_runtime.sched.sampling_params import PARAMETERS
from llmc_runtime.sched.structured_outputs import MAX_BYTES, MAX_CHOICES
from llmc_runtime.server.http.errors import ApiError

MAX_SALT = 256
MAX_MESSAGES = 4096
MAX_PROMPTS = 128  # in one request
MAX_PARTS = 4096  # content parts of all messages together
MAX_CALLS = 4096  # earlier tool calls in all messages together
MAX_TOOLS = 128
FUNCTION_NAME = r"[A-Za-z0-9_-]{1,64}"  # a regular expression
MAX_DOCUMENTS = 1024
MAX_TEMPLATE_KWARGS = 64
MAX_WORD = 256  # characters of names: of a model, a reasoning effort

# Maximum items of a list or object, and maximum characters of a string, by the field's path.
MOST_ITEMS: Mapping[str, int] = MappingProxyType(
    {
        **{name: one.values.max_items for name, one in PARAMETERS.items() if one.values.max_items is not None},
        "messages": MAX_MESSAGES, "tools": MAX_TOOLS, "documents": MAX_DOCUMENTS,
        "chat_template_kwargs": MAX_TEMPLATE_KWARGS, "structured_outputs.choice": MAX_CHOICES,
        "tool_choice.allowed_tools.tools": MAX_TOOLS,
    }
)  # fmt: skip
MOST_CHARACTERS: Mapping[str, int] = MappingProxyType(
    {
        **{name: one.values.max_characters for name, one in PARAMETERS.items() if one.values.max_characters},
        "cache_salt": MAX_SALT, "model": MAX_WORD, "reasoning_effort": MAX_WORD,
        "tool_choice": MAX_WORD, "response_format.type": MAX_WORD, "response_format.json_schema.name": MAX_WORD,
        "structured_outputs.json": MAX_BYTES, "structured_outputs.regex": MAX_BYTES,
        "structured_outputs.grammar": MAX_BYTES, "structured_outputs.whitespace_pattern": MAX_BYTES,
    }
)  # fmt: skip


def check_lengths(fields: Mapping[str, Any]) -> None:
    """Raise ApiError 400 if a value is longer than its field allows."""
    for path, most in MOST_ITEMS.items():
        value = _at(fields, path)
        if isinstance(value, list | dict) and len(value) > most:
            raise ApiError(f"{path}: up to {most}, not {len(value)}", param=path)
    for path, most in MOST_CHARACTERS.items():
        value = _at(fields, path)
        if isinstance(value, str) and len(value) > most:
            raise ApiError(f"{path}: up to {most} characters, not {len(value)}", param=path)


def _at(fields: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None."""
    value: Any = fields
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
