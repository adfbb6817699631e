"""Collectives without a model: compiles a graph for several ranks, and runs it in a process per GPU."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from llmc_runtime.device.cuda.cuda_device import CudaDevice
from llmc_runtime.device.device import Member, Memory, Run
from llmc_runtime.format.manifest import KernelFile, TargetInfo
from llmc_runtime.format.program import GROUP, Program

TARGET = "cuda:sm_90"


@dataclass(frozen=True)
class Work:
    """A compiled graph: its program as text, and its kernels' binaries."""

    text: bytes
    kernels: tuple[tuple[KernelFile, bytes], ...]

    @property
    def program(self) -> Program:
        """The program, which runs as a device graph for each set of sizes."""
        return Program.load(self.text, "program")


def compile_graph(text: str, cache: Path, prefer: Mapping[str, Any] | None = None) -> Work:
    """Compile a module of one graph that has inputs and outputs only. `prefer`: a schedule of all its collectives."""
    from llmc.codegen.build import build
    from llmc.extension import load
    from llmc.ir.ops.comm import COLLECTIVES
    from llmc.ir.text import parse
    from llmc.passes.base import Ctx
    from llmc.passes.pipeline import parse_pipeline, run_pipeline

    registry = load()
    target = registry.target(TARGET)
    module = parse(text, registry.opset())
    context = Ctx(registry.opset(), target, registry.kernels)
    for at in ("select", "memory"):
        run_pipeline(module, parse_pipeline(at, registry.passes), context)
        for node in (n for g in module.graphs.values() for n in g.nodes if prefer and n.op.name in COLLECTIVES):
            node.choice |= prefer or {}
    built = build(module, target, cache, registry.kernels, registry.toolchains, jobs=1)
    files = (
        (KernelFile(b.hash, b.hash, "", b.entry, b.threads, b.shared, b.abi), b.binary) for b in built.kernels.values()
    )
    return Work(replace(built.programs[0], uniform=True).dump(), tuple(files))


class Rank:
    """One rank of a group with its GPU. `exchange` gives the handles of all ranks for this rank's own."""

    def __init__(
        self, work: Work, rank: int, ranks: int, exchange: Callable[[Any], list[Any]], limit: float = 30.0
    ) -> None:
        self.rank, self.ranks, self.exchange = rank, ranks, exchange
        self.device = CudaDevice(
            TargetInfo(TARGET, TARGET.partition(":")[2], ()), member=Member(rank, ranks, -1, limit)
        )
        binaries = {k.file: b for k, b in work.kernels}
        files = {name: SimpleNamespace(bytes=len(b)) for name, b in binaries.items()}
        manifest = SimpleNamespace(kernels=[k for k, _ in work.kernels], files=files)
        folder = SimpleNamespace(read=lambda name, nbytes: binaries[name])
        self.device.load(SimpleNamespace(manifest=manifest, folder=folder))  # type: ignore[arg-type]
        self._memory: Memory | None = None

    def bind(self, program: Program) -> tuple[Run, np.ndarray, dict[str, Memory]]:
        """Return a run of the program, the values of its symbols, and its inputs and outputs by name. All ranks bind
        the same programs in the same order."""
        top = program.top()
        arena = self.device.alloc(max(1, program.arena_bytes))
        memories = {b.name: self.device.alloc(b.bytes(top)) for b in program.buffers if b.kind in ("input", "output")}
        addresses = []
        for b in program.buffers:
            if b.kind == GROUP and self._memory is None:
                self._memory = self.device.group_memory(b.bytes(top))
                self.device.connect(self.exchange(self.device.group_handle))
                self.exchange(None)  # no rank sends before all memories are ready
            if b.kind == GROUP:
                addresses.append(self._memory.address if self._memory is not None else 0)
            elif b.kind == "arena":
                addresses.append(arena.address + b.offset)
            else:
                addresses.append(memories[b.name].address)
        symbols = np.array([1] * len(program.symbols), np.int64)
        return self.device.bind(program, addresses, symbols), symbols, memories

    def synchronize(self) -> None:
        """Wait for everything submitted."""
        self.device.wait(self.device.mark())


def run_group(
    ranks: int, main: Callable[..., Any], *args: Any, seconds: float = 120, exiting: Sequence[int] = ()
) -> list[Any]:
    """Run `main(rank, ranks, exchange, *args)` in a process per rank and return their results.

    `main` is a function of a module, since processes are spawned. `exchange(x)` returns the x of all ranks, in order.
    Raises RuntimeError with the first error, and TimeoutError after `seconds`; no process is left.
    """
    context = multiprocessing.get_context("spawn")
    links = [context.Pipe() for _ in range(ranks)]
    processes = [context.Process(target=_child, args=(main, r, ranks, links[r][1], args)) for r in range(ranks)]
    results: dict[int, Any] = {}
    for p in processes:
        p.start()
    try:
        while len(results) < ranks:
            messages: dict[int, Any] = {}
            while waiting := {links[r][0]: r for r in range(ranks) if r not in results and r not in messages}:
                ready = multiprocessing.connection.wait(list(waiting), seconds)
                if not ready:
                    raise TimeoutError(f"ranks {sorted(waiting.values())} said nothing for {seconds} s")
                for link in ready:
                    r = waiting[link]  # type: ignore[index]
                    kind, value = link.recv()  # type: ignore[union-attr]
                    if kind == "error":
                        raise RuntimeError(f"rank {r}: {value}")
                    (results if kind == "result" else messages)[r] = value
            for r in messages:
                links[r][0].send([messages.get(x) for x in range(ranks)])
        return [results[r] for r in range(ranks)]
    finally:
        for p in processes:
            p.join(2)
            p.kill()
            p.join()


def _child(main: Callable[..., Any], rank: int, ranks: int, link: Any, args: tuple[Any, ...]) -> None:
    def exchange(x: Any) -> list[Any]:
        link.send(("exchange", x))
        return list(link.recv())

    try:
        link.send(("result", main(rank, ranks, exchange, *args)))
    except BaseException:
        link.send(("error", traceback.format_exc()[-3000:]))
