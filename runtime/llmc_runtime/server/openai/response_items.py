"""The output items of /v1/responses and the events that build them, made from the deltas of a chat's message."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llmc_runtime.server.http.lazy_json import Lazy
from llmc_runtime.server.openai.message_tokens import ScoredToken
from llmc_runtime.server.requests.responses_request import encoded_reasoning
from llmc_runtime.server.tool_calls.message import Delta

Event = dict[str, Any]
Entry = Callable[[ScoredToken, bool], dict[str, Any]]  # of a token's log-probabilities; True: with the texts' bytes


class OutputItems:
    """The items of one output: reasoning, messages and function calls.

    `event` makes an event of a type with a sequence number, and `entry` the JSON of a token's log-probabilities. With
    `encrypted`, reasoning items also have the field encrypted_content.
    """

    def __init__(self, event: Callable[..., Event], entry: Entry, encrypted: bool) -> None:
        self.items: list[dict[str, Any]] = []  # complete, except for the last one while it is open
        self._event, self._entry, self._encrypted = event, entry, encrypted
        self._texts: list[str] | None = None  # of the last item, while it is open
        self._tokens: list[ScoredToken] = []  # of its text, with log-probabilities

    def take(self, delta: Delta, tokens: Sequence[ScoredToken]) -> Iterator[Event]:
        """Add new output, and yield its events. `tokens` are those of its content, if log-probabilities are sent."""
        if delta.reasoning:
            yield from self._extend("reasoning", delta.reasoning)
        if delta.content:
            yield from self._extend("message", delta.content, tokens)
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
            done: dict[str, Any] = {"name": item["name"], "arguments": text}
            yield self._event("response.function_call_arguments.done", **place, **done)
        else:
            part = _part(item["type"], text)
            done = {}
            if item["type"] == "message":
                part["logprobs"], done["logprobs"] = self._logprobs(with_bytes=True), self._logprobs(with_bytes=False)
            item["content"] = [part]
            place["content_index"] = 0
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

    def _logprobs(self, *, with_bytes: bool) -> Lazy | list[Event]:
        """Return the log-probabilities of the last item, which can be encoded repeatedly."""
        return Lazy(_Entries(self._tokens, self._entry, with_bytes)) if self._tokens else []

    def _extend(self, kind: str, text: str, tokens: Sequence[ScoredToken] = ()) -> Iterator[Event]:
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
            self._tokens += tokens
            logprobs = [self._entry(token, False) for token in tokens]
            yield self._event("response.output_text.delta", **place, content_index=0, delta=text, logprobs=logprobs)

    def _open(self, kind: str, prefix: str, fields: dict[str, Any]) -> Iterator[Event]:
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, **fields, "status": "in_progress"}
        self.items.append(item)
        self._texts, self._tokens = [], []
        place = {"output_index": len(self.items) - 1}
        yield self._event("response.output_item.added", **place, item=dict(item))
        if kind != "function_call":
            place |= {"item_id": item["id"], "content_index": 0}
            yield self._event("response.content_part.added", **place, part=_part(kind, ""))


class _Entries:
    """The log-probabilities of tokens, which are made whenever they are read."""

    def __init__(self, tokens: Sequence[ScoredToken], entry: Entry, with_bytes: bool) -> None:
        self._tokens, self._entry, self._with_bytes = tokens, entry, with_bytes

    def __iter__(self) -> Iterator[Event]:
        return (self._entry(token, self._with_bytes) for token in self._tokens)


def without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item without its log-probabilities, which msgspec cannot encode while they are lazy."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _part(kind: str, text: str) -> dict[str, Any]:
    """Return the content part of an item."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
