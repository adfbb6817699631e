"""Reads the parameter table of a CUDA binary from its ELF file, and compares it with the launches of the kernel."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from llmc_runtime.format.program import MAX_CLUSTER

from llmc.codegen.kernel import Source
from llmc.codegen.launch_check import check_parameters, check_threads, differs, sections
from llmc.ir.dim import D

_SIZED = 4  # attribute format: a value of `size` bytes follows
_KPARAM_INFO, _MAX_THREADS, _THREADS, _CLUSTER = 0x17, 0x05, 0x10, 0x3D


@dataclass(frozen=True)
class Entry:
    """The properties of one kernel in a cubin.

    params: (offset, bytes) of each parameter, in order. max_threads: maximum threads per block (0: not stated).
    threads: the only permitted number of threads per block (0: not stated).
    cluster: blocks of a cluster along x, y and z (empty: not stated).
    """

    params: tuple[tuple[int, int], ...]
    max_threads: int = 0
    cluster: tuple[int, ...] = ()
    threads: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each parameter."""
        return tuple(size for _, size in self.params)


def read_entry(binary: bytes, entry: str) -> Entry:
    """Read the properties of a kernel; raises ValueError if the bytes are not a cubin or lack the kernel."""
    try:
        info = next(data for name, data in sections(binary) if name == f".nv.info.{entry}")
        params: dict[int, tuple[int, int]] = {}
        max_threads, threads, cluster = 0, 0, ()
        for attribute, value in _attributes(info):
            if attribute == _KPARAM_INFO:
                _, ordinal, offset, flags = struct.unpack("<IHHI", value)
                params[ordinal] = (offset, flags >> 18)
            elif attribute == _MAX_THREADS:
                max_threads = math.prod(struct.unpack("<III", value))
            elif attribute == _THREADS:
                threads = math.prod(struct.unpack("<III", value))
            elif attribute == _CLUSTER:
                cluster = struct.unpack("<III", value)
        return Entry(tuple(params[i] for i in range(len(params))), max_threads, cluster, threads)
    except StopIteration:
        raise ValueError(f"it has no kernel {entry!r}") from None
    except (struct.error, LookupError, OverflowError) as e:
        raise ValueError("its ELF tables cannot be read") from e


def check_launch(source: Source, binary: bytes, loc: str = "", scratch: int = 0) -> None:
    """Compare the parameters that launches of a source pass with those of its binary.

    scratch: number of additional trailing pointers that the binary may take, which launches pass as null. Raises
    Diagnostic E505 if one of these does not fit the binary: number and sizes of the parameters, threads of a block,
    blocks of a cluster. The cluster must also be valid and divide the grid.
    """
    try:
        compiled = read_entry(binary, source.entry)
    except ValueError as e:
        raise differs(source, str(e), loc) from None
    check_parameters(source, compiled.sizes, loc, scratch)
    if compiled.max_threads:
        check_threads(source, source.threads, compiled.max_threads, loc)
    if source.threads and compiled.threads not in (0, source.threads):
        why = f"launches have blocks of {source.threads} threads, the binary needs {compiled.threads}"
        raise differs(source, why, loc)
    if why := _cluster_error(source, compiled.cluster):
        raise differs(source, why, loc)


def _cluster_error(source: Source, compiled: tuple[int, ...]) -> str:
    """Return why launches cannot use the cluster of the source, or ""; `compiled` is the cluster of the binary."""
    cluster = source.cluster
    if compiled and cluster != compiled:
        return f"launches have the cluster {list(cluster)}, the binary was compiled for {list(compiled)}"
    if not cluster:
        return ""
    if len(cluster) != 3 or min(cluster) < 1 or math.prod(cluster) > MAX_CLUSTER:
        return f"the cluster {list(cluster)} must have three sizes with a product of 1 to {MAX_CLUSTER}"
    if not all(d.divisible(c) for d, c in zip(source.grid or (D(1),) * 3, cluster, strict=True)):
        return f"the grid ({', '.join(map(str, source.grid))}) is not a multiple of the cluster {list(cluster)}"
    return ""


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (attribute, value) of a `.nv.info` section; a value of two bytes is stored in the attribute's header."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        length = size if form == _SIZED else 0
        yield attribute, info[at : at + length] if length else info[at - 2 : at]
        at += length
