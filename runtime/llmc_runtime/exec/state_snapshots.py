"""Copies of the states of recurrent layers: from a device row to a snapshot, and back."""

from __future__ import annotations

from collections.abc import Sequence

from llmc_runtime.device.device import Device, Memory
from llmc_runtime.format.manifest import State, in_snapshot


class StateSnapshots:
    """Snapshots in `memory`, one after the other, each with a row's part of every state, in order.

    The copies run in the device's order of execution, so the host waits for none.
    """

    def __init__(self, device: Device, memory: Memory, states: Sequence[tuple[State, Memory]]) -> None:
        self._device, self._memory = device, memory
        self._parts: list[tuple[Memory, int, int]] = []  # a state, its bytes per row, and their place in a snapshot
        at = 0
        for state, place in states:
            self._parts.append((place, state.row_bytes, at))
            at += in_snapshot(state)
        self._stride = at

    def save(self, row: int, entry: int) -> None:
        """Copy the states of a row to a snapshot."""
        for state, nbytes, at in self._parts:
            self._device.copy(self._memory, entry * self._stride + at, state, row * nbytes, nbytes)

    def restore(self, entry: int, row: int) -> None:
        """Copy a snapshot to the states of a row."""
        for state, nbytes, at in self._parts:
            self._device.copy(state, row * nbytes, self._memory, entry * self._stride + at, nbytes)
