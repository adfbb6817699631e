"""Shared code of the completions and chat endpoints: collecting outputs, streaming them, and the usage object."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from llmc_runtime.logprobs import Logprob, LogprobRows, Row
from llmc_runtime.outputs import CompletionOutput, RequestOutput
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.call import Call
from llmc_runtime.server.http.errors import ApiError, renamed
from llmc_runtime.server.http.lazy_json import Lazy, is_lazy
from llmc_runtime.server.http.replies import DONE, LastEvents, PlainEvents, event
from llmc_runtime.server.requests.request_fields import Generation
from llmc_runtime.server.serving import Serving
from llmc_runtime.server.text_pool.pool import OffloadedJob
from llmc_runtime.server.updates import Updates, started

WHOLE_INTERVAL = 0.05  # seconds between updates of a response that is not streamed, which only count its tokens
MIN_LOGPROB = -9999.0  # smallest log-probability sent, as JSON has no infinity

Scores = Sequence[Row | None] | None  # scores of a prompt's tokens
R = TypeVar("R", bound=Generation)


@dataclass
class Choice:
    """One output so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, update: CompletionOutput) -> None:
        """Append an update."""
        self.text.append(update.text)
        self.token_ids += update.token_ids
        rows = update.logprobs
        if isinstance(rows, LogprobRows):
            self.logprobs = rows if self.logprobs is None else self.logprobs.joined(rows)
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason


@dataclass
class Usage:
    """The tokens of a response; `generated` covers all outputs."""

    prompt: int
    generated: int = 0
    reasoning: int | None = None  # part of `generated`; None if reasoning is not separated
    cached: dict[int, int] = field(default_factory=dict)  # cached prompt tokens by prompt
    accepted: dict[int, int] = field(default_factory=dict)  # drafted tokens among those generated, by prompt

    def take(self, index: int, update: RequestOutput) -> None:
        """Count an update of prompt `index`."""
        self.cached[index] = update.num_cached_tokens
        self.accepted[index] = update.num_accepted_tokens
        for output in update.outputs:
            self.generated += len(output.token_ids)

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        details = {} if self.reasoning is None else {"reasoning_tokens": self.reasoning}
        if accepted := sum(self.accepted.values()):
            details["accepted_prediction_tokens"] = accepted
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            **({"completion_tokens_details": details} if details else {}),
        }


class GenerationResponse(ABC, Generic[R]):
    """One request to an endpoint that generates. If the body was large, `job` has its prompts.

    `_prepare` sets the attributes below; the other abstract methods describe one output. `_silent` means that only the
    prompt is scored and nothing that is generated is shown. A stream ends with the bytes `end`. `kind` and `chunk_kind`
    are OpenAI's names of the whole response and of a chunk.
    """

    end = DONE
    kind: str
    chunk_kind: str
    _prompts: list[Prompt]
    _params: SamplingParams
    _silent = False

    def __init__(self, serving: Serving, request: R, call: Call, job: OffloadedJob | None = None) -> None:
        self._serving, self._request, self._call, self._job = serving, request, call, job
        self._created = int(time.time())
        self._usage = Usage(0)
        options = request.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_in_chunks = bool(options and options.continuous_usage_stats)

    async def complete(self) -> dict[str, Any]:
        """Return the JSON of the complete response."""
        self._call = replace(self._call, interval=WHOLE_INTERVAL)
        updates = await self._started()
        choices = [[self._new_choice() for _ in range(self._params.n)] for _ in self._prompts]
        scores: list[Scores] = [None] * len(self._prompts)
        async with aclosing(updates) as items:  # type: ignore[type-var]
            async for index, update in items:
                self._usage.take(index, update)
                for output in update.outputs:
                    choices[index][output.index].take(output)
                if update.prompt_logprobs is not None:
                    scores[index] = update.prompt_logprobs
        return self._body(choices, scores)

    async def stream(self) -> AsyncIterator[dict[str, Any] | bytes]:
        """Return a stream of chunks, as JSON values or encoded events, once the first output is available."""
        return self._chunks(await started(await self._started()))

    def failed(self, error: ApiError) -> bytes:
        """Return the end of a stream during which an error occurred."""
        return event(error.body())

    async def _started(self) -> Updates:
        await self._prepare()
        self._prompts = [prompt.packed() for prompt in self._prompts]
        self._usage.prompt = sum(len(prompt.ids) for prompt in self._prompts)
        return self._updates()

    async def _chunks(self, updates: Updates) -> AsyncIterator[dict[str, Any] | bytes]:
        """Yield the chunks. The event with the last finish reason is sent together with the end of the stream."""
        for chunk in self._opening_chunks():
            yield chunk
        plain = None if self._usage_in_chunks else self._plain_encoder()
        unfinished = self._params.n * len(self._prompts)  # outputs without a finish reason
        last_events = b""
        async with aclosing(updates) as items:  # type: ignore[type-var]
            async for i, update in items:
                if not self._silent:
                    self._usage.take(i, update)
                for output in update.outputs:
                    index = i * self._params.n + output.index
                    if plain is not None and output.finish_reason is None:
                        if output.text:
                            yield plain.event(index, output.text)
                        continue
                    for choice in self._chunk_choices(index, self._prompts[i], output, update.prompt_logprobs):
                        chunk = self._chunk(choice)
                        unfinished -= choice["finish_reason"] is not None
                        if unfinished or is_lazy(chunk):
                            yield chunk
                        else:
                            last_events = event(chunk)
        if self._usage_at_end:
            last_events += event({**self._chunk_head, "choices": [], "usage": self._usage.as_json()})
        yield LastEvents(last_events)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._chunk_head, "choices": [choice]}
        if self._usage_in_chunks or self._usage_at_end:
            chunk["usage"] = self._usage.as_json() if self._usage_in_chunks else None
        return chunk

    @cached_property
    def _chunk_head(self) -> dict[str, Any]:
        return self._head(self.chunk_kind)

    @abstractmethod
    async def _prepare(self) -> None:
        """Check the request, reserve its resources and tokenize its prompts. Raises ApiError."""

    def _new_choice(self) -> Choice:
        """Return an output of a complete response, without text so far."""
        return Choice()

    def _updates(self) -> Updates:
        """Start generation."""
        return self._generate(self._call)

    def _generate(self, call: Call) -> Updates:
        """Generate. Errors of a grammar are attributed to the field that it derives from."""
        updates = self._serving.run(self._prompts, self._params, self._request, call)
        return updates if self._request.response_format is None else _of_format(updates)

    def _head(self, kind: str) -> dict[str, Any]:
        """Return OpenAI's first fields of an object of this kind. Every request is served in the default tier."""
        head = {
            "id": self._call.id, "created": self._created, "model": self._serving.names[0], "object": kind,
            "system_fingerprint": self._serving.fingerprint,
        }  # fmt: skip
        return head if self._request.service_tier is None else {**head, "service_tier": "default"}

    @abstractmethod
    def _body(self, choices: list[list[Choice]], scores: list[Scores]) -> dict[str, Any]:
        """Return the complete response from the outputs and the scores of each prompt."""

    def _opening_chunks(self) -> Iterable[dict[str, Any]]:
        """Return the chunks before the first output."""
        return ()

    @abstractmethod
    def _plain_encoder(self) -> PlainEvents | None:
        """Return the encoder of chunks that contain only text, or None if chunks contain more."""

    @abstractmethod
    def _chunk_choices(
        self, index: int, prompt: Prompt, output: CompletionOutput, scores: Scores
    ) -> Iterable[dict[str, Any]]:
        """Return the choices of the next chunks, none if they would be empty, for an update of output `index`."""


def prompt_logprobs(rows: Scores) -> Lazy | None:
    """Return prompt_logprobs in vLLM's format: per position, {id: {logprob, rank, decoded_token}}."""
    return None if rows is None else Lazy(map(_candidates, rows))


def _candidates(row: Row | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {
        str(token): {"logprob": clamped(item), "rank": item.rank, "decoded_token": item.decoded_token}
        for token, item in row.items()
    }


def clamped(item: Logprob) -> float:
    """Return the log-probability, limited to a value that JSON can represent."""
    return max(item.logprob, MIN_LOGPROB)


def token_text(token: int, item: Logprob, as_id: bool | None = False) -> str:
    """Return a candidate's text, or "token_id:N" if it has none or `as_id` is set."""
    return f"token_id:{token}" if as_id or item.decoded_token is None else item.decoded_token


async def _of_format(updates: Updates) -> Updates:
    """Yield the updates, and rename the field in their errors to `response_format`."""
    with renamed([("structured_outputs", "response_format")]):
        async with aclosing(updates) as items:  # type: ignore[type-var]
            async for item in items:
                yield item
