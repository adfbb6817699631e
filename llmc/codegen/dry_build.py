"""Builds programs without compiling kernels, for `--dry-run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmc_runtime.format.program import Program

from llmc.codegen import launch_plan
from llmc.codegen.build import place_graphs
from llmc.codegen.kernel import Kernel, Source
from llmc.codegen.toolchain import Finders, Toolset
from llmc.ir.graph import Module
from llmc.targets.target import Target

_NO_KEY = "0" * 32  # placeholder for the key of a binary that does not exist


@dataclass(frozen=True)
class DryBuild:
    """The result of a dry build.

    programs: as `build` returns them, except for keys, threads and shared memory of kernels. keys: of all binaries.
    missing: keys that are not in the cache.
    """

    programs: tuple[Program, ...]
    keys: frozenset[str]
    missing: frozenset[str]


def dry_build(
    m: Module, target: Target, cache: Path | None, kernels: Mapping[str, Kernel], toolchains: Finders
) -> DryBuild:
    """Emit every launched graph of a module that went through `select`, `pack` and `memory`, without compiling kernels.

    Raises Diagnostic E501, E504 and E433 as `build` does.
    """
    tools = Toolset(target, toolchains)
    placed = place_graphs(m, target, kernels)
    sources = [s for p in placed for s in p.emitted.sources]
    unit, _ = tools.step_unit(placed, m)
    keyed = {tools.key(s): s for s in [*sources, *([unit] if unit else [])]}
    missing = frozenset(k for k, s in keyed.items() if cache is None or not tools.cached(s, cache))
    programs = tuple(launch_plan.program(p, m, [_launch_info(s) for s in p.emitted.sources], None) for p in placed)
    return DryBuild(programs, frozenset(keyed), missing)


def _launch_info(s: Source) -> launch_plan.LaunchInfo:
    """Return the launch parameters that are known without a compiled kernel."""
    return launch_plan.LaunchInfo(_NO_KEY, boxes=tuple((m.box, 0) for m in s.maps))
