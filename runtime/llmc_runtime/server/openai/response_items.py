"""The output items of /v1/responses and the events that build them, made from the deltas of a chat's message."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from llmc_runtime.server.requests.responses_request import encoded_reasoning
from llmc_runtime.server.tool_calls.message import Delta

Event = dict[str, Any]


class OutputItems:
    """The items of one output: reasoning, messages and function calls.

    `event` makes an event of a type with a sequence number. With `encrypted`, reasoning items also have the field
    encrypted_content.
    """

    def __init__(self, event: Callable[..., Event], encrypted: bool) -> None:
        self.items: list[dict[str, Any]] = []  # complete, except for the last one while it is open
        self._event, self._encrypted = event, encrypted
        self._texts: list[str] | None = None  # of the last item, while it is open

    def take(self, delta: Delta) -> Iterator[Event]:
        """Add new output, and yield its events."""
        if delta.reasoning:
            yield from self._extend("reasoning", delta.reasoning)
        if delta.content:
            yield from self._extend("message", delta.content)
        for call in delta.calls:
            function = call["function"]
            if "id" in call:
                yield from self.close("completed")
                fields = {"call_id": call["id"], "name": function["name"], "arguments": ""}
                yield from self._open("function_call", "fc", fields)
            if function["arguments"]:
                yield from self._extend("function_call", function["arguments"])

    def close(self, status: str) -> Iterator[Event]:
        """Complete the last item, which has this status, and yield its events."""
        if self._texts is None:
            return
        item, text, self._texts = self.items[-1], "".join(self._texts), None
        item["status"] = status
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            yield self._event("response.function_call_arguments.done", **place, **done)
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            place["content_index"] = 0
            done = {"logprobs": []} if item["type"] == "message" else {}
            yield self._event(f"response.{part['type']}.done", **place, text=text, **done)
            yield self._event("response.content_part.done", **place, part=part)
            if item["type"] == "reasoning" and self._encrypted:
                item["encrypted_content"] = encoded_reasoning(text)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def finish(self, status: str) -> Iterator[Event]:
        """Complete the output. A complete one without calls ends with a message, if only with an empty one."""
        yield from self.close(status)
        if status == "completed" and (not self.items or self.items[-1]["type"] == "reasoning"):
            yield from self._extend("message", "")
            yield from self.close(status)

    def _extend(self, kind: str, text: str) -> Iterator[Event]:
        """Add text to an item of this kind, which is opened unless it is open."""
        if self._texts is None or self.items[-1]["type"] != kind:
            yield from self.close("completed")
            if kind == "reasoning":
                yield from self._open(kind, "rs", {"summary": [], "content": [], "encrypted_content": None})
            else:
                yield from self._open(kind, "msg", {"role": "assistant", "content": []})
        if not text:
            return
        assert self._texts is not None
        self._texts.append(text)
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        if kind == "function_call":
            yield self._event("response.function_call_arguments.delta", **place, delta=text)
        elif kind == "reasoning":
            yield self._event("response.reasoning_text.delta", **place, content_index=0, delta=text)
        else:
            yield self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=[])

    def _open(self, kind: str, prefix: str, fields: dict[str, Any]) -> Iterator[Event]:
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, **fields, "status": "in_progress"}
        self.items.append(item)
        self._texts = []
        place = {"output_index": len(self.items) - 1}
        yield self._event("response.output_item.added", **place, item=dict(item))
        if kind != "function_call":
            place |= {"item_id": item["id"], "content_index": 0}
            yield self._event("response.content_part.added", **place, part=_part(kind, ""))


def _part(kind: str, text: str) -> dict[str, Any]:
    """Return the content part of an item."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
