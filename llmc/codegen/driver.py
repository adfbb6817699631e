"""The whole of code generation: from a module whose passes have run to programs and binaries; it writes no file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc_runtime.format.program import Program

from llmc.codegen import memory, plan
from llmc.codegen.binary import Binary
from llmc.codegen.cpu import build as cpu
from llmc.codegen.kernel import Kernel, Source
from llmc.codegen.toolchain import CppToolchain, Progress
from llmc.codegen.triton import build as gpu
from llmc.codegen.triton.toolchain import TritonToolchain
from llmc.ir.graph import Module
from llmc.targets.target import Target


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
    toolchain: CppToolchain | TritonToolchain | None = None,
    jobs: int | None = None,
) -> Built:
    """Emit and compile every launched graph of a module that went through `select`, `pack` and `memory`.

    kernels: name -> Kernel (default: ours). cache: the folder of compiled units. progress(done, of, what) is called
    after each. Raises Diagnostic E501 (no compiler), E502 (a unit does not compile), E433 and E441 (passes missing).
    """
    known = our_kernels() if kernels is None else kernels
    toolchain = toolchain or find_toolchain(target)
    jobs = jobs or min(os.cpu_count() or 1, 16)
    placed = place_graphs(m, target, known)
    if isinstance(toolchain, TritonToolchain):
        made = gpu.build(placed, toolchain, cache, jobs, progress)
    else:
        made = cpu.build(placed, m, toolchain, cache, jobs, progress)
    programs = tuple(
        plan.program(p, m, [_called(made.binaries[k]) for k in keys], step)
        for p, keys, step in zip(placed, made.keys, made.steps, strict=True)
    )
    return Built(programs, made.binaries, memory.report(m))


def _called(b: Binary) -> plan.Called:
    return plan.Called(b.hash, b.threads, b.shared, b.boxes)


def place_graphs(m: Module, target: Target, known: Mapping[str, Kernel]) -> list[plan.Placed]:
    """Every launched graph with its sources and buffers, narrowest first."""
    done: dict[Any, Source] = {}
    graphs = [g for name, g in m.graphs.items() if name != memory.WEIGHTS]
    emitted = [plan.emit_graph(g, m.bounds(g), known, target, done) for g in graphs]
    return sorted((plan.place(e, m) for e in emitted), key=lambda p: _width(p, m))


def find_toolchain(target: Target) -> CppToolchain | TritonToolchain:
    """The compiler of a target's language; Diagnostic E501 says what to install where it is missing."""
    return TritonToolchain.find(target) if "triton" in target.languages else CppToolchain.find(target)


def _width(p: plan.Placed, m: Module) -> tuple[bool, int]:
    """Programs for one token a row come first, then those for fewer tokens."""
    serves = plan.serves_of(p.emitted.graph, m)
    return "uniform" not in serves, serves.get("T", [0, 0])[1]


def our_kernels() -> Mapping[str, Kernel]:
    """The kernels of this package, imported."""
    from importlib import import_module

    from llmc.codegen.cpu.table import KERNELS as CPU
    from llmc.codegen.triton.table import KERNELS as TRITON

    found = {}
    for name, where in {**CPU, **TRITON}.items():
        module, _, attribute = where.partition(":")
        found[name] = getattr(import_module(module), attribute)
    return found
