"""What a device is to the executor: a few verbs over memory and programs; nothing here knows a machine.

Host and device share data through `Memory`: the host writes and reads its `host` bytes, `push` and `pull` make
the two sides agree. Where both are one memory (the CPU) these do nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmc_runtime.artifact import Artifact, Tensor
from llmc_runtime.format.program import Program

Run = Callable[[], None]


@dataclass(frozen=True)
class Memory:
    """Device memory: its address there, its size, and its bytes as the host sees them, u8[nbytes]."""

    address: int
    nbytes: int
    host: np.ndarray


class Device(ABC):
    """One device, opened for one artifact at a time."""

    name: str

    @abstractmethod
    def alloc(self, nbytes: int) -> Memory:
        """Zeroed memory, aligned to 4096 bytes and committed when first touched; LlmcError E203 where there is none."""

    @abstractmethod
    def push(self, memory: Memory, begin: int, end: int) -> None:
        """Make the host's bytes [begin, end) the device's."""

    @abstractmethod
    def pull(self, memory: Memory, begin: int, end: int) -> None:
        """Make the device's bytes [begin, end) the host's, after everything that runs."""

    @abstractmethod
    def place(self, tensor: Tensor) -> int:
        """The address of a weight on the device."""

    @abstractmethod
    def load(self, artifact: Artifact) -> None:
        """Load the artifact's kernels; LlmcError E112 where one cannot be."""

    @abstractmethod
    def bind(self, program: Program, addresses: Sequence[int], symbols: np.ndarray) -> Run:
        """One call runs the program once, with these buffers and the values `symbols` (i64, in order) then has."""

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that could be allocated now."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Nothing of this device may be used afterwards."""

    def describe(self) -> Mapping[str, object]:
        """Facts about the device for people."""
        return {"name": self.name}
