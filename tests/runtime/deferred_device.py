"""A CPU device whose steps overlap like those of a GPU: operations run only when an event after them is waited for.

Two steps may be in flight. The second one is thus planned and launched before anything of the first one has run, and
the host cannot access the memory. Kernels are those of the CPU.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from llmc_runtime.device.cpu_device import CpuDevice
from llmc_runtime.device.device import Event, Memory, Run
from llmc_runtime.format.program import Program

_NOTHING = np.empty(0, np.uint8)
_GARBAGE = 0xAB  # overwrites fetched bytes once they are no longer valid


class DeferredDevice(CpuDevice):
    """The CPU device with two steps in flight. `most_in_flight` is the maximum number of marks that were in flight."""

    name = "deferred"
    depth = 2

    def __init__(self, threads: int | None = 1) -> None:
        super().__init__(threads)
        self.most_in_flight = 0
        self._pending: deque[tuple[int, Callable[[], None]]] = deque()  # operations, with the number of the next mark
        self._marks = self._reached = 0  # marks made, and marks that were reached
        self._fetched: deque[tuple[int, np.ndarray]] = deque()
        self._whole: dict[str, Program] = {}  # programs as first bound, by name

    def alloc(self, nbytes: int) -> Memory:
        """Allocate zeroed memory that the host cannot access."""
        memory = super().alloc(nbytes)
        self._references.append(memory.host)
        return Memory(memory.address, nbytes, _NOTHING)

    def write(self, memory: Memory, begin: int, data: np.ndarray) -> None:
        """Submit a write of the array's present bytes."""
        values = np.ascontiguousarray(data).tobytes()
        assert begin + len(values) <= memory.nbytes
        self._submit(lambda: ctypes.memmove(memory.address + begin, values, len(values)))

    def zero(self, memory: Memory, begin: int, end: int) -> None:
        """Submit that the bytes [begin, end) are zeroed."""
        self._submit(lambda: ctypes.memset(memory.address + begin, 0, end - begin))

    def copy(self, target: Memory, at: int, source: Memory, begin: int, nbytes: int) -> None:
        """Submit a copy from one memory to another."""
        self._submit(lambda: ctypes.memmove(target.address + at, source.address + begin, nbytes))

    def repeat(self, memory: Memory, tile: np.ndarray, at: int) -> None:
        """Submit that the memory is filled with repetitions of `tile`."""
        visible = Memory(memory.address, memory.nbytes, _bytes_at(memory.address, memory.nbytes))
        self._submit(lambda: super(DeferredDevice, self).repeat(visible, tile, at))

    def fetch(self, memory: Memory, begin: int, end: int) -> np.ndarray:
        """Submit a read. The result is garbage until it has run, and again `depth` marks after it became valid."""
        out = np.full(end - begin, _GARBAGE, np.uint8)
        self._submit(lambda: ctypes.memmove(out.ctypes.data, memory.address + begin, len(out)))
        self._fetched.append((self._marks, out))
        return out

    def read(self, memory: Memory) -> np.ndarray:
        """Run everything and return a copy of the memory."""
        self.wait(self._marks)
        return _bytes_at(memory.address, memory.nbytes).copy()

    def mark(self) -> Event:
        """End a step; the event is the number of marks before it."""
        event = self._marks
        self._marks += 1
        self.most_in_flight = max(self.most_in_flight, self._marks - self._reached)
        while self._fetched and self._fetched[0][0] <= event - self.depth:
            self._fetched.popleft()[1].fill(_GARBAGE)
        return event

    def wait(self, event: Event) -> None:
        """Run the operations that were submitted before the event."""
        while self._pending and self._pending[0][0] <= event:
            self._pending.popleft()[1]()
        self._reached = max(self._reached, event + 1)

    def done(self, event: Event) -> bool:
        """Return whether the event was waited for: nothing runs before."""
        return bool(event < self._reached)

    def bind(self, program: Program, addresses: Sequence[int], symbols: np.ndarray) -> Run:
        """Return a function that submits the program with the present values of the symbols.

        Of a program in halves (see Executor.guide), the second one runs everything, since the step function of a CPU
        cannot be split. This is the same, since only token masks are written between the two.
        """
        whole = self._whole.setdefault(program.name, program)
        if len(program.launches) < len(whole.launches) and program.launches[0] == whole.launches[0]:
            return lambda: None
        values = symbols.copy()
        run = super().bind(whole, addresses, values)

        def step(present: np.ndarray) -> None:
            values[:] = present
            run()

        def submit() -> None:
            present = symbols.copy()
            self._submit(lambda: step(present))

        return submit

    def close(self) -> None:
        """Drop what has not run, and release everything."""
        self._pending.clear()
        super().close()

    def _submit(self, operation: Callable[[], Any]) -> None:
        self._pending.append((self._marks, operation))


def defer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines for CPUs that are opened from now on have such a device."""
    monkeypatch.setattr("llmc_runtime.engine.loader.open_device", lambda *args, **options: DeferredDevice())


def _bytes_at(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else _NOTHING
