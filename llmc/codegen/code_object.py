"""Reads the properties of kernels from the metadata of AMD GPUs' code objects, and compares them with the launches.

The metadata is a note of the ELF file in MessagePack, as LLVM's "User Guide for AMDGPU Backend" describes it (version 3
and later).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import msgspec

from llmc.codegen.kernel import Source
from llmc.codegen.launch_check import check_parameters, check_threads, differs, sections

_METADATA = 32  # type of the note, NT_AMDGPU_METADATA


@dataclass(frozen=True)
class KernelProperties:
    """The properties of one kernel in a code object.

    sizes: bytes of each parameter. max_threads: maximum threads per block. wavefront: threads of a wavefront. vgprs,
    sgprs: vector registers of a thread (with the accumulation registers that it uses) and scalar registers of a
    wavefront. vgpr_spills, sgpr_spills: registers for which there was no room; scalar ones usually move to vector
    registers. private: bytes of private memory of a thread, to which the others are spilled. shared: bytes of
    shared memory that are part of the kernel, besides the shared memory that launches request.
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
    except (
        struct.error,
        msgspec.DecodeError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        StopIteration,
    ) as e:
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
    """Return the metadata of a code object: the MessagePack document in its note. Raises KeyError if there is none."""
    note = next(data for name, data in sections(binary) if name == ".note")
    at = 0
    while at < len(note):
        name_bytes, nbytes, kind = struct.unpack_from("<III", note, at)
        begin = at + 12 + -(-name_bytes // 4) * 4
        if kind == _METADATA:
            return msgspec.msgpack.decode(note[begin : begin + nbytes])
        at = begin + -(-nbytes // 4) * 4
    raise KeyError("amdhsa.kernels")
