"""Stream: the outputs of a request in progress, as an iterator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine.output_processor import OutputProcessor
from llmc_runtime.fair_lock import FairLock
from llmc_runtime.outputs import Piece, RequestOutput, RequestState


class Stream:
    """A request in progress: an iterator over the pieces of its outputs, in the order in which they are generated.

    Closing or deleting the stream aborts the request. `owner` is kept alive as long as the stream. The iterator raises
    LlmcError if the request fails.
    """

    def __init__(
        self, state: RequestState, lock: FairLock, engine: Engine, outputs: OutputProcessor, owner: object
    ) -> None:
        self._state, self._lock, self._engine, self._outputs = state, lock, engine, outputs
        self._drop, self._owner = partial(outputs.drop, state), owner
        self._open = list(state.parts)  # whose last piece has not been returned yet

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        try:
            while self._open:
                with self._lock:
                    if (piece := self._next_piece()) is not None:
                        return piece
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def _next_piece(self) -> Piece | None:
        """Return the next piece, which may need a step of the engine; None if that step yields none."""
        if not any(part.finished or part.has_new_tokens for part in self._open):
            self._outputs.process(self._engine.step())
        if self._state.error is not None:
            raise self._state.error
        part = next((part for part in self._open if part.finished or part.has_new_tokens), None)
        if part is None:
            return None
        if part.finished:
            self._open.remove(part)
        return part.piece()

    @property
    def output(self) -> RequestOutput:
        """Everything so far, including the prompt."""
        with self._lock:
            return self._state.output()

    def close(self) -> None:
        """Abort the request if it has not finished."""
        if not self._lock.forked:
            with self._lock:
                self._drop()
        self._open.clear()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._lock.run_soon(self._drop)
