"""Memory of a GPU as other frameworks see it: `__dlpack__`, `__cuda_array_interface__`; it allocates and frees nothing.

What they make of it shares the memory, and may not be used once the device has been closed.
Sources: the Python array API standard (data interchange), version 3 of the CUDA array interface.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from llmc_runtime.device import dlpack
from llmc_runtime.device.device import Memory

_LEGACY, _NO_SYNC = 1, -1  # streams of DLPack; 2 is the thread's own default stream
# Type strings of numpy; it has none for the other types.
_PREFIX: Mapping[int, str] = MappingProxyType({0: "i", 1: "u", 2: "f", 6: "b"})


class Owner(Protocol):
    """The device whose memory it is."""

    @property
    def number(self) -> int:
        """Of the GPU, as CUDA counts."""

    @property
    def stream_handle(self) -> int:
        """The stream that everything happens in; BufferError once the device is closed."""

    def follow(self, stream: int) -> None:
        """What is put into `stream` from now on happens behind everything that the device was asked for so far."""


@dataclass(frozen=True)
class CudaMemory(Memory):
    """Memory of the GPU; other frameworks see it as u8[nbytes], and through `array` as what it holds."""

    owner: Owner = field(repr=False)

    def part(self, begin: int, end: int) -> CudaMemory:
        return CudaMemory(self.address + begin, end - begin, self.host, self.owner)

    def array(self, dtype: str, shape: tuple[int, ...]) -> CudaArray:
        """All of it as an array in C order; ValueError where the sizes differ, or elements share bytes."""
        return CudaArray(self, dtype, shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.array("u8", (self.nbytes,)).__cuda_array_interface__

    def __dlpack__(self, **options: Any) -> Any:
        return self.array("u8", (self.nbytes,)).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.owner.number


@dataclass(frozen=True)
class CudaArray:
    """`memory` as an array of `dtype` (such as "bf16") and `shape`, in C order."""

    memory: CudaMemory
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in dlpack.TYPES:
            raise ValueError(f"{self.dtype} is no type of whole bytes: one of {', '.join(dlpack.TYPES)} is")
        want = math.prod(self.shape) * dlpack.TYPES[self.dtype][1]
        if want != self.memory.nbytes or any(n < 0 for n in self.shape):
            raise ValueError(f"{self.dtype}{list(self.shape)} takes {want} bytes, not {self.memory.nbytes}")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The consumer has to wait for `stream`. AttributeError for types that numpy has no name for, such as bf16."""
        code, size = dlpack.TYPES[self.dtype]
        if code not in _PREFIX:
            raise AttributeError(f"the CUDA array interface has no {self.dtype}; DLPack has")
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
        """A capsule "dltensor" or, where `max_version` allows, "dltensor_versioned".

        `stream` is the consumer's, behind which the memory is ready: None or 1 the legacy default stream, 2 the
        thread's default stream, -1 no waiting, else a handle. BufferError for another device, or for a copy.
        """
        if dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__():
            raise BufferError(f"the array is on device {self.__dlpack_device__()}, not on {dl_device}")
        if copy:
            raise BufferError("a copy is not made here: take the array without one, and copy it")
        stream = _LEGACY if stream is None else stream
        if isinstance(stream, bool) or not isinstance(stream, int) or stream == 0 or stream < _NO_SYNC:
            raise ValueError(f"stream = {stream!r} says no stream of CUDA: None, -1, 1, 2 or a handle do")
        owner = self.memory.owner
        if stream not in (_NO_SYNC, owner.stream_handle):
            owner.follow(stream)
        given = (self.memory.address, self.dtype, self.shape, self.__dlpack_device__(), self.memory)
        return dlpack.capsule(*given, max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.memory.owner.number
