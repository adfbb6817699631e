"""Log-probabilities as programs read them, made from packed rows when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

from llmc_runtime.sched.packed_logprobs import PackedLogprobs


class Logprob(NamedTuple):
    """One candidate at one position: natural-log probability, rank (1 is the likeliest), its vocabulary entry."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Row = dict[int, Logprob]
Spelled = Callable[[int], str | None]


class LogprobRows(Sequence[Row | None]):
    """A read-only view of the log-probabilities of consecutive tokens: the mapping of each from ids to `Logprob`, its
    own token first, is made when it is read. A position below `unscored` is None. It compares equal to a list of the
    same mappings."""

    __slots__ = ("_rows", "_spelled", "_tokens", "_unscored", "start", "stop")

    def __init__(
        self, tokens: Sequence[int], rows: PackedLogprobs, spelled: Spelled, start: int, stop: int, unscored: int = 0
    ) -> None:
        self._tokens, self._rows, self._spelled, self._unscored = tokens, rows, spelled, unscored
        self.start, self.stop = start, stop

    @property
    def width(self) -> int:
        """The most candidates of a row, its own token not counted."""
        return self._rows.width

    def own(self, index: int) -> Logprob | None:
        """That of the token itself, without the other candidates."""
        at = self.start + index
        if at < self._unscored:
            return None
        return Logprob(*self._rows.own(at - self._unscored), self._spelled(self._tokens[at]))

    def joined(self, later: LogprobRows) -> LogprobRows:
        """This view and the one that follows it on the same rows."""
        if later._rows is not self._rows or later.start != self.stop:
            raise ValueError("the views are not consecutive")
        return LogprobRows(self._tokens, self._rows, self._spelled, self.start, later.stop, self._unscored)

    def __len__(self) -> int:
        return self.stop - self.start

    @overload
    def __getitem__(self, index: int) -> Row | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row | None]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row | None] | None:
        if isinstance(index, slice):
            return [self._row(self.start + i) for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError("no such position")
        return self._row(self.start + at)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LogprobRows({len(self)} positions)"

    def _row(self, at: int) -> Row | None:
        if at < self._unscored:
            return None
        token, row, spelled = self._tokens[at], self._rows[at - self._unscored], self._spelled
        out = {token: Logprob(row.logprob, row.rank, spelled(token))}
        for rank, (other, value) in enumerate(zip(row.top_ids, row.top_logprobs), 1):
            if other != token:
                out[other] = Logprob(value, rank, spelled(other))
        return out
