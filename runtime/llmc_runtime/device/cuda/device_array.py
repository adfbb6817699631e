"""GPU memory exposed to other frameworks through `__dlpack__` and `__cuda_array_interface__`.

An array that a framework makes from it shares the memory, and must not be used after the device is closed. See the
Python array API standard (data interchange) and version 3 of the CUDA array interface.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from llmc_runtime.device import dlpack
from llmc_runtime.device.device import Memory

_LEGACY, _NO_SYNC = 1, -1  # special stream values of DLPack; 2 is the per-thread default stream
# Kind letters of NumPy type strings, by DLPack type code. NumPy has none for the other types.
_PREFIX: Mapping[int, str] = MappingProxyType({0: "i", 1: "u", 2: "f", 6: "b"})


class Owner(Protocol):
    """The device that owns the memory."""

    @property
    def number(self) -> int:
        """The device ordinal in CUDA."""

    @property
    def stream_handle(self) -> int:
        """The stream of all work on the memory; raises BufferError after the device is closed."""

    def follow(self, stream: int) -> None:
        """Make later work in `stream` wait for everything submitted to the device so far."""


@dataclass(frozen=True)
class CudaMemory(Memory):
    """GPU memory. Other frameworks see it as u8[nbytes], or as a typed array through `array`."""

    owner: Owner = field(repr=False)

    def part(self, begin: int, end: int) -> CudaMemory:
        """Return the bytes [begin, end) as memory of the same owner."""
        return CudaMemory(self.address + begin, end - begin, self.host, self.owner)

    def array(self, dtype: str, shape: tuple[int, ...]) -> CudaArray:
        """View the whole memory as a C-contiguous array.

        Raises ValueError if the sizes differ or if the type packs several elements into a byte.
        """
        return CudaArray(self, dtype, shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface for u8[nbytes]."""
        return self.array("u8", (self.nbytes,)).__cuda_array_interface__

    def __dlpack__(self, **options: Any) -> Any:
        """Return a DLPack capsule for u8[nbytes]."""
        return self.array("u8", (self.nbytes,)).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (DLDeviceType, device ordinal)."""
        return dlpack.CUDA, self.owner.number


@dataclass(frozen=True)
class CudaArray:
    """`memory` viewed as a C-contiguous array of `dtype` (such as "bf16") and `shape`."""

    memory: CudaMemory
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in dlpack.TYPES:
            raise ValueError(f"dtype {self.dtype} cannot be exported; supported are {', '.join(dlpack.TYPES)}")
        nbytes = math.prod(self.shape) * dlpack.TYPES[self.dtype][1]
        if nbytes != self.memory.nbytes or any(n < 0 for n in self.shape):
            raise ValueError(f"{self.dtype}{list(self.shape)} needs {nbytes} bytes, not {self.memory.nbytes}")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface. The consumer has to wait for `stream`.

        Raises AttributeError for types without a NumPy type string, such as bf16.
        """
        code, size = dlpack.TYPES[self.dtype]
        if code not in _PREFIX:
            raise AttributeError(f"the CUDA array interface does not support {self.dtype}; use DLPack")
        typestr = f"{'|' if size == 1 else '<'}{_PREFIX[code]}{size}"
        address = self.memory.address if self.memory.nbytes else 0
        stream = self.memory.owner.stream_handle
        return {"shape": self.shape, "typestr": typestr, "data": (address, False), "version": 3, "stream": stream}

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a capsule named "dltensor", or "dltensor_versioned" if `max_version` allows it.

        `stream` is the consumer's stream, which will wait until the memory is ready: None or 1 is the legacy default
        stream, 2 the per-thread default stream, -1 skips synchronization, and other values are handles. Raises
        BufferError if another device or a copy is requested.
        """
        if dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__():
            raise BufferError(f"the array is on device {self.__dlpack_device__()}, not on {dl_device}")
        if copy:
            raise BufferError("copy=True is not supported: import the array without a copy, and copy it")
        stream = _LEGACY if stream is None else stream
        if isinstance(stream, bool) or not isinstance(stream, int) or stream == 0 or stream < _NO_SYNC:
            raise ValueError(f"stream = {stream!r} is invalid: use None, -1, 1, 2 or a CUstream handle")
        owner = self.memory.owner
        if stream not in (_NO_SYNC, owner.stream_handle):
            owner.follow(stream)
        args = (self.memory.address, self.dtype, self.shape, self.__dlpack_device__(), self.memory)
        return dlpack.capsule(*args, max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (DLDeviceType, device ordinal)."""
        return dlpack.CUDA, self.memory.owner.number
