"""The whole of code generation: from a module whose passes have run to programs and binaries; it writes no file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc_runtime.format.program import Program

from llmc.codegen import memory, plan
from llmc.codegen.cpu.program import step_unit
from llmc.codegen.kernel import Kernel, Source
from llmc.codegen.toolchain import CppToolchain, Progress, Unit
from llmc.ir.graph import Module
from llmc.targets.target import Target


@dataclass(frozen=True)
class Binary:
    """One compiled unit: its key, text and shared object, the entry, and the places in the model that use it."""

    hash: str
    source: str
    binary: bytes
    entry: str
    threads: int = 0
    shared: int = 0
    locs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Built:
    """What code generation makes. `programs`: narrowest first (the executor takes the first that serves a step);
    `kernels` by hash, the step unit among them; `memory`: the plan as data (see `llmc.codegen.memory.report`)."""

    programs: tuple[Program, ...]
    kernels: Mapping[str, Binary]
    memory: Mapping[str, Any] = field(default_factory=dict)


def build(
    m: Module,
    target: Target,
    cache: Path,
    kernels: Mapping[str, Kernel] | None = None,
    progress: Progress | None = None,
    toolchain: CppToolchain | None = None,
    jobs: int | None = None,
) -> Built:
    """Emit and compile every launched graph of a module that went through `select`, `pack` and `memory`.

    kernels: name -> Kernel (default: ours). cache: the folder of compiled units. progress(done, of, what) is called
    after each. Raises Diagnostic E501 (no compiler), E502 (a unit does not compile), E433 and E441 (passes missing).
    """
    known = our_kernels() if kernels is None else kernels
    toolchain = toolchain or CppToolchain.find(target)
    done: dict[Any, Source] = {}
    emitted = [plan.emit_graph(g, known, target, done) for name, g in m.graphs.items() if name != memory.WEIGHTS]
    emitted.sort(key=lambda e: "uniform" not in plan.serves_of(e.graph, m))
    tables = [plan.step_table(e, m)[0] for e in emitted]
    step = Unit(step_unit(tables), "the step", extra=("-O2",))
    pairs = [(n, s) for e in emitted for n, s in zip(e.nodes, e.sources)]
    units = {s.text: Unit(s.text, s.text.splitlines()[0][3:], n.loc) for n, s in pairs}
    jobs = jobs or min(os.cpu_count() or 1, 16)
    binaries = toolchain.compile([step, *units.values()], cache, jobs, progress)
    keys = {text: toolchain.key(u) for text, u in units.items()}
    out = dict(_binaries(emitted, keys, binaries))
    key = toolchain.key(step)
    out[key] = Binary(key, step.text, binaries[key], tables[0].entry if tables else "")
    programs = tuple(
        plan.program(e, m, [keys[s.text] for s in e.sources], (key, t.entry), plan.serves_of(e.graph, m))
        for e, t in zip(emitted, tables)
    )
    return Built(programs, out, memory.report(m))


def _binaries(
    emitted: list[plan.Emitted], keys: Mapping[str, str], binaries: Mapping[str, bytes]
) -> list[tuple[str, Binary]]:
    """(key, Binary) of every kernel, with all its places in the model."""
    locs: dict[str, dict[str, None]] = {}
    sources: dict[str, Source] = {}
    for e in emitted:
        for n, s in zip(e.nodes, e.sources):
            k = keys[s.text]
            sources[k] = s
            locs.setdefault(k, {})[n.loc] = None
    return [
        (k, Binary(k, s.text, binaries[k], s.entry, s.threads, s.shared, tuple(x for x in locs[k] if x)))
        for k, s in sources.items()
    ]


def our_kernels() -> Mapping[str, Kernel]:
    """The CPU kernels of this package, imported."""
    from importlib import import_module

    from llmc.codegen.cpu.table import KERNELS

    found = {}
    for name, where in KERNELS.items():
        module, _, attribute = where.partition(":")
        found[name] = getattr(import_module(module), attribute)
    return found
