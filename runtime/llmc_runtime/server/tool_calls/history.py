"""Converts the messages of a request for chat templates: earlier calls, their results, and reasoning."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.requests.parse import document
from llmc_runtime.server.requests.request_fields import FUNCTION_NAME
from llmc_runtime.server.requests.request_fields import MAX_CALLS as MAX_ALL_CALLS

if TYPE_CHECKING:
    from llmc_runtime.text.template_analysis import TemplateFeatures

MAX_CALLS = 128  # maximum calls per message
_SHORT = re.compile(r"[A-Za-z0-9]{9}")
_CALLS = 'a list of {"id": ID, "type": "function", "function": {"name": NAME, "arguments": JSON}}'
_TEMPLATE = "serve with a --chat-template FILE that renders them, or leave them out"


def for_template(messages: list[dict[str, Any]], features: TemplateFeatures, short_ids: bool) -> list[dict[str, Any]]:
    """Return copies of messages with calls, results or reasoning, and other messages unchanged. Raises ApiError 400.

    Arguments, which are JSON text in the API, become objects unless the template concatenates them with text. With
    `short_ids`, ids become nine letters and digits, equal for equal ids.
    """
    if (count := calls_in(messages)) > MAX_ALL_CALLS:
        raise ApiError(f"messages: up to {MAX_ALL_CALLS} tool calls together, not {count}", param="messages")
    return [_message(message, f"messages[{i}]", features, short_ids) for i, message in enumerate(messages)]


def calls_in(messages: list[dict[str, Any]]) -> int:
    """Return the number of tool calls in the messages."""
    return sum(len(calls) for message in messages if isinstance(calls := message.get("tool_calls"), list))


def _message(message: dict[str, Any], where: str, features: TemplateFeatures, short_ids: bool) -> dict[str, Any]:
    calls, call_id = message.get("tool_calls"), message.get("tool_call_id")
    if not isinstance(call_id, str | None):
        raise ApiError(f"{where}.tool_call_id: a string", param=f"{where}.tool_call_id")
    if not features.calls and (calls or message.get("role") == "tool"):
        cause = f"{where}: the chat template does not render calls and their results. Try: {_TEMPLATE}"
        raise ApiError(cause, param=where)
    out = dict(message)
    if call_id is not None and short_ids:
        out["tool_call_id"] = _short(call_id)
    if "tool_calls" in out:
        out.pop("tool_calls")
        if calls:
            out["tool_calls"] = _calls(calls, f"{where}.tool_calls", features, short_ids)
            out.setdefault("content", None)
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if isinstance(out.get(name), str) and out.get(other) is None:
            out[other] = out[name]
    return out


def _calls(value: Any, where: str, features: TemplateFeatures, short_ids: bool) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise ApiError(f"{where}: {_CALLS}, up to {MAX_CALLS}", param=where)
    out = []
    for i, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(name, str)
            or not FUNCTION_NAME.fullmatch(name)
            or not isinstance(call.get("id"), str | None)
        ):
            raise ApiError(f"{where}[{i}]: of {_CALLS}", param=f"{where}[{i}]")
        arguments = _arguments(function.get("arguments"), f"{where}[{i}]", features.arguments_as_text)
        out.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
        if short_ids and isinstance(call.get("id"), str):
            out[-1]["id"] = _short(call["id"])
    return out


def _arguments(value: Any, where: str, as_text: bool) -> Any:
    """Convert arguments to an object, or to JSON if `as_text`. Text of models that is not an object is kept."""
    if not isinstance(value, str | dict | None):
        where = f"{where}.function.arguments"
        raise ApiError(f"{where}: the JSON of an object", param=where)
    if as_text:
        return value if isinstance(value, str) else json.dumps(value or {}, ensure_ascii=False)
    if not isinstance(value, str):
        return value or {}
    try:
        return document((value or "{}").encode(errors="replace"))
    except ApiError:
        return value


def _short(call_id: str) -> str:
    if _SHORT.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]
