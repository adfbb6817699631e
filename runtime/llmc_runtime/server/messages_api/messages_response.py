"""The endpoint /v1/messages: builds the JSON of the message, complete or as a stream of events."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.call import Call
from llmc_runtime.server.http.errors import ApiError, messages_api_body, to_api_error
from llmc_runtime.server.http.replies import named_event
from llmc_runtime.server.openai.message_tokens import ScoredToken
from llmc_runtime.server.openai.named_events import NamedEventsResponse
from llmc_runtime.server.requests.messages_request import MessagesRequest, to_chat
from llmc_runtime.server.requests.parse import document
from llmc_runtime.server.serving import Serving
from llmc_runtime.server.text_pool.pool import OffloadedJob
from llmc_runtime.server.tool_calls.message import Delta

Event = dict[str, Any]


class ContentBlocks:
    """The blocks of one output: thinking, text and tool_use.

    decodes: whether the input of a tool_use block is decoded at its end. In a stream it is sent as text, as it arrives,
             and stays {}, so that long arguments do not hold the event loop.
    """

    def __init__(self, decodes: bool) -> None:
        self._decodes = decodes
        self.blocks: list[dict[str, Any]] = []  # complete, except for the last one while it is open
        self._texts: list[str] | None = None  # pieces of the last block while it is open

    def take(self, delta: Delta) -> Iterator[Event]:
        """Add new output, and yield its events."""
        if delta.reasoning:
            yield from self._extend("thinking", delta.reasoning)
        if delta.content:
            yield from self._extend("text", delta.content)
        for call in delta.calls:
            function = call["function"]
            if "id" in call:
                yield from self.close()
                yield from self._open({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            if function["arguments"]:
                yield from self._extend("tool_use", function["arguments"])

    def close(self) -> Iterator[Event]:
        """Complete the last block, and yield its events."""
        if self._texts is None:
            return
        block = self.blocks[-1]
        text = "".join(self._texts)
        self._texts = None
        if block["type"] == "tool_use":
            block["input"] = _input(text) if self._decodes else {}
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = hashlib.sha256(text.encode(errors="replace")).hexdigest()
            yield self._delta("signature", signature=block["signature"])
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _extend(self, kind: str, text: str) -> Iterator[Event]:
        """Add text to a block of this kind, which is opened unless it is open."""
        if self._texts is None or self.blocks[-1]["type"] != kind:
            yield from self.close()
            yield from self._open({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        assert self._texts is not None
        self._texts.append(text)
        if kind == "tool_use":
            yield self._delta("input_json", partial_json=text)
        else:
            yield self._delta(kind, **{kind: text})

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        self.blocks.append(block)
        self._texts = []
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, **fields: str) -> Event:
        delta = {"type": f"{kind}_delta", **fields}
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _input(text: str) -> Any:
    """Return the arguments of a call; {} if the output was cut off inside of them."""
    try:
        return document(text.encode(errors="replace") or b"{}")
    except ApiError:
        return {}


class MessagesResponse(NamedEventsResponse):
    """One request to the endpoint."""

    def __init__(self, serving: Serving, request: MessagesRequest, call: Call, job: OffloadedJob | None) -> None:
        super().__init__(serving, to_chat(request), call, job)
        self._max_tokens = request.max_tokens
        self._output = ContentBlocks(decodes=not request.stream)

    def _sampling(self) -> SamplingParams:
        """Return the parameters. A `max_tokens` that exceeds the context is lowered, as the API has no error for it."""
        params, length = super()._sampling(), self._serving.llm.config.max_model_len
        try:
            return replace(params, max_tokens=min(self._max_tokens, length - 1))
        except LlmcError as e:
            raise to_api_error(e, "messages") from None

    def failed(self, error: ApiError) -> bytes:
        """Return the event after an error during the stream."""
        return named_event(messages_api_body(error))

    def _opening(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_start", "message": self._document()}

    def _take(self, delta: Delta, tokens: Sequence[ScoredToken]) -> Iterator[dict[str, Any]]:
        return self._output.take(delta)

    def _closing(self, finish: str, stop: int | str | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        events = list(self._output.close())
        string = stop if finish == "stop" and isinstance(stop, str) else None
        ended = {"stop_reason": self._stop_reason(finish, string), "stop_sequence": string}
        usage = self._usage_object()
        return [
            *events, {"type": "message_delta", "delta": ended, "usage": usage}, {"type": "message_stop"},
        ], self._document() | ended | {"usage": usage}  # fmt: skip

    def _stop_reason(self, finish: str, string: str | None) -> str:
        if finish == "length":
            cut = self._usage.generated < self._max_tokens
            return "model_context_window_exceeded" if cut else "max_tokens"
        if finish == "tool_calls":
            return "tool_use"
        return "end_turn" if string is None else "stop_sequence"

    def _usage_object(self) -> dict[str, Any]:
        usage, cached = self._usage, sum(self._usage.cached.values())
        return {
            "input_tokens": usage.prompt - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
            "output_tokens": usage.generated,
        }  # fmt: skip

    def _document(self) -> dict[str, Any]:
        """Return the message with its content so far."""
        return {
            "id": self._call.id, "type": "message", "role": "assistant", "model": self._serving.names[0],
            "content": list(self._output.blocks), "stop_reason": None, "stop_sequence": None,
            "usage": self._usage_object(),
        }  # fmt: skip
