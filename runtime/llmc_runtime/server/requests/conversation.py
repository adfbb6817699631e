"""Builds the messages of a chat from the items or content blocks of other APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.requests.request_fields import FUNCTION_NAME

Content = str | list[dict[str, Any]]
CONTENT = "a text, or a list of parts"  # what contents of messages have to be


class Conversation:
    """The messages of a chat. The output of one turn of the model is one message: reasoning, a text and calls."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # the last message, while the model's turn may go on

    def add(self, role: str, content: Content) -> None:
        """Add a message, or the text of the model's turn."""
        if role != "assistant":
            self._turn = None
            self.messages.append({"role": role, "content": content})
            return
        self._begin("content")["content"] = content

    def think(self, text: str) -> None:
        """Add reasoning, which precedes the text and the calls of its turn."""
        turn = self._begin("reasoning_content", "content", "tool_calls")
        if text:
            turn["reasoning_content"] = text

    def call(self, call_id: Any, name: Any, arguments: Any, where: str) -> None:
        """Add a call. `arguments` is an object, or the JSON of one. Raises ApiError 400 for other values."""
        param = where.partition("[")[0]
        if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
            raise ApiError(f"{where}.name: a name of a function, {FUNCTION_NAME.pattern}", param=param)
        if not isinstance(call_id, str) or not isinstance(arguments, str | dict):
            raise ApiError(f"{where}: a call has an id and arguments", param=param)
        function = {"name": name, "arguments": arguments}
        self._begin().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, content: Content) -> None:
        """Add the result of a call."""
        self._turn = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _begin(self, *fields: str) -> dict[str, Any]:
        """Return the message of the model's turn; a new one if the current one already has one of `fields`."""
        if self._turn is None or any(name in self._turn for name in fields):
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn


def checked_text(value: Any, where: str, param: str) -> str:
    """Return a string. Raises ApiError 400 for other values."""
    if not isinstance(value, str):
        raise ApiError(f"{where}: a string", param=param)
    return value


def plain_text(content: Any, where: str, kinds: Mapping[str, str], param: str) -> Content:
    """Return a content as a text, or as text parts if there are several.

    `kinds` maps the allowed types of parts to the field that has the text. Raises ApiError 400 for other parts, and
    without content.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where}: {CONTENT}", param=param)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            cause = f"{where}[{i}].type: {str(kind)[:64]!r} is not supported, only {', '.join(kinds)}"
            raise ApiError(cause, param=param)
        texts.append(checked_text(part.get(kinds[kind]), f"{where}[{i}].{kinds[kind]}", param))
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def function_tool(name: Any, description: Any, parameters: Any, strict: Any) -> dict[str, Any]:
    """Return a tool in the form of chats, which `definitions.tools_of` checks."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
