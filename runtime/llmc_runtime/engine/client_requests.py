"""The open requests of the front: deltas go in, outputs come out as fast as their reader takes them. No sockets.

A slow reader holds nobody: its request keeps one state, into which deltas are merged, and one mark that it changed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llmc_runtime.engine.messages import Delta, received
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.outputs import Answer, Collector, CompletionOutput, RequestOutput
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.text.tokenizer import Tokenizer

_INLINE = 200  # prompt tokens whose log-probabilities are told without a thread
KINDS = ("cumulative", "delta", "final_only")


class Reader:
    """One request: its outputs so far, and who waits for more. Ends with LlmcError where the request did."""

    def __init__(self, answer: Answer, first: int, kind: str) -> None:
        self.answer, self.first, self._kind = answer, first, kind
        self.error: LlmcError | None = None
        self.began = time.monotonic()
        self._changed = False
        self._waiting: asyncio.Future[None] | None = None
        self._open = list(answer.parts)  # whose last piece was not given yet
        self._texts = [""] * len(answer.parts)
        self._prompt_ids = list(answer.prompt_ids)

    @property
    def numbers(self) -> range:
        """What the engine calls its outputs."""
        return range(self.first, self.first + len(self.answer.parts))

    def wake(self) -> None:
        """Something changed."""
        if self._kind != "final_only" or self.error is not None or self.answer.finished:
            self._changed = True
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)

    async def next(self) -> RequestOutput | None:
        """What is new, by kind (see AsyncLLM.generate), as soon as there is something; None at the end."""
        while self._open:
            if not self._changed:
                self._waiting = asyncio.get_running_loop().create_future()
                await self._waiting
            self._changed = False
            if self._kind != "delta" and self.answer.parts[0].num_scored > _INLINE:  # others go on meanwhile
                await asyncio.to_thread(getattr, self.answer.parts[0], "prompt_logprobs")
            if self.error is not None:
                raise self.error
            if self._kind == "final_only":
                self._open.clear()
                return self.answer.output()
            new = self._news(self._kind == "delta")
            if new:
                return self._output(new)
        return None

    def _news(self, delta: bool) -> list[CompletionOutput]:
        """The outputs that have something new, or all of them so far; none where nothing is new."""
        found = []
        for part in tuple(self._open):
            if not (part.fresh or part.finished):
                continue
            found.append(news := part.news())
            if not delta:
                self._texts[news.index] += news.text
            if part.finished:
                self._open.remove(part)
        if delta or not found:
            return found
        return [replace(part.output(), text=self._texts[part.index]) for part in self.answer.parts]

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        answer, first = self.answer, self.answer.parts[0]
        finished, cached = not self._open, first.num_cached
        scores = first.scores if self._kind == "delta" else first.prompt_logprobs
        return RequestOutput(
            answer.request_id, answer.prompt, self._prompt_ids, outputs, finished, cached, scores, first.times
        )


class Requests:
    """All open requests, by the numbers of their outputs. `abort` is told which numbers nobody waits for."""

    def __init__(self, abort: Callable[[list[int]], None]) -> None:
        self._abort = abort
        self._parts: dict[int, tuple[Reader, Collector]] = {}
        self._readers: dict[Reader, None] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._readers)

    def describe(self) -> list[dict[str, Any]]:
        """Each, in the order in which they came: see AsyncLLM.open_requests."""
        now = time.monotonic()
        return [
            {
                "id": reader.answer.request_id,
                "prompt_tokens": len(reader.answer.prompt_ids),
                "output_tokens": reader.answer.num_tokens,
                "outputs": sum(not part.finished for part in reader.answer.parts),
                "age": round(now - reader.began, 3),
            }
            for reader in self._readers
        ]

    def open(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        kind: str,
        visible: frozenset[int] = frozenset(),
    ) -> Reader:
        """A request with numbers of its own; nothing is sent."""
        first, self._next = self._next, self._next + params.n
        parts = [Collector(str(first + i), i, prompt.ids, params, tokenizer, visible) for i in range(params.n)]
        reader = Reader(Answer(request_id, prompt.text, prompt.ids, parts), first, kind)
        self._parts |= {first + i: (reader, part) for i, part in enumerate(parts)}
        self._readers[reader] = None
        return reader

    def take(self, deltas: Sequence[Delta]) -> None:
        """What the engine did. Of a request that nobody knows it is told to end it."""
        unwanted = []
        for delta in deltas:
            found = self._parts.get(delta.id)
            if found is None:
                if delta.finish_reason is None:
                    unwanted.append(delta.id)
                continue
            reader, part = found
            if part.take(received(delta)):
                unwanted.append(delta.id)
            if part.finished:
                del self._parts[delta.id]
            if part.error is not None:
                unwanted += self._end(reader, part.error)
            reader.wake()
        if unwanted:
            self._abort(unwanted)

    def drop(self, reader: Reader) -> None:
        """Nobody waits for this one any more; it ends where it is."""
        self._readers.pop(reader, None)
        unwanted = self._end(reader, None)
        if unwanted:
            self._abort(unwanted)
        reader.wake()

    def abort(self, request_id: str) -> int:
        """End what has this id; their readers get a last output. How many there were."""
        found = [reader for reader in self._readers if reader.answer.request_id == request_id]
        for reader in found:
            self.drop(reader)
        return len(found)

    def expire(self, reader: Reader, seconds: float) -> None:
        """Its time is over: it ends now with E666, whether somebody reads it or not, unless it has finished."""
        if not reader.answer.finished:
            cause = f"the request did not end within its {seconds:.3g} s"
            self._abort(self._end(reader, LlmcError("E666", cause, "more time, fewer tokens, or another moment")))
            reader.wake()

    def fail_all(self, error: LlmcError) -> int:
        """Every open request ends with `error`. How many had not finished."""
        failed = 0
        for reader in self._readers:
            if not reader.answer.finished:
                failed += 1
                self._end(reader, error)
                reader.wake()
        return failed

    def _end(self, reader: Reader, error: LlmcError | None) -> list[int]:
        """The numbers that still ran."""
        reader.error = reader.error or error
        running = [number for number in reader.numbers if self._parts.pop(number, None) is not None]
        for part in reader.answer.parts:
            part.abort()
        return running
