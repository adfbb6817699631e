"""The source of the step unit, one function that runs all launches of a program; CPUs alone have one."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.codegen.backends.cpp.step_text import LaunchTable, StepTable, step_unit
from llmc.codegen.kernel import Source
from llmc.codegen.launch_plan import Placed
from llmc.ir.graph import Module


def step_source(placed: Sequence[Placed], m: Module) -> tuple[Source, tuple[str, ...]]:
    """The step unit of all programs, and each program's entry in it."""
    tables = [step_table(p, m) for p in placed]
    entries = tuple(t.entry for t in tables)
    return Source(entries[0] if entries else "", "cpp", step_unit(tables), options=(("O", 2),)), entries


def step_table(p: Placed, m: Module) -> StepTable:
    """The launch tables of a graph."""
    bounds = m.bounds(p.emitted.graph)
    sources = p.emitted.sources
    launches = [LaunchTable(args, s.sizes, sync) for args, s, sync in zip(p.args, sources, p.sync, strict=True)]
    scratch = max((s.scratch.bounds(bounds)[1] for s in sources), default=0)
    return StepTable(p.emitted.graph.name, tuple(m.symbols), tuple(launches), scratch)
