"""Reads the properties of kernels from the metadata of AMD GPUs' code objects, and compares them with the launches.

The metadata is a note of the ELF file in MessagePack, as LLVM's "User Guide for AMDGPU Backend" describes it (version 3
and later). Here it is read without a package, which the compiler's installation may lack.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llmc.codegen.elf import sections
from llmc.codegen.kernel import Source
from llmc.codegen.launch_check import check_parameters, check_threads, differs

_METADATA = 32  # type of the note, NT_AMDGPU_METADATA
# First byte -> format of a number, or of the length of what follows.
_NUMBERS: Mapping[int, str] = MappingProxyType(
    {
        0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
        0xD3: ">q",
    }
)  # fmt: skip
_STRINGS: Mapping[int, str] = MappingProxyType({0xD9: ">B", 0xDA: ">H", 0xDB: ">I"})
_ARRAYS: Mapping[int, str] = MappingProxyType({0xDC: ">H", 0xDD: ">I"})
_MAPS: Mapping[int, str] = MappingProxyType({0xDE: ">H", 0xDF: ">I"})
_CONSTANTS: Mapping[int, Any] = MappingProxyType({0xC0: None, 0xC2: False, 0xC3: True})


@dataclass(frozen=True)
class KernelProperties:
    """The properties of one kernel in a code object.

    sizes: bytes of each parameter. max_threads: maximum threads per block. wavefront: threads of a wavefront. vgprs,
    sgprs: vector registers of a thread (with the accumulation registers that it uses) and scalar registers of a
    wavefront. vgpr_spills, sgpr_spills: registers for which there was no room; scalar ones usually move to vector
    registers. private: bytes of memory of its own for each thread, to which the others are spilled. shared: bytes of
    shared memory that are part of the kernel, besides those that launches ask for.
    """

    sizes: tuple[int, ...]
    max_threads: int
    wavefront: int
    vgprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    private: int
    shared: int


def read_kernel(binary: bytes, entry: str) -> KernelProperties:
    """Read the properties of a kernel; raises ValueError if the bytes are not a code object or lack the kernel."""
    try:
        kernels = _metadata(binary)["amdhsa.kernels"]
        kernel = next((k for k in kernels if k[".name"] == entry), None)
        if kernel is None:
            raise ValueError(f"it has no kernel {entry!r}")
        return KernelProperties(
            sizes=tuple(a[".size"] for a in kernel.get(".args", ()) if not a[".value_kind"].startswith("hidden_")),
            max_threads=kernel[".max_flat_workgroup_size"],
            wavefront=kernel[".wavefront_size"],
            vgprs=kernel[".vgpr_count"],
            sgprs=kernel[".sgpr_count"],
            vgpr_spills=kernel[".vgpr_spill_count"],
            sgpr_spills=kernel[".sgpr_spill_count"],
            private=kernel[".private_segment_fixed_size"],
            shared=kernel[".group_segment_fixed_size"],
        )
    except (struct.error, LookupError, TypeError, AttributeError, OverflowError, RecursionError, StopIteration) as e:
        raise ValueError("its ELF tables or its metadata cannot be read") from e


def check_launch(source: Source, binary: bytes, threads: int, wavefront: int, loc: str = "", scratch: int = 0) -> None:
    """Compare the launches of a source, with blocks of `threads`, with its binary.

    scratch: number of additional trailing pointers that the binary may take, which launches pass as null. Raises
    Diagnostic E505 if the parameters differ in number or size, if a block has more threads than the binary allows, or
    if the binary is for another size of wavefronts.
    """
    try:
        compiled = read_kernel(binary, source.entry)
    except ValueError as e:
        raise differs(source, str(e), loc) from None
    check_parameters(source, compiled.sizes, loc, scratch)
    check_threads(source, threads, compiled.max_threads, loc)
    if compiled.wavefront != wavefront:
        text = f"the target has wavefronts of {wavefront} threads, the binary of {compiled.wavefront}"
        raise differs(source, text, loc)


def _metadata(binary: bytes) -> dict[str, Any]:
    note = next(data for name, data in sections(binary) if name == ".note")
    at = 0
    while at < len(note):
        name_bytes, nbytes, kind = struct.unpack_from("<III", note, at)
        begin = at + 12 + -(-name_bytes // 4) * 4
        if kind == _METADATA:
            return _Reader(note[begin : begin + nbytes]).value()
        at = begin + -(-nbytes // 4) * 4
    raise KeyError("amdhsa.kernels")


class _Reader:
    """Reads one value of MessagePack after the other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def value(self) -> Any:
        """Return the next value. Raises KeyError for types that metadata does not have."""
        first = self._number(">B")
        if first < 0x80 or first >= 0xE0:
            return first if first < 0x80 else first - 0x100
        if first < 0x90:
            return self._map(first & 0x0F)
        if first < 0xA0:
            return self._array(first & 0x0F)
        if first < 0xC0:
            return self._text(first & 0x1F)
        if first in _NUMBERS:
            return self._number(_NUMBERS[first])
        rest: Callable[[int], Any]
        for formats, rest in ((_STRINGS, self._text), (_ARRAYS, self._array), (_MAPS, self._map)):
            if first in formats:
                return rest(self._number(formats[first]))
        return _CONSTANTS[first]

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return number

    def _text(self, nbytes: int) -> str:
        self._at += nbytes
        return self._data[self._at - nbytes : self._at].decode()

    def _array(self, count: int) -> list[Any]:
        return [self.value() for _ in range(count)]

    def _map(self, count: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(count)}
