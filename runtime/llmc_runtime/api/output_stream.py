"""Stream: the outputs of a request in progress, as an iterator; and the progress bar of `LLM.generate`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llmc_runtime.engine.output_processor import OutputProcessor
from llmc_runtime.fair_lock import FairLock
from llmc_runtime.outputs import Piece, RequestOutput, RequestState

if TYPE_CHECKING:
    from llmc_runtime.engine.engine import Engine


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


class ProgressBar:
    """A context manager for `total` prompts. Without `shown`, or without prompts, it prints nothing."""

    def __init__(self, total: int, shown: bool) -> None:
        self._done = 0
        self._began = self._shown = time.perf_counter()
        self._bar: Any = None
        if shown and total and sys.stderr is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc="prompts", dynamic_ncols=True, file=sys.stderr)

    def show(self, states: Sequence[RequestState], *, last: bool = False) -> None:
        """Update the bar, at most ten times a second unless it is the `last` time."""
        now = time.perf_counter()
        if self._bar is None or (now - self._shown < 0.1 and not last):
            return
        self._shown = now
        done = sum(a.finished for a in states)
        seconds = max(now - self._began, 1e-9)
        read = sum(len(a.prompt_ids) for a in states if a.num_tokens)
        written = sum(a.num_tokens for a in states)
        speeds = f"in {read / seconds:.1f} tok/s, out {written / seconds:.1f} tok/s"
        self._bar.set_postfix_str(speeds, refresh=False)
        with contextlib.suppress(OSError):  # stderr is closed
            self._bar.update(done - self._done)
        self._done = done

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()
