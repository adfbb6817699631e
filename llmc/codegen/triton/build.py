"""The GPU back end: one binary a kernel text; launches are the runtime's, so there is no step unit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmc.codegen.binary import Binary, Made, locations
from llmc.codegen.plan import Placed
from llmc.codegen.toolchain import Progress
from llmc.codegen.triton.toolchain import BINARY, TritonToolchain


def build(
    placed: Sequence[Placed], toolchain: TritonToolchain, cache: Path, jobs: int, progress: Progress | None
) -> Made:
    """Compile everything. Raises Diagnostic E502 where a kernel does not compile."""
    found = locations(placed, toolchain.key)
    sources = [(s, locs[0] if locs else "") for s, locs in found.values()]
    compiled = toolchain.compile(sources, cache, jobs, progress)
    family = toolchain.target.family
    out = {
        k: Binary(
            k, s.text, compiled[k].binary, s.entry, compiled[k].threads, compiled[k].shared, locs, BINARY[family], "py",
            f"{family}-1", compiled[k].boxes,
        )
        for k, (s, locs) in found.items()
    }  # fmt: skip
    keys = tuple(tuple(toolchain.key(s) for s in p.emitted.sources) for p in placed)
    return Made(out, keys, (None,) * len(placed))
