"""Compares the parameters that launches of a kernel pass with the parameters of its binary, an ELF file on GPUs."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from types import MappingProxyType

from llmc.codegen.kernel import Source
from llmc.diagnostics import Diagnostic

_POINTER, _SIZE, _MAP, _STEP = 8, 4, 128, 8  # bytes of a pointer, a size, a tensor map, a stride of its tensor
_SCALARS = MappingProxyType({"i32": 4, "i64": 8, "f32": 4, "fp32": 4})


def passed(source: Source) -> tuple[int, ...]:
    """Return the bytes of each parameter that a launch passes, from `Source.passes` or else from `Source.params`.

    In `Source.params` a tensor map stands for its 128 bytes, the sizes of its tensor (i32) and its strides (i64).
    """
    if source.passes:
        return tuple(p.nbytes for p in source.passes)
    ranks = {m.param: len(m.shape) for m in source.maps}
    out: list[int] = []
    for i, param in enumerate(source.params):
        if i in ranks:
            out += [_MAP, *[_SIZE] * ranks[i], *[_STEP] * ranks[i]]
        else:
            out.append(_POINTER if param.startswith("*") else _SCALARS[param])
    return tuple(out)


def check_parameters(source: Source, sizes: Sequence[int], loc: str, scratch: int) -> None:
    """Compare the parameters of launches with those of the binary, both in bytes.

    scratch: number of additional trailing pointers that the binary may take, which launches pass as null. Raises
    Diagnostic E505 if they differ in number or size.
    """
    expected = passed(source)
    if tuple(sizes) not in (expected, expected + (_POINTER,) * scratch):
        text = f"launches pass parameters of {list(expected)} bytes, the binary takes {list(sizes)}"
        raise differs(source, text, loc)


def check_threads(source: Source, threads: int, max_threads: int, loc: str) -> None:
    """Raise Diagnostic E505 if a block of the launches has more threads than the binary allows."""
    if threads > max_threads:
        raise differs(source, f"launches have blocks of {threads} threads, the binary allows {max_threads}", loc)


def differs(source: Source, why: str, loc: str) -> Diagnostic:
    """Return the error for launches that do not match the binary."""
    cause = f"kernel {source.entry} does not match its launches: {why}"
    return Diagnostic("E505", cause, "correct the kernel's parameters, maps, sizes, threads or cluster", loc=loc)


def sections(binary: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield (name, contents) of the sections of a 64-bit little-endian ELF file."""
    if binary[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it is not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", binary, 40)
    nbytes, count, names_at = struct.unpack_from("<HHH", binary, 58)
    heads = [struct.unpack_from("<IIQQQQ", binary, table + i * nbytes) for i in range(count)]
    names = heads[names_at][4]
    for name, _, _, _, offset, size in heads:
        begin = names + name
        yield binary[begin : binary.index(b"\0", begin)].decode(), binary[offset : offset + size]
