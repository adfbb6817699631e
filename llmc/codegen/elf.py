"""Reads the sections of ELF files, which binaries of GPUs are."""

from __future__ import annotations

import struct
from collections.abc import Iterator


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
