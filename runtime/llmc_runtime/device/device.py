"""What a device is to the executor: a few verbs over memory and programs; nothing here knows a machine.

Everything a device is asked to do happens in the order in which it was asked, some of it perhaps after the call has
returned; `mark` and `wait` say when. A device that is done whenever a call returns has a `depth` of 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc_runtime.artifact import Artifact
from llmc_runtime.format.program import Program

Run = Callable[[], None]
Event = Any  # what `mark` gives and `wait` takes; each device has its own


@dataclass(frozen=True)
class Memory:
    """Device memory: its address there, its size, and its bytes as the host sees them, u8[nbytes].

    `host` is empty where the host does not see them.
    """

    address: int
    nbytes: int
    host: np.ndarray

    def part(self, begin: int, end: int) -> Memory:
        """The bytes [begin, end) as a memory of their own."""
        return Memory(self.address + begin, end - begin, self.host[begin:end])


class Device(ABC):
    """One device, opened for one artifact at a time.

    `depth`: steps that may be under way at once. `share`: of the memory that is free, what a KV cache takes when nobody
    says otherwise. `separate`: the device has memory of its own, into which weights are copied. `replays`: decode steps
    run in few sizes, each of which `prepare` readies (a device graph).
    """

    name: str
    depth: int = 1
    share: float = 0.5
    separate: bool = False
    replays: bool = False

    @abstractmethod
    def alloc(self, nbytes: int) -> Memory:
        """Zeroed memory, aligned to 4096 bytes where large; LlmcError E203 where there is none."""

    @abstractmethod
    def write(self, memory: Memory, begin: int, data: np.ndarray) -> None:
        """Put the array's bytes (C order) at byte `begin`; the array may change as soon as this returns."""

    @abstractmethod
    def zero(self, memory: Memory, begin: int, end: int) -> None:
        """Put zeros into the bytes [begin, end)."""

    @abstractmethod
    def repeat(self, memory: Memory, tile: np.ndarray, at: int) -> None:
        """Fill the memory with `tile`, u8[n], over and over, beginning at its byte `at`. The tile does not change."""

    @abstractmethod
    def fetch(self, memory: Memory, begin: int, end: int) -> np.ndarray:
        """The bytes [begin, end) as they are now in the device's order, u8[end - begin].

        They are there once the next `mark` has been waited for, until `depth` more marks have been made.
        """

    @abstractmethod
    def read(self, memory: Memory) -> np.ndarray:
        """A copy of the memory, after everything asked for so far; for tools and tests."""

    def mark(self) -> Event:
        """The end of a step: an event that comes when everything asked for so far is done."""
        return None

    def wait(self, event: Event) -> None:
        """Until the event has come. LlmcError E114 where the device failed on the way to it."""
        return

    def done(self, event: Event) -> bool:
        """Whether the event has come, as far as can be said at once; a failure counts as having come."""
        return True

    @abstractmethod
    def place(self, artifact: Artifact, names: Iterable[str]) -> Mapping[str, int]:
        """The addresses of the artifact's weights of these names, brought to the device if need be.

        Compares their hashes on the way where `artifact.unchecked` says so: LlmcError E107.
        """

    @property
    def brought(self) -> str:
        """How `place` brought the weights here, how fast and which way, in words; empty where it did not have to."""
        return ""

    @abstractmethod
    def load(self, artifact: Artifact) -> None:
        """Load the artifact's kernels; LlmcError E112 where one cannot be."""

    @abstractmethod
    def bind(self, program: Program, addresses: Sequence[int], symbols: np.ndarray) -> Run:
        """One call runs the program once, with these buffers and the values `symbols` (i64, in order) then has."""

    def prepare(self, run: Run) -> None:
        """Do beforehand what the first call of `run` with the present symbols would do once; nothing is run."""
        return

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that could be allocated now."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back, also after a failure. Nothing of this device may be used afterwards."""

    def describe(self) -> Mapping[str, object]:
        """Facts about the device for people."""
        return {"name": self.name}
