"""Memory planning: aliases, in-place results and arena offsets, recorded on the nodes.

A state's next version and a reshape are aliases of their operand. A result may reuse the memory of an operand that is
not read afterwards, if the kernel permits it. Sizes are evaluated at the symbols' upper bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.diagnostics import Diagnostic, extension_code
from llmc.ir.graph import Graph, Module, Node, Value
from llmc.passes.base import Ctx, Pass

ALIGN = 256
InPlace = Callable[[Node], tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Slot:
    """The place of a value: bytes [offset, offset + nbytes) of the arena, from node `first` to node `last`."""

    name: str
    type: str
    offset: int
    nbytes: int
    first: int
    last: int
    loc: str


class Storage:
    """The sharing of memory among values: the root of every value, and the kind of every root.

    Kinds are input, weight, state, output and arena. `copies` are the reshapes that must copy, because their result is
    an output and their operand's memory cannot serve as that output.
    """

    def __init__(self, g: Graph):
        self.root: dict[Value, Value] = {}
        self.kind: dict[Value, str] = {}
        self.copies: set[Node] = set()
        outputs = set(g.outputs)
        for v in g.inputs:
            self.root[v] = v
            self.kind[v] = _kind_of_input(v)
        for n in g.nodes:
            self._add_results(n, outputs)
        for v in g.outputs:
            if not v.type.state and self.kind[self.root[v]] != "output":
                cause = f"@{g.name} returns its input %{v.name} unchanged"
                raise Diagnostic("E440", cause, "return a value that the graph computes")

    def in_arena(self, v: Value) -> bool:
        """Whether a value has memory of its own in the arena, which other values may share."""
        return self.root[v] is v and self.kind[v] == "arena"

    def _add_results(self, n: Node, outputs: set[Value]) -> None:
        """Set the roots of a node's results: a state's next version has the memory of the state that it replaces."""
        names = [slot.name for slot in n.op.operands]
        written_states = iter(n.op.writes)  # the states whose next versions are results, in the same order
        for r in n.results:
            if r.type.state:
                self.root[r] = self.root[n.operands[names.index(next(written_states))]]
            elif n.op.name == "reshape" and self._can_alias(n, r, outputs):
                self.root[r] = self.root[n.operands[0]]
            else:
                self.root[r] = r
                self.kind[r] = "arena"
                if n.op.name == "reshape":
                    self.copies.add(n)
            if r in outputs and not r.type.state:
                self.kind[self.root[r]] = "output"

    def _can_alias(self, n: Node, r: Value, outputs: set[Value]) -> bool:
        """Whether a reshape can alias its operand: an output must not share memory with another output."""
        root = self.root[n.operands[0]]
        return r not in outputs or (self.kind[root] == "arena" and root not in outputs)


def _kind_of_input(v: Value) -> str:
    if v.type.state:
        return "state"
    return "weight" if v.weight else "input"


def launched(n: Node, storage: Storage) -> bool:
    """Whether the node is launched as a kernel; a reshape that is an alias is not."""
    return n.op.name != "reshape" or n in storage.copies


class Arena:
    """Best-fit allocation of ranges below a high-water mark. All sizes are multiples of ALIGN."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []  # (offset, bytes) of every free range
        self.top = 0  # the high-water mark

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` and return the offset: in the smallest free range that fits, else at the top."""
        fitting = [(size, offset) for offset, size in self.free if size >= nbytes]
        if fitting:
            size, offset = min(fitting)
            self.free.remove((offset, size))
            if size > nbytes:
                self.free.append((offset + nbytes, size - nbytes))
            return offset
        offset, size = max(self.free, default=(self.top, 0))
        if offset + size != self.top:
            offset = self.top
        elif size:  # the last free range ends at the top, and grows
            self.free.remove((offset, size))
        self.top = offset + nbytes
        return offset

    def release(self, offset: int, nbytes: int) -> None:
        """Free a range, merging it with adjacent free ranges."""
        adjacent = [r for r in self.free if r[0] + r[1] == offset or offset + nbytes == r[0]]
        for other_offset, other_bytes in adjacent:
            self.free.remove((other_offset, other_bytes))
            offset, nbytes = min(offset, other_offset), nbytes + other_bytes
        self.free.append((offset, nbytes))


def top_bytes(v: Value, symbols: Mapping[str, tuple[int, int]]) -> int:
    """Return a value's bytes at the symbols' upper bounds, rounded up to ALIGN."""
    return max(ALIGN, -(-v.type.nbytes.bounds(symbols)[1] // ALIGN) * ALIGN)


def plan_graph(g: Graph, symbols: Mapping[str, tuple[int, int]], inplace: InPlace) -> dict[Value, int]:
    """Return the offset in the arena of every value that has memory there. `inplace` gives (operand, result) pairs."""
    storage = Storage(g)
    nodes = list(g.nodes)
    last = _last_uses(nodes, storage)
    arena, offsets = Arena(), dict[Value, int]()  # the offsets of all roots so far, also of those that are released
    for i, n in enumerate(nodes):
        ending = {storage.root[v] for v in n.operands if last[storage.root[v]] == i and storage.root[v] in offsets}
        reused = _reused(n, storage, ending, symbols, inplace(n) if n.choice else ())
        for r in filter(storage.in_arena, n.results):
            offsets[r] = offsets[reused[r]] if r in reused else arena.allocate(top_bytes(r, symbols))
        touched = {storage.root[v] for v in [*n.operands, *n.results]}
        dead = [v for v in touched if v in offsets and last.get(v, i) <= i and v not in reused.values()]
        for v in sorted(dead, key=lambda v: offsets[v]):
            arena.release(offsets[v], top_bytes(v, symbols))
    return offsets


def _last_uses(nodes: list[Node], storage: Storage) -> dict[Value, int]:
    """Return the number of the last node that reads or writes each root."""
    last: dict[Value, int] = {}
    for i, n in enumerate(nodes):
        for v in [*n.operands, *n.results]:
            last[storage.root[v]] = i
    return last


def _reused(
    n: Node,
    storage: Storage,
    ending: set[Value],
    symbols: Mapping[str, tuple[int, int]],
    pairs: tuple[tuple[int, int], ...],
) -> dict[Value, Value]:
    """Return result -> operand for the results that take the memory of an operand.

    ending: the arena roots whose last use is this node. pairs: the (operand, result) numbers for which the kernel
    permits it. The operand must be read once and have the result's size.
    """
    roots = [storage.root[v] for v in n.operands]
    reused: dict[Value, Value] = {}
    for operand, result in pairs:
        root, r = roots[operand], n.results[result]
        needs_memory = storage.in_arena(r) and r not in reused
        is_free = root in ending and roots.count(root) == 1 and root not in reused.values()
        if needs_memory and is_free and top_bytes(root, symbols) == top_bytes(r, symbols):
            reused[r] = root
    return reused


def report(m: Module) -> dict[str, Any]:
    """Return the plan of every launched graph as data: arena bytes, and slots by decreasing size."""
    out = {}
    for g in m.launched:
        slots = read_slots(g, m.bounds(g))
        total = max((s.offset + s.nbytes for s in slots), default=0)
        ranked = sorted(slots, key=lambda s: (-s.nbytes, s.offset, s.first))
        out[g.name] = {"arena_bytes": total, "values": len(slots), "slots": [dict(vars(s)) for s in ranked]}
    return out


def read_slots(g: Graph, symbols: Mapping[str, tuple[int, int]]) -> list[Slot]:
    """Return the slots that the pass `memory` recorded; raises Diagnostic E441 if a node has none."""
    storage = Storage(g)
    nodes = list(g.nodes)
    last = _last_uses(nodes, storage)
    out = []
    for i, n in enumerate(nodes):
        offsets = n.choice.get("arena", ())
        for k, r in enumerate(n.results):
            if not storage.in_arena(r):
                continue
            offset = offsets[k] if k < len(offsets) else -1
            if offset < 0:
                raise Diagnostic("E441", f"%{r.name} has no memory offset", "run the pass `memory` last", node=n)
            out.append(Slot(r.name, str(r.type), offset, top_bytes(r, symbols), i, last.get(r, i), n.loc))
    return out


class Memory(Pass):
    """Assign every intermediate value an offset in the arena, recorded as `arena=[...]` on its node."""

    name: ClassVar[str] = "memory"

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every launched graph; return the number of changed nodes."""
        return sum(self._graph(g, m.bounds(g), ctx) for g in m.launched)

    def _graph(self, g: Graph, symbols: Mapping[str, tuple[int, int]], ctx: Ctx) -> int:
        """Record the offsets of a graph's results on its nodes; return the number of nodes that changed.

        Raises Diagnostic E433 for a node without a kernel whose result needs memory.
        """

        def inplace(n: Node) -> tuple[tuple[int, int], ...]:
            kernel = ctx.kernels.get(n.choice.get("kernel", ""))
            with extension_code(f"kernel {n.choice.get('kernel')!r}", type(kernel), n):
                return kernel.inplace(n, schedule_of(n)) if kernel else ()

        offsets = plan_graph(g, symbols, inplace)
        changes = 0
        for n in g.nodes:
            owns = any(r in offsets for r in n.results)
            if owns and "kernel" not in n.choice:
                remedy = "run the passes `select` and `lift-weights` before `memory`"
                raise Diagnostic("E433", "the node has no kernel and cannot be part of a program", remedy, node=n)
            before = n.choice.pop("arena", None)
            if owns:
                n.choice["arena"] = tuple(offsets.get(r, -1) for r in n.results)
            if n.choice.get("arena") != before:
                changes += 1
        return changes


def schedule_of(n: Node) -> dict[str, Any]:
    """Return the schedule that `select` recorded on the node, without the kernel's name and arena offsets."""
    return {k: v for k, v in n.choice.items() if k not in ("kernel", "arena")}
