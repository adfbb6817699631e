"""Compiles kernel sources to shared objects, and one step unit that runs the launches of all programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmc.codegen.binary import Binary, Made, locations
from llmc.codegen.cpu.program import LaunchTable, StepTable, step_unit
from llmc.codegen.plan import Placed
from llmc.codegen.toolchain import CppToolchain, Progress, Unit
from llmc.ir.graph import Module


def build(
    placed: Sequence[Placed], m: Module, toolchain: CppToolchain, cache: Path, jobs: int, progress: Progress | None
) -> Made:
    """Compile all units; raises Diagnostic E502 if one does not compile."""
    tables = [step_table(p, m) for p in placed]
    step = Unit(step_unit(tables), "the step", extra=("-O2",))
    pairs = [(n, s) for p in placed for n, s in zip(p.emitted.nodes, p.emitted.sources)]
    units = {s.text: Unit(s.text, s.text.splitlines()[0][3:], n.loc) for n, s in pairs}
    binaries = toolchain.compile([step, *units.values()], cache, jobs, progress)
    keys = {text: toolchain.key(u) for text, u in units.items()}
    out = {
        k: Binary(k, s.text, binaries[k], s.entry, s.threads, s.shared, locs)
        for k, (s, locs) in locations(placed, lambda s: keys[s.text]).items()
    }
    key = toolchain.key(step)
    out[key] = Binary(key, step.text, binaries[key], tables[0].entry if tables else "")
    in_order = tuple(tuple(keys[s.text] for s in p.emitted.sources) for p in placed)
    return Made(out, in_order, tuple((key, t.entry) for t in tables))


def step_table(p: Placed, m: Module) -> StepTable:
    """Return the launch tables of a graph."""
    bounds = m.bounds(p.emitted.graph)
    sources = p.emitted.sources
    launches = [LaunchTable(args, s.sizes, sync) for args, s, sync in zip(p.args, sources, p.sync, strict=True)]
    scratch = max((s.scratch.bounds(bounds)[1] for s in sources), default=0)
    return StepTable(p.emitted.graph.name, tuple(m.symbols), tuple(launches), scratch)
