"""Builds a Program (buffers, launches, size texts) from a graph with kernel choices and arena offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmc_runtime.format.group_memory import group_bytes
from llmc_runtime.format.program import GROUP, RANK, Program

from llmc.codegen.kernel import (
    READ_BEFORE_WAIT,
    TRIGGER_AFTER_LOADS,
    TRIGGER_BEFORE_WAIT,
    Compiled,
    Kernel,
    Schedule,
    Source,
)
from llmc.codegen.memory import Storage, launched, read_slots, schedule_of, top_bytes
from llmc.diagnostics import Diagnostic, extension_code
from llmc.ir.cost import node_cost
from llmc.ir.dim import Bounds
from llmc.ir.graph import Graph, Module, Node, Value
from llmc.ir.ops.comm import COLLECTIVES
from llmc.ir.types import Type, tensor
from llmc.targets.target import Target


@dataclass(frozen=True)
class Emitted:
    """The nodes of a graph that are launched, in order, with their kernel sources."""

    graph: Graph
    nodes: tuple[Node, ...]
    sources: tuple[Source, ...]


def emit_graph(
    g: Graph, bounds: Bounds, kernels: Mapping[str, Kernel], target: Target, emitted: dict[Any, Source]
) -> Emitted:
    """Emit the sources of all launched nodes; `emitted` caches sources across graphs.

    Raises Diagnostic E433 if a node has no kernel.
    """
    storage = Storage(g)
    nodes = [n for n in g.nodes if launched(n, storage)]
    if missing := next((n for n in nodes if not n.choice.get("kernel")), None):
        raise Diagnostic("E433", "no kernel was selected for the node", "run the pass `select` first", node=missing)
    chosen = [kernels[n.choice["kernel"]] for n in nodes]
    triggers_early = early_triggers(chosen)
    waits_first = [k.waits_first and not early for k, early in zip(chosen, triggers_early, strict=True)]
    sources: list[Source] = []
    for i, (n, kernel) in enumerate(zip(nodes, chosen, strict=True)):
        schedule = schedule_of(n)
        running = may_run(waits_first, sources, bounds)
        if running is not None and may_read_early(kernel.reads_before_wait(n), n, nodes[i - running : i], storage):
            schedule = {**schedule, READ_BEFORE_WAIT: 1}
        if kernel.can_trigger_after_loads and triggers_filling_kernel(i, chosen, triggers_early):
            schedule = {**schedule, TRIGGER_AFTER_LOADS: 1}
        if triggers_early[i]:
            schedule = {**schedule, TRIGGER_BEFORE_WAIT: 1}
        types = tuple(v.type for v in [*n.operands, *n.results])
        key = (n.op.name, types, repr(n.attrs), kernel.name, repr(schedule))
        if key not in emitted:
            emitted[key] = _source(n, kernel, schedule, target)
        sources.append(emitted[key])
    return Emitted(g, tuple(nodes), tuple(sources))


def _source(n: Node, kernel: Kernel, schedule: Schedule, target: Target) -> Source:
    """Emit one node; the source names the package of its kernel."""
    with extension_code(f"kernel {kernel.name!r}", type(kernel), n):
        check_packed(kernel, n, schedule, target)
        source = kernel.emit(n, schedule, target)
        if not isinstance(source, Source):
            raise TypeError(f"emit returned {source!r:.80}, not a Source")
    return replace(source, package=package_of(kernel))


def check_packed(kernel: Kernel, node: Node, schedule: Schedule, target: Target) -> None:
    """Raise Diagnostic E430 for a node that is emitted although the pass `pack` has not packed its weights."""
    if kernel.layouts(node, schedule, target):
        cause = f"{node.op.name} reached code generation with weights that are not packed"
        raise Diagnostic("E430", cause, "run the pass `pack` after `select`", loc=node.loc)


def package_of(kernel: Kernel) -> str:
    """Return the top-level module of a kernel's class; empty for llmc's own."""
    package = type(kernel).__module__.partition(".")[0]
    return "" if package == "llmc" else package


def may_run(waits_first: Sequence[bool], sources: Sequence[Source], bounds: Bounds) -> int | None:
    """Return how many launches of `sources` may still run when the next starts; None if an earlier program's may.

    waits_first: for each launch whether its programs wait before they allow the next one; later launches may follow.
    With programmatic dependent launch, a kernel starts once every program of its predecessor allows it. If these
    programs wait first, all launches before the predecessor are complete by then; otherwise the predecessor may have
    started in the same way. An empty grid is skipped, as if there were no such launch.
    """
    for i in range(len(sources) - 1, -1, -1):
        if waits_first[i] and all(d.bounds(bounds)[0] > 0 for d in sources[i].grid):
            return len(sources) - i
    return None


def may_read_early(operands: Sequence[int], n: Node, running: Sequence[Node], storage: Storage) -> bool:
    """Whether `n` may read these operands before it waits, while the launches `running` may still run."""
    written = {storage.root[r] for before in running for r in before.results}
    return bool(operands) and not any(storage.root[n.operands[i]] in written for i in operands)


def early_triggers(chosen: Sequence[Kernel]) -> list[bool]:
    """Return for each launch whether it triggers the next one before it waits.

    The next one preloads weights, or triggers early itself: after a chain of short kernels, the kernel that preloads
    begins while the kernel in front of the chain still runs.
    """
    triggers_early = [False] * len(chosen)
    for i in range(len(chosen) - 2, -1, -1):
        triggers_early[i] = chosen[i].can_trigger_before_wait and (chosen[i + 1].preloads or triggers_early[i + 1])
    return triggers_early


def triggers_filling_kernel(launch: int, chosen: Sequence[Kernel], triggers_early: Sequence[bool]) -> bool:
    """Whether a kernel that fills multiprocessors may begin as soon as the launch with this number triggers the next.

    That kernel is the next one, or the first one after launches that trigger before they wait.
    """
    first = next((i for i in range(launch + 1, len(chosen)) if not triggers_early[i]), None)
    return first is not None and chosen[first].fills_multiprocessors


@dataclass
class Buffers:
    """The buffer list of a program, with one entry per storage root."""

    graph: Graph
    storage: Storage
    symbols: Mapping[str, tuple[int, int]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    index: dict[Value, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def add_all(self) -> int:
        """Fill the list and return the arena size in bytes."""
        for v in self.graph.inputs:
            self._add(v, v, self.storage.kind[v], 0)
        for v in self.graph.outputs:
            root = self.storage.root[v]
            if not v.type.state and root not in self.index:
                self._add(root, v, "output", 0)
        arena = 0
        slots = iter(read_slots(self.graph, self.symbols))
        for n in self.graph.nodes:
            for r in n.results:
                if self.storage.in_arena(r):
                    s = next(slots)
                    self._add(r, r, "arena", s.offset)
                    arena = max(arena, s.offset + s.nbytes)
        return arena

    def _add(self, root: Value, shown: Value, kind: str, offset: int) -> None:
        """Add the buffer of a root, with the name and type of the value `shown`."""
        self.index[root] = self._append(shown.name or f"v{len(self.rows)}", kind, shown.type, offset)

    def add_group(self, ranks: int) -> int:
        """Add the memory through which this number of ranks exchange results, and return its index."""
        return self._append(GROUP, GROUP, tensor("u8", group_bytes(ranks)), 0)

    def _append(self, name: str, kind: str, type: Type, offset: int) -> int:
        """Append a buffer with a unique form of the name, and return its index."""
        index = len(self.rows)
        while name in self.names:
            name = f"{name}.{index}"
        self.names.add(name)
        self.rows.append(
            {
                "name": name, "kind": kind, "dtype": type.dtype, "shape": [str(d) for d in type.shape],
                "offset": offset, "bytes": str(type.nbytes), "alias": None,
            }
        )  # fmt: skip
        return index

    def of(self, v: Value) -> int:
        """Return the index of a value's buffer."""
        return self.index[self.storage.root[v]]


class Hazards:
    """Finds launches that must wait for earlier ones: both access the same bytes, and at least one writes them."""

    def __init__(self, buffers: Buffers):
        self.buffers = buffers
        self.reads: list[tuple[Any, int, int]] = []
        self.writes: list[tuple[Any, int, int]] = []

    def region(self, v: Value) -> tuple[Any, int, int]:
        """Return (memory, begin, end) in bytes; arena values share one memory, every other root has its own."""
        root = self.buffers.storage.root[v]
        row = self.buffers.rows[self.buffers.index[root]]
        if row["kind"] != "arena":
            return row["name"], 0, 1
        return "", row["offset"], row["offset"] + top_bytes(root, self.buffers.symbols)

    def needs_barrier(self, n: Node) -> bool:
        """Whether a barrier must precede the node, as it does a collective. The node is recorded either way."""
        read = [self.region(v) for v in n.operands]
        write = [self.region(v) for v in n.results]
        clash = _touch(read, self.writes) or _touch(write, self.writes) or _touch(write, self.reads)
        clash = clash or n.op.name in COLLECTIVES
        if clash:
            self.reads, self.writes = [], []
        self.reads += read
        self.writes += write
        return clash


def _touch(regions: Sequence[tuple[Any, int, int]], others: Sequence[tuple[Any, int, int]]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in regions for b in others)


@dataclass(frozen=True)
class Placed:
    """A graph's launches with their memory: buffers, arena bytes, buffer indices per launch, and barriers.

    `sync[i]` is whether all threads wait after launch i, because the next launch conflicts with a launch since the
    previous barrier.
    """

    emitted: Emitted
    buffers: Buffers
    arena: int
    args: tuple[tuple[int, ...], ...]
    sync: tuple[bool, ...]


def place(e: Emitted, m: Module) -> Placed:
    """Lay out the buffers of a graph, and determine buffers and barriers of each launch."""
    buffers = Buffers(e.graph, Storage(e.graph), m.bounds(e.graph))
    arena = buffers.add_all()
    hazards = Hazards(buffers)
    waits = [hazards.needs_barrier(n) for n in e.nodes]
    group = (buffers.add_group(ranks_of(m)),) if any(s.group for s in e.sources) else ()
    args = tuple(
        (*(buffers.of(v) for v in [*n.operands, *n.results]), *(group if s.group else ()))
        for n, s in zip(e.nodes, e.sources, strict=True)
    )
    return Placed(e, buffers, arena, args, (*waits[1:], True))


def program(p: Placed, m: Module, kernels: Sequence[tuple[str, Compiled]], step: tuple[str, str] | None) -> Program:
    """Return the Program.

    kernels: the key of each launch's binary, and what was compiled. step: (key, entry) of the step unit, if any.
    """
    g = p.emitted.graph
    serves = serves_of(g, m)
    launches = zip(p.emitted.nodes, p.emitted.sources, p.args, kernels, strict=True)
    data = {
        "name": g.name,
        "symbols": {symbol: list(bounds) for symbol, bounds in m.bounds(g).items()},
        "serves": {symbol: list(bounds) for symbol, bounds in serves.items() if symbol != "uniform"},
        "uniform": int(bool(serves.get("uniform", 0))),
        "buffers": p.buffers.rows,
        "arena_bytes": p.arena,
        "launches": [_launch(*launch) for launch in launches],
        "step": {"kernel": step[0], "entry": step[1]} if step else None,
        "ranks": ranks_of(m),
        "drafts": max((n.attrs["limit"] for n in p.emitted.nodes if n.op.name == "row_accept"), default=0),
    }
    return Program.read(data, f"program {g.name}")


def ranks_of(m: Module) -> int:
    """Return the number of ranks that a module is divided over; 1 if it is whole."""
    return m.symbols[RANK][1] + 1 if RANK in m.symbols else 1


def _launch(n: Node, s: Source, args: Sequence[int], kernel: tuple[str, Compiled]) -> dict[str, Any]:
    (flops, moved), (key, compiled) = node_cost(n), kernel
    maps = [x.json(box, swizzle) for x, (box, swizzle) in zip(s.maps, compiled.boxes, strict=True)]
    return {
        "kernel": key, "entry": s.entry, "grid": [str(d) for d in s.grid or (1, 1, 1)],
        "threads": compiled.threads, "shared": compiled.shared, "pdl": int(s.pdl), "args": list(args), "maps": maps,
        "params": [x.json() for x in s.passes], "cluster": list(s.cluster),
        "sizes": [str(d) for d in s.sizes], "loc": n.loc, "op": n.op.name, "flops": str(flops), "bytes": str(moved),
    }  # fmt: skip


def serves_of(g: Graph, m: Module) -> dict[str, Any]:
    """Return the symbol ranges that a graph serves; a graph that does not use T runs one token per row ("uniform")."""
    used = {symbol for v in g.values for size in v.type.shape for symbol in size.symbols}
    out: dict[str, Any] = {s: list(r) for s, r in m.bounds(g).items() if s in ("T", "R")}
    if "R" in out and "T" in out and "T" not in used:
        has_one_row_count = out["R"][0] == out["R"][1]
        if "R" in used or has_one_row_count:
            out["T"], out["uniform"] = list(out["R"]), 1
    return out
