"""Programs without binaries: what a plan tells of them, and how many kernels are yet to be compiled; none is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmc_runtime.format.program import Program

from llmc.codegen import plan
from llmc.codegen.cpu.build import step_table
from llmc.codegen.cpu.program import step_unit
from llmc.codegen.driver import find_toolchain, place_graphs
from llmc.codegen.kernel import Kernel, Source
from llmc.codegen.toolchain import CppToolchain, Unit
from llmc.ir.graph import Module
from llmc.targets.target import Target

_NOWHERE = "0" * 32  # the key of a binary that is not made


@dataclass(frozen=True)
class Sketch:
    """`programs` as `build` would make them, but for keys, threads and shared memory of kernels; `keys` of all
    binaries, and those of them that the cache lacks."""

    programs: tuple[Program, ...]
    keys: frozenset[str]
    missing: frozenset[str]


def sketch(m: Module, target: Target, cache: Path | None, kernels: Mapping[str, Kernel]) -> Sketch:
    """Emit every launched graph of a module that went through `select`, `pack` and `memory`; as `build`, E501, E433."""
    toolchain = find_toolchain(target)
    placed = place_graphs(m, target, kernels)
    sources = [s for p in placed for s in p.emitted.sources]
    if isinstance(toolchain, CppToolchain):
        step = Unit(step_unit([step_table(p, m) for p in placed]), extra=("-O2",))
        keys = frozenset({toolchain.key(step), *(toolchain.key(Unit(s.text)) for s in sources)})
        suffix = "so"
    else:
        keys, suffix = frozenset(toolchain.key(s) for s in sources), "gpu"
    missing = {k for k in keys if cache is None or not (cache / f"{k}.{suffix}").is_file()}
    programs = tuple(plan.program(p, m, [_nowhere(s) for s in p.emitted.sources], None) for p in placed)
    return Sketch(programs, keys, frozenset(missing))


def _nowhere(s: Source) -> plan.Called:
    """What is known of a launch whose kernel is not compiled."""
    return plan.Called(_NOWHERE, boxes=tuple((m.box, 0) for m in s.maps))
