"""The endpoint /v1/responses: builds the JSON of the response, complete or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from llmc_runtime.server.call import Call
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.http.replies import named_event
from llmc_runtime.server.openai.message_tokens import ScoredToken
from llmc_runtime.server.openai.named_events import NamedEventsResponse
from llmc_runtime.server.openai.response_items import NumberedEvents, OutputItems, without_logprobs
from llmc_runtime.server.requests.responses_request import (
    ENCRYPTED,
    Earlier,
    ResponsesRequest,
    own_items,
    references_of,
    to_chat,
)
from llmc_runtime.server.serving import Serving
from llmc_runtime.server.text_pool.pool import OffloadedJob
from llmc_runtime.server.tool_calls.message import Delta

# A stream has a message in deltas, and in the last events of its text, its part, its item and the response.
_REPEATS = 5


class ResponsesResponse(NamedEventsResponse):
    """One request to the endpoint."""

    def __init__(self, serving: Serving, request: ResponsesRequest, call: Call, job: OffloadedJob | None) -> None:
        self._stores = serving.stored.enabled and request.store is not False
        if request.store and not serving.stored.enabled:
            cause = "store: this server stores no responses (--response-store-bytes); leave the field out"
            raise ApiError(cause, param="store", code="unsupported_parameter")
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
        self._output = OutputItems(self._event, self._token_scores(), ENCRYPTED in (request.include or ()))

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
