"""The interface of a rank's place in a group of GPUs: how its collectives reach the other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmc_runtime.device.device import Member
from llmc_runtime.format.errors import LlmcError

GRAIN_BYTES = 2 << 20  # bytes; drivers share memory in units of this size, so nothing else may be in the last one
USE_NCCL = "recompile with --collectives nccl"  # the remedy where GPUs cannot share memory


class LibraryCall(ABC):
    """A launch that a library makes instead of the driver."""

    @abstractmethod
    def __call__(self, cells: np.ndarray, stream: Any) -> tuple[int]:
        """Submit the launch to the stream: (0,).

        `cells`, u64, are the addresses of its buffers and then its sizes. Raises LlmcError if the library fails.
        """


class DeviceGroup(ABC):
    """The group of `member` as its GPU sees it. `handle` is what the other ranks need to connect to this one.

    Class attributes: `needs_access` means that the GPUs access each other's memory. `abi` is the calling convention of
    launches that the group's library makes, "" if there are none.
    """

    needs_access: bool
    abi: str
    handle: bytes = b""

    def __init__(self, member: Member) -> None:
        self.member = member

    @abstractmethod
    def start(self, enter: Callable[[], None]) -> None:
        """Allocate what `close` releases; `enter` makes the GPU current in the calling thread."""

    def share(self, address: int) -> None:
        """Make the memory at this address, a whole allocation, available to the other ranks."""
        raise LlmcError("E113", "a program uses the memory of a group of ranks", "recompile the artifact")

    def load_call(self, description: bytes, where: str) -> LibraryCall:
        """Return the call that a kernel file of the convention `abi` describes; LlmcError E103 if it is invalid."""
        raise NotImplementedError("the group has no library")

    @abstractmethod
    def connect(self, handles: Sequence[bytes]) -> np.ndarray | None:
        """Connect to the other ranks by the handles of all of them, in order.

        Returns the header of this rank's shared memory, if there is one. Raises LlmcErrors if that fails.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise LlmcError E119 if the group has ended."""

    @abstractmethod
    def cancel(self) -> None:
        """End the group: kernels that wait for other ranks give up. May be called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, ignoring errors; no kernel may be running."""
