"""The safetensors format: parsing and validation of the header, and the layout of new files.

A file consists of an 8-byte little-endian header length, a JSON header of that length, and the tensors' bytes without
gaps. We align tensors by inserting padding tensors named `__pad__.N`, which every reader accepts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.dtypes import SAFETENSORS_BITS, SAFETENSORS_NAMES
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.json_fields import load_json

MAX_HEADER = 16 << 20  # other readers accept 100 MB
MAX_RANK = 16
MAX_BYTES = 1 << 50
PAD = "__pad__."
_MIN_ALIGN, _PAGE, _BIG = 64, 4096, 1 << 16

NAMES = SAFETENSORS_NAMES  # our dtypes -> theirs
_OURS: Mapping[str, str] = MappingProxyType({v: k for k, v in NAMES.items()})


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file: bytes [begin, end), shape in elements, and dtype by our name (or theirs if we have none)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.end - self.begin


def broken(where: str, reason: str) -> LlmcError:
    """Return the error for a file that violates the format."""
    return LlmcError("E105", f"{where}: {reason}", "copy or download the file again")


def header_length(prefix: bytes, size: int, where: str) -> int:
    """Return the header's length in bytes, from the first 8 bytes of a file of `size` bytes; raise LlmcError E105."""
    if len(prefix) < 8 or size < 8:
        raise broken(where, f"is not a safetensors file ({size} bytes)")
    n = int.from_bytes(prefix[:8], "little")
    if n > MAX_HEADER:
        raise broken(where, f"states a header of {n} bytes; at most {MAX_HEADER} are allowed")
    if n + 8 > size:
        raise broken(where, f"is truncated: its header ends at byte {n + 8}, the file at {size}")
    return n


def parse_header(header: bytes, size: int, where: str) -> dict[str, TensorInfo]:
    """Return the tensors of a file of `size` bytes from its JSON header, in file order and without padding tensors.

    Raises LlmcError E105 if the header is malformed, or if tensors overlap, leave a gap or end past the file.
    """
    doc = load_json(header, where)
    if not isinstance(doc, dict):
        raise broken(where, "its header is not an object of tensors")
    base = 8 + len(header)
    tensors = [_tensor(k, v, base, where) for k, v in doc.items() if k != "__metadata__"]
    tensors.sort(key=lambda t: (t.begin, t.end))
    at = base
    for t in tensors:
        if t.begin != at:
            raise broken(where, f"tensor {t.name[:80]!r} does not start at the end of the one before it")
        at = t.end
    if at != size:
        problem = "is truncated" if at > size else "has extra bytes"
        raise broken(where, f"{problem}: its tensors end at byte {at}, the file at {size}")
    return {t.name: t for t in tensors if not t.name.startswith(PAD)}


def _tensor(name: str, value: Any, base: int, where: str) -> TensorInfo:
    """Return one entry of a header whose data begins at byte `base`; raises LlmcError E105 if it is malformed."""

    def bad(reason: str) -> LlmcError:
        return broken(where, f"tensor {name[:80]!r} {reason}")

    if len(name) > 4096 or not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise bad("is malformed")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_BITS:
        raise bad(f"has the unknown dtype {str(dtype)[:20]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_natural(d) for d in shape):
        raise bad("has a malformed shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_natural(d) for d in offsets):
        raise bad("has malformed offsets")
    nbytes = math.prod((SAFETENSORS_BITS[dtype] // 8, *shape))
    if nbytes > MAX_BYTES or offsets[1] - offsets[0] != nbytes:
        raise bad(f"has {offsets[1] - offsets[0]} bytes; its shape needs {nbytes}")
    return TensorInfo(name, _OURS.get(dtype, dtype), tuple(shape), base + offsets[0], base + offsets[1])


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BYTES


def plan(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[bytes, list[TensorInfo], int]:
    """Lay out a file of tensors, each (name, dtype, shape, bytes).

    Returns the prefix (length and header), the tensors' positions and the file's size. Tensors are aligned to 64 bytes,
    those of 64 KiB and more to 4096. The positions include padding tensors.
    """
    placed: list[TensorInfo] = []  # positions relative to the end of the header
    end = 0
    for name, dtype, shape, nbytes in tensors:
        padding = -end % (_PAGE if nbytes >= _BIG else _MIN_ALIGN)
        begin = end + padding
        if padding:
            placed.append(TensorInfo(f"{PAD}{len(placed)}", "u8", (padding,), end, begin))
        end = begin + nbytes
        placed.append(TensorInfo(name, dtype, shape if dtype in NAMES else (nbytes,), begin, end))
    entries = {
        t.name: {"dtype": NAMES.get(t.dtype, "U8"), "shape": list(t.shape), "data_offsets": [t.begin, t.end]}
        for t in placed
    }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _PAGE)
    base = 8 + len(header)
    positions = [replace(t, begin=base + t.begin, end=base + t.end) for t in placed]
    return len(header).to_bytes(8, "little") + header, positions, base + end
