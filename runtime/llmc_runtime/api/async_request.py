"""AsyncRequestState: an open request of AsyncLLM, whose outputs a coroutine awaits.

A slow reader delays no other request: deltas are merged into the request's state, and a flag marks the change. Waking a
reader costs more than merging a delta, so a reader that needs nothing at once is woken at intervals.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

from llmc_runtime.outputs import CompletionOutput, RequestOutput, RequestState
from llmc_runtime.sched.parameter_type import refused

OUTPUT_KINDS = ("cumulative", "delta", "final_only")
MAX_UPDATE_TOKENS = 512  # tokens that one delta returns, over all outputs: what its reader does with them takes time
_MAX_TIMEOUT_SECONDS = 1_000_000
_MAX_INLINE = 200  # prompt tokens whose log-probabilities are converted without a thread


class AsyncRequestState(RequestState):
    """The state of a request in the event loop of AsyncLLM.

    `kind` and `interval` are as in AsyncLLM.generate; the other arguments are those of RequestState. The engine client
    adds deltas and calls `notify`; the coroutine that reads the request awaits `next`. `on_end` is called once the
    request has ended or failed, before its reader knows.
    """

    on_end: Callable[[], object] | None = None

    def __init__(self, kind: str, interval: float, *request: Any) -> None:
        super().__init__(*request)
        self._kind, self._interval = kind, interval
        self._notified = -math.inf  # time of the last notification before the end
        self._changed = False
        self._waiting: asyncio.Future[None] | None = None
        self._open = list(self.parts)  # whose last output has not been returned yet
        self._texts = [""] * len(self.parts)
        self._ids: list[int] | None = None  # those of the prompt, once there is an output

    @property
    def streams(self) -> bool:
        """Whether the reader is notified of each output at once."""
        return self._kind != "final_only" and not self._interval

    def notify(self) -> None:
        """Wake the reader if there is something to return and its interval is over, or if the request has ended."""
        if self.error is not None or self.finished:
            if self.on_end is not None:
                on_end, self.on_end = self.on_end, None
                on_end()
        elif not self._due():
            return
        self._changed = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _due(self) -> bool:
        """Return whether to notify the reader of an unfinished request now."""
        if self._kind == "final_only":
            return False
        if self._interval:
            now = time.monotonic()
            if now < self._notified + self._interval:
                return False
            self._notified = now
        return True

    async def next(self) -> RequestOutput | None:
        """Wait for new output and return it; None at the end. Raises LlmcError if the request fails."""
        while self._open:
            if not self._changed:
                self._waiting = asyncio.get_running_loop().create_future()
                await self._waiting
            self._changed = False
            if self._kind != "delta" and self.parts[0].num_scored > _MAX_INLINE:
                await asyncio.to_thread(getattr, self.parts[0], "prompt_logprobs")
            if self.error is not None:
                raise copy(self.error)  # the frames to which a raised error refers have this object
            if self._kind == "final_only":
                self._open.clear()
                return self.output()
            if outputs := self._changed_outputs():
                return self._request_output(outputs)
        return None

    def _changed_outputs(self) -> list[CompletionOutput]:
        """Return the outputs that have changed, or all of them for "cumulative"; none if nothing has changed.

        For "delta", what exceeds MAX_UPDATE_TOKENS is left for the next call.
        """
        changed, room = [], MAX_UPDATE_TOKENS if self._kind == "delta" else sys.maxsize
        for part in tuple(self._open):
            if not (part.has_new_tokens or part.finished):
                continue
            if room <= 0:
                self._changed = True
                break
            changed.append(new := part.new_output(room))
            room -= len(new.token_ids)
            if self._kind != "delta":
                self._texts[new.index] += new.text
            if new.finish_reason is not None:
                self._open.remove(part)
            elif part.has_new_tokens:
                self._changed = True
        if self._kind == "delta" or not changed:
            return changed
        return [replace(part.output(), text=self._texts[part.index]) for part in self.parts]

    def _request_output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        if self._ids is None:
            self._ids = list(self.prompt_ids)
        first = self.parts[0]
        scores = first.scores if self._kind == "delta" else first.prompt_logprobs
        return RequestOutput(
            self.request_id, self.prompt, self._ids, outputs, not self._open, first.num_cached, scores, first.times,
            self.num_accepted,
        )  # fmt: skip


def check_timeout(timeout: float | None) -> None:
    """Raise LlmcError E601 unless the time limit of a request is allowed."""
    if timeout is not None and not (isinstance(timeout, int | float) and 0 <= timeout <= _MAX_TIMEOUT_SECONDS):
        raise refused("timeout", timeout, f"none, or seconds, 0 to {_MAX_TIMEOUT_SECONDS}")
