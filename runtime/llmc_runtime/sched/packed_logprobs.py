"""PackedLogprobs: log-probabilities of many tokens in 12 bytes per candidate; Python objects take more than 60."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeVar, overload

from llmc_runtime.sched.step import TokenLogprobs

T = TypeVar("T")
_NONE = -1  # id of a missing candidate


@lru_cache(64)
def _layout(width: int) -> struct.Struct:
    return struct.Struct(f"<di{width}i{width}d")


class LazySequence(Sequence[T]):
    """A read-only sequence whose items are made by `_row` when they are read. It is equal to a list of its items."""

    __slots__ = ()

    def _row(self, index: int) -> T:
        """Make the item at `index`, which is from 0 to len(self) - 1."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"index {index} is out of range")
        return self._row(at)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other))

    __hash__ = None  # type: ignore[assignment]


class PackedLogprobs(LazySequence[TokenLogprobs]):
    """A sequence of TokenLogprobs with up to `width` most likely candidates each, stored as bytes.

    Rows are unpacked when they are read. Raises ValueError if `data` does not consist of whole rows.
    """

    __slots__ = ("_layout", "data", "width")

    def __init__(self, width: int, data: bytes = b"") -> None:
        self.width, self.data = width, bytearray(data)
        self._layout = _layout(width)
        if len(self.data) % self._layout.size:
            raise ValueError(f"{len(self.data)} bytes are not rows of {self._layout.size}")

    def append(self, row: TokenLogprobs) -> None:
        """Add a row with the `width` most likely of its candidates."""
        width = self.width
        ids, values = row.top_ids[:width], row.top_logprobs[:width]
        if lacking := width - len(ids):
            ids, values = [*ids, *[_NONE] * lacking], [*values, *[0.0] * lacking]
        self.data += self._layout.pack(row.logprob, row.rank, *ids, *values)

    def extend(self, rows: Iterable[TokenLogprobs]) -> None:
        """Add rows."""
        if isinstance(rows, PackedLogprobs) and rows.width == self.width:
            self.data += rows.data
            return
        for row in rows:
            self.append(row)

    def own(self, index: int) -> tuple[float, int]:
        """Return the log-probability and the rank of a row's token."""
        logprob, rank = _OWN.unpack_from(self.data, index * self._layout.size)
        return logprob, rank

    def __len__(self) -> int:
        return len(self.data) // self._layout.size

    def __repr__(self) -> str:
        return f"PackedLogprobs({list(self)!r})"

    def _row(self, index: int) -> TokenLogprobs:
        """Unpack the entry of one token."""
        logprob, rank, *candidates = self._layout.unpack_from(self.data, index * self._layout.size)
        count = self.width
        ids, values = tuple(candidates[:count]), tuple(candidates[count:])
        if count and ids[-1] == _NONE:
            count = ids.index(_NONE)
            ids, values = ids[:count], values[:count]
        return TokenLogprobs(logprob, rank, ids, values)


_OWN = struct.Struct("<di")
