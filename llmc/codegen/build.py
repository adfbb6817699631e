"""Code generation as a whole: from a module whose passes have run to programs and binaries, or, for `--dry-run`, to
programs without compiling kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc_runtime.format.program import Program

from llmc.codegen import launch_plan, memory
from llmc.codegen.kernel import Box, Compiled, Kernel, Source
from llmc.codegen.launch_plan import Placed
from llmc.codegen.toolchain import Finders, Output, Progress, Toolset
from llmc.ir.graph import Module
from llmc.targets.target import Target

_NO_KEY = "0" * 32  # placeholder for the key of a binary that does not exist


@dataclass(frozen=True)
class Binary:
    """A compiled unit: key, source text, binary, entry point, and launch parameters.

    `abi` is the calling convention, `boxes` are the boxes of its tensor maps. `suffix` and `language` are the
    extensions of its two files. `license`: see Source.
    """

    hash: str
    source: str
    binary: bytes
    entry: str
    threads: int = 0
    shared: int = 0
    suffix: str = "so"
    language: str = "cpp"
    abi: str = "cpu-1"
    boxes: tuple[Box, ...] = ()
    license: str = ""


@dataclass(frozen=True)
class Built:
    """The result of code generation.

    programs: narrowest first, because the executor runs the first one that serves a step; kernels: by hash, the step
    unit included; memory: the memory plan as data (see `llmc.codegen.memory.report`); toolchains: compiler name ->
    version of each compiler that was used.
    """

    programs: tuple[Program, ...]
    kernels: Mapping[str, Binary]
    memory: Mapping[str, Any] = field(default_factory=dict)
    toolchains: Mapping[str, str] = field(default_factory=dict)


def build(
    m: Module,
    target: Target,
    cache: Path,
    kernels: Mapping[str, Kernel],
    toolchains: Finders,
    progress: Progress | None = None,
    jobs: int | None = None,
) -> Built:
    """Emit and compile every launched graph of a module that went through `select`, `pack` and `memory`.

    kernels: name -> Kernel; toolchains: language -> function that finds its toolchain (both are in the registry).
    cache: the folder of compiled kernels. progress(done, of, what) is called after each. Raises Diagnostic E501 (a
    compiler is missing), E502 (a kernel does not compile), E504 (no toolchain for a language), E433 and E441 (passes
    missing).
    """
    tools = Toolset(target, toolchains)
    placed = place_graphs(m, target, kernels)
    located = unique_sources(placed, tools.key)
    unit, entries = tools.step_unit(placed, m)
    sources = [(unit, "")] if unit else []
    sources += located.values()
    compiled = tools.compile(sources, cache, jobs or min(os.cpu_count() or 1, 16), progress)
    binaries = {
        key: _binary(key, source, compiled[key], tools.of(source.language).output)
        for key, (source, _) in located.items()
    }
    steps: list[tuple[str, str] | None] = [None] * len(placed)  # (hash of the step unit, its entry) of each graph
    if unit:
        unit_key = tools.key(unit)
        binaries[unit_key] = _binary(unit_key, unit, compiled[unit_key], tools.of(unit.language).output)
        steps = [(unit_key, entry) for entry in entries]
    programs = tuple(
        launch_plan.program(p, m, [(key, compiled[key]) for key in map(tools.key, p.emitted.sources)], step)
        for p, step in zip(placed, steps, strict=True)
    )
    return Built(programs, binaries, memory.report(m), tools.versions())


def _binary(key: str, s: Source, c: Compiled, output: Output) -> Binary:
    names = output.binary, output.source, output.abi
    return Binary(key, s.text, c.binary, s.entry, c.threads, c.shared, *names, c.boxes, s.license)


def unique_sources(placed: Sequence[Placed], key: Callable[[Source], str]) -> dict[str, tuple[Source, str]]:
    """Return the sources by key, each with the path of a module that uses it, or ""."""
    sources: dict[str, tuple[Source, str]] = {}
    for p in placed:
        for n, s in zip(p.emitted.nodes, p.emitted.sources):
            source, loc = sources.get(key(s), (s, ""))
            sources[key(s)] = source, loc or n.loc
    return sources


def place_graphs(m: Module, target: Target, kernels: Mapping[str, Kernel]) -> list[Placed]:
    """Emit every launched graph and lay out its buffers; narrowest graphs first."""
    done: dict[Any, Source] = {}
    emitted = [launch_plan.emit_graph(g, m.bounds(g), kernels, target, done) for g in m.launched]
    return sorted((launch_plan.place(e, m) for e in emitted), key=lambda p: _width(p, m))


def _width(p: Placed, m: Module) -> tuple[bool, int]:
    """Sort key: programs of one token per row first, then by the maximum number of tokens."""
    serves = launch_plan.serves_of(p.emitted.graph, m)
    return "uniform" not in serves, serves.get("T", [0, 0])[1]


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
    programs = tuple(launch_plan.program(p, m, [_without_binary(s) for s in p.emitted.sources], None) for p in placed)
    return DryBuild(programs, frozenset(keyed), missing)


def _without_binary(s: Source) -> tuple[str, Compiled]:
    """Return what is known of a launch without a compiled kernel."""
    return _NO_KEY, Compiled(b"", boxes=tuple((m.box, 0) for m in s.maps))
