"""The recurrent layers of the fake device: the chain of a prefix after each of a row's last positions.

A row keeps as many of them as drafts may be rejected, and one. They stay until it starts from position 0 or from a
snapshot, so that a row that goes on from the wrong state gets wrong tokens.
"""

from __future__ import annotations


class FakeStates:
    """The states of `rows` rows, and snapshots of them (None: the model has no recurrent layers).

    `rejectable` is the maximum number of drafts that a step may reject.
    """

    def __init__(self, rows: int, snapshots: int | None, rejectable: int) -> None:
        self._recurrent, self._rejectable = snapshots is not None, rejectable
        self._states: list[dict[int, int]] = [{} for _ in range(rows)]  # by position: the chain of the tokens before it
        self._saved: list[dict[int, int]] = [{} for _ in range(snapshots or 0)]

    def restore(self, row: int, entry: int) -> None:
        """Copy a snapshot to a row; -1: none."""
        if entry >= 0:
            self._states[row] = dict(self._saved[entry])

    def save(self, row: int, entry: int) -> None:
        """Copy the states of a row to a snapshot."""
        self._saved[entry] = dict(self._states[row])

    def before(self, row: int, position: int, head: int) -> int:
        """Return the chain from which a row goes on; `head` is that of its KV."""
        return self._states[row].get(position, 0) if self._recurrent and position else head

    def put(self, row: int, position: int, head: int) -> None:
        """Store the chain of the tokens before a position."""
        self._states[row][position] = head

    def settle(self, row: int, first: int, end: int, length: int) -> None:
        """Keep the states to which a row can go back after the tokens from `first` to `end`, of which those from
        `length` on were rejected."""
        kept, states = range(max(first + 1, end - self._rejectable), end + 1), self._states[row]
        self._states[row] = {
            p: states.get(p, 0) if p <= length else hash((p, "rejected")) for p in kept if self._recurrent
        }
