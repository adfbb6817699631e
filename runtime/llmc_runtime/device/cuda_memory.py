"""Host memory that the GPU copies from and to: pinned arrays, and the ring of slots that steps use in turn; no kernels.

Invariant: the bytes of a slot are not touched while copies of the step that used it last may still be under way.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmc_runtime.device.cuda_names import Cuda

_ALIGN = 64


class Pinned:
    """Pinned host memory: `array` u8[nbytes] at `address`. Views of it must not outlive `free`."""

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self._cuda = cuda
        self.address = int(cuda.ok(cuda.cu.cuMemAllocHost(max(1, nbytes))))
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))

    def free(self) -> None:
        """Give it back; errors are not told, as there is nothing to do about them."""
        self.array = np.empty(0, np.uint8)
        self._cuda.cu.cuMemFreeHost(self.address)


@dataclass(eq=False)
class Slot:
    """One step's bytes: `up` to the device, `down` from it, and the event of the step's end.

    `sent` and `fetched` bytes are in use; `more` is what did not fit into `down`; `pending`: the event was recorded
    and not waited for.
    """

    event: Any
    up: Pinned
    down: Pinned
    sent: int = 0
    fetched: int = 0
    more: list[Pinned] = field(default_factory=list)
    pending: bool = False

    def reset(self) -> None:
        self.sent = self.fetched = 0
        for pinned in self.more:
            pinned.free()
        self.more.clear()


class Ring:
    """Slots in turn, one a step, and the copies between them and device memory, all in one stream."""

    def __init__(self, cuda: Cuda, stream: Any, slots: int, up: int = 4 << 20, down: int = 1 << 20) -> None:
        self._cuda, self._stream = cuda, stream
        self._now = 0
        self._slots: list[Slot] = []
        self._pinned: list[Pinned] = []
        self._events: list[Any] = []
        try:
            for _ in range(slots):
                self._events.append(cuda.event())
                for nbytes in (up, down):
                    self._pinned.append(Pinned(cuda, nbytes))
                self._slots.append(Slot(self._events[-1], self._pinned[-2], self._pinned[-1]))
        except BaseException:
            self.free()
            raise

    def send(self, address: int, data: np.ndarray) -> None:
        """Copy u8[n] to the device; pieces where it is larger than a slot."""
        slot = self._slots[self._now]
        room = len(slot.up.array)
        for begin in range(0, len(data), room):
            piece = data[begin : begin + room]
            if slot.sent + len(piece) > room:  # rare: everything so far must have left the slot
                self._cuda.ok(self._cuda.cu.cuStreamSynchronize(self._stream))
                slot.sent = 0
            at = slot.sent
            slot.up.array[at : at + len(piece)] = piece
            slot.sent = at + -(-len(piece) // _ALIGN) * _ALIGN
            self._cuda.ok(
                self._cuda.cu.cuMemcpyHtoDAsync(address + begin, slot.up.address + at, len(piece), self._stream)
            )

    def fetch(self, address: int, nbytes: int) -> np.ndarray:
        """Where the device's bytes will be, u8[nbytes], once the slot's event has come."""
        slot, at = self._slots[self._now], 0
        pinned = slot.down
        if slot.fetched + nbytes <= len(pinned.array):
            at = slot.fetched
            slot.fetched = at + -(-nbytes // _ALIGN) * _ALIGN
        else:
            pinned = Pinned(self._cuda, nbytes)
            slot.more.append(pinned)
        if nbytes:
            self._cuda.ok(self._cuda.cu.cuMemcpyDtoHAsync(pinned.address + at, address, nbytes, self._stream))
        return pinned.array[at : at + nbytes]

    def mark(self) -> Slot:
        """End the step: its slot, whose event is recorded. The next slot is free when this returns."""
        slot = self._slots[self._now]
        self._cuda.ok(self._cuda.cu.cuEventRecord(slot.event, self._stream))
        slot.pending = True
        after = (self._now + 1) % len(self._slots)
        self.wait(self._slots[after])
        self._slots[after].reset()
        self._now = after
        return slot

    def wait(self, slot: Slot) -> None:
        """Until the slot's step has ended."""
        if slot.pending:
            self._cuda.ok(self._cuda.cu.cuEventSynchronize(slot.event))
            slot.pending = False

    def done(self, slot: Slot) -> bool:
        """Whether the slot's step has ended."""
        return not slot.pending or self._cuda.came(slot.event)

    def free(self) -> None:
        """Give everything back; nothing may be under way."""
        for slot in self._slots:
            slot.reset()
        for pinned in self._pinned:
            pinned.free()
        for event in self._events:
            self._cuda.cu.cuEventDestroy(event)
        for kept in (self._slots, self._pinned, self._events):
            kept.clear()
