"""The interface between the executor and a device.

A device executes all operations in the order of the calls, possibly after the call has returned; `mark` and `wait`
synchronize. A device whose calls return only after completion has a `depth` of 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc_runtime.artifact import Artifact
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.program import Program

Run = Callable[[], None]
_GPU_SHARE, _CPU_SHARE = 0.9, 0.5
Event = Any  # returned by `mark`, accepted by `wait`; the type depends on the device


@dataclass(frozen=True)
class Memory:
    """Device memory: its address, its size in bytes, and its contents as seen by the host, u8[nbytes].

    `host` is empty if the host cannot access the memory.
    """

    address: int
    nbytes: int
    host: np.ndarray

    def part(self, begin: int, end: int) -> Memory:
        """Return the bytes [begin, end) as a memory of their own, without a copy."""
        return Memory(self.address + begin, end - begin, self.host[begin:end])


@dataclass(frozen=True)
class Member:
    """This process's place in a group of ranks, which run the same programs together.

    `rank` is its number, below `ranks`. `memory` is the file descriptor of the memory that the group shares. `limit` is
    the number of seconds for which a rank waits for another at most.
    """

    rank: int
    ranks: int
    memory: int
    limit: float


def group_ended(cause: str) -> LlmcError:
    """Return the error for a group of ranks that has ended."""
    return LlmcError("E119", cause, "send the request again; if it happens again, report it")


def kv_share(separate: bool, users: int) -> float:
    """Return the default fraction of a device's free memory for the KV cache of one of `users` engines and ranks.

    On a CPU they use the same memory; with `separate` memory, each has a device of its own.
    """
    return _GPU_SHARE if separate else _CPU_SHARE / users


class Device(ABC):
    """One device, opened for one artifact at a time.

    Class attributes: `depth` is the number of steps that may be in flight. `separate` means that the device has its own
    memory, into which weights are copied. `replays` means that decode steps run in few sizes, each of which `prepare`
    makes ready (as a device graph).

    `users` is the number of engines and ranks whose devices are of this kind on this machine.
    """

    name: str
    depth: int = 1
    separate: bool = False
    replays: bool = False
    users: int = 1

    @property
    def share(self) -> float:
        """The default fraction of the free memory for the KV cache."""
        return kv_share(self.separate, self.users)

    @abstractmethod
    def alloc(self, nbytes: int) -> Memory:
        """Allocate zeroed memory, aligned to 4096 bytes if large; raise LlmcError E203 if there is not enough."""

    @abstractmethod
    def write(self, memory: Memory, begin: int, data: np.ndarray) -> None:
        """Write the array's bytes (C order) at byte `begin`. The array may be changed as soon as this returns."""

    @abstractmethod
    def zero(self, memory: Memory, begin: int, end: int) -> None:
        """Zero the bytes [begin, end)."""

    @abstractmethod
    def copy(self, target: Memory, at: int, source: Memory, begin: int, nbytes: int) -> None:
        """Copy `nbytes` bytes of `source`, from byte `begin` on, to byte `at` of `target`. They must not overlap."""

    @abstractmethod
    def repeat(self, memory: Memory, tile: np.ndarray, at: int) -> None:
        """Fill the memory with repetitions of `tile`, u8[n], from its byte `at`. The tile must not change later."""

    @abstractmethod
    def fetch(self, memory: Memory, begin: int, end: int) -> np.ndarray:
        """Return the bytes [begin, end) in the device's order of execution, u8[end - begin].

        The contents are valid once the next `mark` has been waited for, and until `depth` more marks have been made.
        """

    @abstractmethod
    def read(self, memory: Memory) -> np.ndarray:
        """Return a copy of the memory after all pending operations; for tools and tests."""

    def mark(self) -> Event:
        """End a step. Returns an event that completes when everything submitted so far is done."""
        return None

    def wait(self, event: Event) -> None:
        """Block until the event has completed. Raises LlmcError E114 if the device failed before."""
        return

    def done(self, event: Event) -> bool:
        """Return whether the event has completed, without blocking; a failure counts as completion."""
        return True

    @abstractmethod
    def place(self, artifact: Artifact, names: Iterable[str]) -> Mapping[str, int]:
        """Make the named weights available on the device and return their addresses.

        If `artifact.unchecked` is set, their hashes are checked meanwhile; a wrong one raises LlmcError E107.
        """

    @property
    def upload_summary(self) -> str:
        """The method and throughput of the upload by `place`, as text; empty if no upload was needed."""
        return ""

    @abstractmethod
    def load(self, artifact: Artifact) -> None:
        """Load the artifact's kernels; raise LlmcError E112 if one cannot be loaded."""

    @abstractmethod
    def bind(self, program: Program, addresses: Sequence[int], symbols: np.ndarray) -> Run:
        """Return a function that runs the program once on these buffers, one address each.

        It reads the values of the program's symbols from `symbols`, i64 in their declared order, at each call.
        """

    def prepare(self, run: Run) -> None:
        """Do the one-time work of the first call of `run` with the current symbols, without running the program."""
        return

    def group_memory(self, nbytes: int) -> Memory:
        """Allocate the memory to which the other ranks of the group write; see `llmc_runtime.format.group_memory`.

        It can be used after `connect`. Raises LlmcError E113 if the device is not in a group, or needs no such memory.
        """
        raise LlmcError("E113", "a program uses the memory of a group of ranks", "recompile the artifact")

    @property
    def group_handle(self) -> bytes:
        """A handle with which the other ranks write to this rank's memory; empty if they do not."""
        return b""

    def connect(self, handles: Sequence[bytes]) -> None:
        """Open the memories of all ranks by their handles, in the order of the ranks, and make this rank's own ready.

        Raises LlmcError E115 if that fails.
        """
        return

    def cancel(self) -> None:
        """End the group of ranks that this device belongs to: no step waits for another rank any more, and each fails
        with LlmcError E119. May be called from any thread.
        """
        return

    @abstractmethod
    def free_memory(self) -> int:
        """Return the number of bytes that can be allocated now."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, also after a failure. The device must not be used afterwards."""

    def describe(self) -> Mapping[str, object]:
        """Return facts about the device for display."""
        return {"name": self.name}
