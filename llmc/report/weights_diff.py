"""Compares the weights of two artifacts by name, type and bytes. Blocks with equal hashes are not read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from llmc_runtime.format.manifest import WeightFile
from llmc_runtime.format.program import weights_of
from llmc_runtime.format.safetensors import header_length, parse_header

from llmc.passes.pass_report import pattern
from llmc.report.open_artifact import Opened

CHUNK = 16 << 20


@dataclass(frozen=True)
class Stored:
    """A tensor's place: bytes [begin, end) of a file."""

    kind: str
    file: WeightFile
    begin: int
    end: int
    data: memoryview


def compare_weights(a: Opened, b: Opened) -> list[dict[str, Any]]:
    """Return rows {"name", "how", "count"} for weights that only one side reads, or that differ in type or bytes.

    Numbers in names are replaced by stars. Bytes are compared if both artifacts have weight files.
    """
    ours, theirs = _types(a), _types(b)
    left, right = _stored(a), _stored(b)
    rows: Counter[tuple[str, str]] = Counter()
    modes = a.manifest.weights, b.manifest.weights
    if (modes[0].mode, modes[0].seed) != (modes[1].mode, modes[1].seed):
        rows["all", f"{modes[0].mode} and {modes[1].mode}"] += 1
    for name in dict.fromkeys([*ours, *theirs]):
        difference = _types_differ(ours.get(name), theirs.get(name))
        if not difference and name in left and name in right and not all(map(_equal, left[name], right[name])):
            difference = "different bytes"
        if difference:
            rows[pattern(name), difference] += 1
    return [{"name": name, "how": difference, "count": n} for (name, difference), n in rows.items()]


def _types_differ(a: str | None, b: str | None) -> str:
    if a is None or b is None:
        return f"only in {'A' if b is None else 'B'}, {a or b}"
    return "" if a == b else f"{a} -> {b}"


def _types(x: Opened) -> dict[str, str]:
    """Name -> type of every weight that a program reads."""
    return {name: f"{b.dtype}[{', '.join(map(str, b.shape))}]" for name, b in weights_of(x.programs).items()}


def _stored(x: Opened) -> dict[str, list[Stored]]:
    """Name -> the tensor of every rank, in their order; one if all ranks read it."""
    out: dict[str, list[Stored]] = {}
    for file in x.manifest.weights.files:
        data = x.folder.map(file.file)
        where = str(x.folder.root / file.file)
        n = header_length(bytes(data[:8]), len(data), where)
        for t in parse_header(bytes(data[8 : 8 + n]), len(data), where).values():
            stored = Stored(f"{t.dtype}{list(t.shape)}", file, t.begin, t.end, data)
            out.setdefault(t.name, []).append(stored)
    return out


def _equal(a: Stored, b: Stored) -> bool:
    """Whether two tensors have equal bytes, comparing block hashes first if the blocks line up."""
    if a.kind != b.kind or a.end - a.begin != b.end - b.begin:
        return False
    if a.begin == b.begin and a.file.block == b.file.block and _blocks(a) == _blocks(b):
        return True
    size = a.end - a.begin
    return all(
        a.data[a.begin + i : a.begin + min(i + CHUNK, size)] == b.data[b.begin + i : b.begin + min(i + CHUNK, size)]
        for i in range(0, size, CHUNK)
    )


def _blocks(s: Stored) -> tuple[str, ...]:
    """Return the hashes of the blocks that contain the tensor."""
    return s.file.blocks[s.begin // s.file.block : -(-s.end // s.file.block)]
