"""The endpoint /v1/responses: builds the JSON of the response, complete or as a stream of events."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from llmc_runtime.server.call import Call
from llmc_runtime.server.http.errors import ApiError, unsupported
from llmc_runtime.server.http.lazy_json import Lazy
from llmc_runtime.server.http.replies import named_event
from llmc_runtime.server.openai.message_tokens import ScoredToken, TokenScores
from llmc_runtime.server.openai.named_events import NamedEventsResponse
from llmc_runtime.server.requests.responses_request import (
    ENCRYPTED,
    Earlier,
    ResponsesRequest,
    encoded_reasoning,
    own_items,
    references_of,
    to_chat,
)
from llmc_runtime.server.serving import Serving
from llmc_runtime.server.text_pool.pool import OffloadedJob
from llmc_runtime.server.tool_calls.message import Delta

# A stream has a message in deltas, and in the last events of its text, its part, its item and the response.
_REPEATS = 5
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
    the field encrypted_content. The events of new text have log-probabilities only if they are streamed (`streams`).
    """

    def __init__(self, event: NumberedEvents, scores: TokenScores, encrypted: bool, streams: bool) -> None:
        self.items: list[dict[str, Any]] = []  # complete, except for the last one while it is open
        self._event, self._scores, self._encrypted, self._streams = event, scores, encrypted, streams
        self._texts: list[str] | None = None  # pieces of the last item while it is open
        self._tokens: list[ScoredToken] = []  # tokens of that item's text, with log-probabilities

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
        item = self.items[-1]
        text = "".join(self._texts)
        self._texts = None
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
                part["logprobs"] = self._logprobs(with_bytes=True)
                done["logprobs"] = self._logprobs(with_bytes=False)
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
            logprobs = list(_Entries(tokens, self._scores, with_bytes=False)) if self._streams else []
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


class ResponsesResponse(NamedEventsResponse):
    """One request to the endpoint."""

    def __init__(self, serving: Serving, request: ResponsesRequest, call: Call, job: OffloadedJob | None) -> None:
        self._stores = serving.stored.enabled and request.store is not False
        if request.store and not serving.stored.enabled:
            cause = "store: this server stores no responses (--response-store-bytes); leave the field out"
            raise unsupported(cause, "store")
        self._original, self._own = request, list[bytes]()
        if job is None:
            stored = serving.stored.earlier(call.key, request.previous_response_id, references_of(request))
            decoded = msgspec.json.decode(stored, type=Earlier)
            items = own_items(request, decoded)
            self._own = list(map(msgspec.json.encode, items)) if self._stores else []
            chat = to_chat(request, decoded.previous, items)
        else:
            chat = to_chat(request, [], [])
        super().__init__(serving, chat, replace(call, repeats=_REPEATS) if request.stream else call, job)
        self._event = NumberedEvents()
        encrypted, streams = ENCRYPTED in (request.include or ()), bool(request.stream)
        self._output = OutputItems(self._event, self._token_scores(), encrypted, streams)

    def _earlier(self) -> bytes:
        """See ChatResponse. Nothing keeps these bytes: they may be many, and are not counted."""
        assert self._job is not None
        store, key = self._serving.stored, self._call.key
        return store.earlier(key, self._original.previous_response_id, self._job.parsed.references)

    async def _prepare(self) -> None:
        await super()._prepare()
        if self._stores:
            items = self._own if self._job is None else self._job.done.items
            store, call = self._serving.stored, self._call
            try:
                call.resources.stored = store.begin(call.key, call.id, self._original.previous_response_id, items)
            except ApiError:
                if self._original.store:
                    raise
                self._stores = False  # storing is the default: without room, the response is not stored

    def failed(self, error: ApiError) -> bytes:
        """Return the events after an error during the stream."""
        code = {"code": error.code or error.kind, "message": error.message}
        response = _without_logprobs(self._document("failed")) | {"error": code}
        events = self._event("error", **code, param=error.param), self._event("response.failed", response=response)
        return b"".join(map(named_event, events))

    def _opening(self) -> Iterator[dict[str, Any]]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._document("in_progress"))

    def _take(self, delta: Delta, tokens: Sequence[ScoredToken]) -> Iterator[dict[str, Any]]:
        return self._output.take(delta, tokens)

    def _closing(self, finish: str, stop: int | str | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        status = "incomplete" if finish == "length" else "completed"
        events = list(self._output.finish(status))
        response = self._document(status) | {"usage": self._usage_object()}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        stored = self._call.resources.stored
        response["store"] = stored is not None and stored.finish(_without_logprobs(response))
        return [*events, self._event(f"response.{status}", response=response)], response

    def _usage_object(self) -> dict[str, Any]:
        usage = self._usage
        details = {"cached_tokens": sum(usage.cached.values()), "cache_write_tokens": 0}
        return {
            "input_tokens": usage.prompt, "input_tokens_details": details, "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
            "total_tokens": usage.prompt + usage.generated,
        }  # fmt: skip

    def _document(self, status: str) -> dict[str, Any]:
        """Return the response with its output so far."""
        request, params = self._original, self._params
        reasoning = request.reasoning
        return {
            "id": self._call.id, "object": "response", "created_at": self._created, "completed_at": None,
            "status": status, "background": False, "error": None, "incomplete_details": None,
            "instructions": request.instructions, "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None, "metadata": request.metadata or {}, "model": self._serving.names[0],
            "output": list(self._output.items), "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
            "service_tier": "default", "store": self._stores, "temperature": params.temperature,
            "text": _text(request), "tool_choice": request.tool_choice or "auto", "tools": _tools(request),
            "top_logprobs": request.top_logprobs or 0, "top_p": params.top_p, "truncation": "disabled", "usage": None,
        }  # fmt: skip


def _without_logprobs(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without log-probabilities."""
    return {**response, "output": [without_logprobs(item) for item in response["output"]]}


def _text(request: ResponsesRequest) -> dict[str, Any]:
    """Return the options of the text, without those that are not set."""
    form = request.text and request.text.format
    if form is None:
        return {"format": {"type": "text"}}
    fields = {name: value for name in form.__struct_fields__ if (value := getattr(form, name)) is not None}
    return {"format": fields}


def _tools(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the tools with all of their fields, which some clients require."""
    optional = {"description": None, "parameters": None, "strict": False}
    return [optional | {name: value for name, value in x.items() if value is not None} for x in request.tools or ()]
