"""Builds programs without compiling kernels, for `--dry-run`."""

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

_NOWHERE = "0" * 32  # placeholder for the key of a binary that does not exist


@dataclass(frozen=True)
class Sketch:
    """The result of a dry build.

    programs: as `build` returns them, except for keys, threads and shared memory of kernels. keys: of all binaries.
    missing: those that are not in the cache.
    """

    programs: tuple[Program, ...]
    keys: frozenset[str]
    missing: frozenset[str]


def sketch(m: Module, target: Target, cache: Path | None, kernels: Mapping[str, Kernel]) -> Sketch:
    """Emit the graphs of a module after `select`, `pack` and `memory`; Diagnostic E501, E433 as for `build`."""
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
    """The launch parameters that are known without a compiled kernel."""
    return plan.Called(_NOWHERE, boxes=tuple((m.box, 0) for m in s.maps))
