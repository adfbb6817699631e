"""Log-probabilities in the form of the Python API, made from packed rows when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmc_runtime.sched.packed_logprobs import LazySequence, PackedLogprobs


class Logprob(NamedTuple):
    """A candidate at a position: its natural log-probability, its rank (1 is the most likely), its vocabulary entry."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Row = dict[int, Logprob]
Decode = Callable[[int], str | None]


class LogprobRows(LazySequence[Row | None]):
    """The log-probabilities of tokens `start` to `stop`: for each a dict from token ids to Logprob, its own id first.

    The dicts are made when they are read. The first `unscored` tokens of the text have None instead. A view is equal to
    a list of the same dicts.
    """

    __slots__ = ("_decode", "_rows", "_tokens", "_unscored", "start", "stop")

    def __init__(
        self, tokens: Sequence[int], rows: PackedLogprobs, decode: Decode, start: int, stop: int, unscored: int = 0
    ) -> None:
        self._tokens, self._rows, self._decode, self._unscored = tokens, rows, decode, unscored
        self.start, self.stop = start, stop

    def own(self, index: int) -> Logprob | None:
        """Return the entry of the token itself, without the other candidates."""
        at = self.start + index
        if at < self._unscored:
            return None
        return Logprob(*self._rows.own(at - self._unscored), self._decode(self._tokens[at]))

    def joined(self, later: LogprobRows) -> LogprobRows:
        """Join this view with the next one on the same rows. Raises ValueError if `later` is another one."""
        if later._rows is not self._rows or later.start != self.stop:
            raise ValueError("the views are not consecutive")
        return LogprobRows(self._tokens, self._rows, self._decode, self.start, later.stop, self._unscored)

    def __len__(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        return f"LogprobRows({len(self)} positions)"

    def _row(self, index: int) -> Row | None:
        at = self.start + index
        if at < self._unscored:
            return None
        token, row = self._tokens[at], self._rows[at - self._unscored]
        decode = self._decode
        out = {token: Logprob(row.logprob, row.rank, decode(token))}
        for rank, (other, value) in enumerate(zip(row.top_ids, row.top_logprobs), 1):
            if other != token:
                out[other] = Logprob(value, rank, decode(other))
        return out
