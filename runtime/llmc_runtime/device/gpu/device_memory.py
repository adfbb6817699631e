"""Pinned host memory for transfers, and the ring of staging slots that steps use in turn.

Invariant: the bytes of a slot are not reused while copies of the step that used it last may still be running.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmc_runtime.device.gpu.driver import GpuDriver

_ALIGN = 64


class Pinned:
    """Pinned host memory: `array` is u8[nbytes] at `address`. Views of it must not outlive `free`."""

    def __init__(self, driver: GpuDriver, nbytes: int) -> None:
        self._driver = driver
        self.address = driver.pin(max(1, nbytes))
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))

    def free(self) -> None:
        """Release the memory, ignoring errors."""
        self.array = np.empty(0, np.uint8)
        self._driver.unpin(self.address)


@dataclass(eq=False)
class Slot:
    """The staging buffers of one step: `up` to the device, `down` from it, and the event recorded at its end.

    `sent` and `fetched` are the bytes in use. `more` holds extra buffers for data that did not fit into `down`.
    `pending` is true while the event is recorded and has not been waited for.
    """

    event: Any
    up: Pinned
    down: Pinned
    sent: int = 0
    fetched: int = 0
    more: list[Pinned] = field(default_factory=list)
    pending: bool = False

    def reset(self) -> None:
        """Mark the buffers as empty and free the extra ones."""
        self.sent = self.fetched = 0
        for pinned in self.more:
            pinned.free()
        self.more.clear()


class Ring:
    """Staging slots used in turn, one per step, and the copies between them and device memory on one stream."""

    def __init__(self, driver: GpuDriver, stream: Any, slots: int, up: int = 4 << 20, down: int = 1 << 20) -> None:
        self._driver, self._stream = driver, stream
        self._current = 0
        self._slots: list[Slot] = []
        self._pinned: list[Pinned] = []
        self._events: list[Any] = []
        try:
            for _ in range(slots):
                self._events.append(driver.event())
                for nbytes in (up, down):
                    self._pinned.append(Pinned(driver, nbytes))
                self._slots.append(Slot(self._events[-1], self._pinned[-2], self._pinned[-1]))
        except BaseException:
            self.free()
            raise

    def send(self, address: int, data: np.ndarray) -> None:
        """Copy u8[n] to the device, in pieces if it is larger than a slot."""
        slot = self._slots[self._current]
        capacity = len(slot.up.array)
        for begin in range(0, len(data), capacity):
            piece = data[begin : begin + capacity]
            if slot.sent + len(piece) > capacity:  # rare: earlier copies must have left the slot first
                self._driver.ok(self._driver.synchronize(self._stream))
                slot.sent = 0
            at = slot.sent
            slot.up.array[at : at + len(piece)] = piece
            slot.sent = at + -(-len(piece) // _ALIGN) * _ALIGN
            self._driver.copy_in(address + begin, slot.up.address + at, len(piece), self._stream)

    def fetch(self, address: int, nbytes: int) -> np.ndarray:
        """Start a copy from the device. Returns u8[nbytes], which is valid once the slot's event has completed."""
        slot, at = self._slots[self._current], 0
        pinned = slot.down
        if slot.fetched + nbytes <= len(pinned.array):
            at = slot.fetched
            slot.fetched = at + -(-nbytes // _ALIGN) * _ALIGN
        else:
            pinned = Pinned(self._driver, nbytes)
            slot.more.append(pinned)
        if nbytes:
            self._driver.copy_out(pinned.address + at, address, nbytes, self._stream)
        return pinned.array[at : at + nbytes]

    def mark(self) -> Slot:
        """End the step: record the event of the current slot and return the slot. Waits until the next slot is free."""
        slot = self._slots[self._current]
        self._driver.record(slot.event, self._stream)
        slot.pending = True
        following = (self._current + 1) % len(self._slots)
        self.wait(self._slots[following])
        self._slots[following].reset()
        self._current = following
        return slot

    def wait(self, slot: Slot) -> None:
        """Block until the slot's step has ended."""
        if slot.pending:
            self._driver.wait(slot.event)
            slot.pending = False

    def done(self, slot: Slot) -> bool:
        """Return whether the slot's step has ended."""
        return not slot.pending or self._driver.completed(slot.event)

    def free(self) -> None:
        """Release everything. No copy may be running."""
        for slot in self._slots:
            slot.reset()
        for pinned in self._pinned:
            pinned.free()
        for event in self._events:
            self._driver.destroy_event(event)
        for resources in (self._slots, self._pinned, self._events):
            resources.clear()
