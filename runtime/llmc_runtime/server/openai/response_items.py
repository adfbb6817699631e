"""The output items of /v1/responses and the events that build them, made from the deltas of a chat's message."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from llmc_runtime.server.http.lazy_json import Lazy
from llmc_runtime.server.openai.message_tokens import ScoredToken, TokenScores
from llmc_runtime.server.requests.responses_request import encoded_reasoning
from llmc_runtime.server.tool_calls.message import Delta

Event = dict[str, Any]


class NumberedEvents:
    """Makes events of a type, each with the next sequence number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __call__(self, name: str, /, **fields: Any) -> Event:
        """Return an event."""
        return {"type": name, "sequence_number": next(self._numbers), **fields}


class OutputItems:
    """The items of one output: reasoning, messages and function calls.

    `event` makes the events, and `scores` the JSON of log-probabilities. With `encrypted`, reasoning items also have
    the field encrypted_content.
    """

    def __init__(self, event: NumberedEvents, scores: TokenScores, encrypted: bool) -> None:
        self.items: list[dict[str, Any]] = []  # complete, except for the last one while it is open
        self._event, self._scores, self._encrypted = event, scores, encrypted
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
        return Lazy(_Entries(self._tokens, self._scores, with_bytes)) if self._tokens else []

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
            logprobs = list(_Entries(tokens, self._scores, with_bytes=False))
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
    """The log-probabilities of tokens, made whenever they are read. Events have no bytes; content parts do."""

    def __init__(self, tokens: Sequence[ScoredToken], scores: TokenScores, with_bytes: bool) -> None:
        self._tokens, self._scores, self._with_bytes = tokens, scores, with_bytes

    def __iter__(self) -> Iterator[Event]:
        for token in self._tokens:
            entry = self._scores.entry(token.id, token.row)
            if not self._with_bytes:
                for item in (entry, *entry["top_logprobs"]):
                    del item["bytes"]
            yield entry


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
