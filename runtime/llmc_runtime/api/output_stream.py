"""A request in progress as an iterator over the pieces of its outputs; it schedules and detokenizes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from llmc_runtime.engine.request_table import Live
from llmc_runtime.fair_lock import Turns
from llmc_runtime.outputs import Answer, Piece, RequestOutput


class Stream:
    """One request in progress: iterate for its pieces, of several outputs as they come. Closing it (or losing it) ends
    the request. The `owner` of the engine lives as long as the stream."""

    def __init__(self, answer: Answer, turns: Turns, live: Live, owner: object) -> None:
        self._answer, self._turns, self._step = answer, turns, live.step
        self._drop, self._owner = partial(live.drop, answer), owner
        self._open = list(answer.parts)  # whose last piece was not given yet

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        try:
            while self._open:
                with self._turns:
                    if not any(part.finished or part.fresh for part in self._open):
                        self._step()
                    if self._answer.error is not None:
                        raise self._answer.error
                    part = next((part for part in self._open if part.finished or part.fresh), None)
                    if part is not None:
                        if part.finished:
                            self._open.remove(part)
                        return part.piece()
        except BaseException:
            self.close()
            raise
        raise StopIteration

    @property
    def output(self) -> RequestOutput:
        """Everything so far, the prompt included."""
        with self._turns:
            return self._answer.output()

    def close(self) -> None:
        """End the request now."""
        if not self._turns.elsewhere:
            with self._turns:
                self._drop()
        self._open.clear()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._turns.soon(self._drop)
