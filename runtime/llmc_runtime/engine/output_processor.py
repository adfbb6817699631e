"""OutputProcessor: turns the engine's deltas into the outputs of open requests, for LLM and AsyncLLM alike.

In: the RequestDeltas of a step, by the engine's ids of outputs. Out: the texts, tokens and errors in the RequestStates
of the callers, and the ids of outputs that the engine shall end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from llmc_runtime.engine.input_processor import EngineRequest
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.outputs import OutputAssembler, RequestState
from llmc_runtime.sched.request import RequestDelta


class OutputProcessor:
    """The open requests. `abort` gets the ids of outputs that the engine shall end.

    Belongs to the event loop of AsyncLLM, or to the thread that holds the lock of an LLM.
    """

    def __init__(self, abort: Callable[[list[str]], object]) -> None:
        self._abort = abort
        self._parts: dict[str, tuple[RequestState, OutputAssembler]] = {}  # outputs that run, by the engine's ids
        self._states: dict[RequestState, None] = {}  # in order of arrival
        self._next = 0

    def __len__(self) -> int:
        return len(self._states)

    def describe(self) -> list[dict[str, Any]]:
        """Return the open requests in order of arrival, as AsyncLLM.open_requests does."""
        now = time.monotonic()
        return [
            {
                "id": state.request_id,
                "prompt_tokens": len(state.prompt_ids),
                "output_tokens": state.num_tokens,
                "outputs": sum(not part.finished for part in state.parts),
                "age": round(now - state.began, 3),
            }
            for state in self._states
        ]

    def add(self, request: EngineRequest, state: RequestState) -> None:
        """Open a request: number its outputs. It is submitted to the engine by the caller."""
        request.first, self._next = self._next, self._next + request.params.n
        state.ids = tuple(map(str, request.numbers))
        self._parts |= {request_id: (state, part) for request_id, part in zip(state.ids, state.parts, strict=True)}
        self._states[state] = None

    def process(self, deltas: Iterable[RequestDelta]) -> None:
        """Add the deltas of a step to their requests, each of which is notified once. Outputs that ended by a stop
        string, or that belong to no open request, are aborted."""
        unwanted: list[str] = []
        changed: dict[RequestState, None] = {}
        for delta in deltas:
            entry = self._parts.get(delta.id)
            if entry is None:
                if delta.finish_reason is None:
                    unwanted.append(delta.id)
                continue
            state, part = entry
            if part.add(delta):
                unwanted.append(delta.id)
            if part.finish_reason is not None:
                del self._parts[delta.id]
                if part.error is not None:
                    unwanted += self._end(state, part.error)
            changed[state] = None
        for state in changed:
            state.notify()
        if unwanted:
            self._abort(unwanted)

    def drop(self, state: RequestState) -> None:
        """Close a request. Outputs that still run end with the finish reason "abort"."""
        self._states.pop(state, None)
        if running := self._end(state, None):
            self._abort(running)
        state.notify()

    def drop_all(self) -> None:
        """Close every request."""
        for state in list(self._states):
            self.drop(state)

    def abort(self, request_id: str) -> int:
        """Close the requests with this id, whose readers get a last output. Return their number."""
        states = [state for state in self._states if state.request_id == request_id]
        for state in states:
            self.drop(state)
        return len(states)

    def expire(self, state: RequestState, seconds: float) -> None:
        """End an unfinished request with LlmcError E666: its `seconds` have passed."""
        if not state.finished:
            cause = f"the request did not end within its {seconds:.3g} s"
            error = LlmcError("E666", cause, "allow more time, request fewer tokens, or try at another moment")
            self._abort(self._end(state, error))
            state.notify()

    def fail_all(self, error: LlmcError) -> int:
        """End every unfinished request with `error`, without telling the engine. Return their number."""
        unfinished = [state for state in self._states if not state.finished]
        for state in unfinished:
            self._end(state, error)
            state.notify()
        return len(unfinished)

    def _end(self, state: RequestState, error: LlmcError | None) -> list[str]:
        """End the outputs of a request; return the ids of those that still ran."""
        state.error = state.error or error
        running = [request_id for request_id in state.ids if self._parts.pop(request_id, None) is not None]
        for part in state.parts:
            part.abort()
        return running
