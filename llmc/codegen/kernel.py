"""The interface between nodes and the code that runs them; it neither chooses among kernels nor compiles anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmc.ir.dim import D, Dim
from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.targets.target import Target

Schedule = dict[str, Any]  # attribute names -> JSON values; written on the node by `select`
Box = tuple[tuple[int, ...], int]  # of a tensor map in a binary: its sizes, and the swizzle of CUtensorMapSwizzle


@dataclass(frozen=True)
class Map:
    """A parameter that is a tensor map in place of a pointer: its buffer as a row-major tensor of `shape`, of which the
    bulk copy engine brings a `box` at a time; what lies outside of the tensor comes as zeros.

    `swizzle` is the layout of a box in shared memory as in CUtensorMapSwizzle, 0 to 3. Triton chooses it itself.
    """

    param: int
    shape: tuple[Dim, ...]
    box: tuple[int, ...]
    swizzle: int = 0


@dataclass(frozen=True)
class Param:
    """One parameter that a launch passes: `kind` is "arg" (the address of operand or result number `index`), "map" (the
    tensor map number `index` of `Source.maps`), "size" (`size`, as `type` i32 or i64) or "value" (`value`, as `type`
    i32, i64 or f32)."""

    kind: str
    index: int = 0
    size: Dim | None = None
    value: int | float = 0
    type: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return {"arg": 8, "map": 128}.get(self.kind) or {"i32": 4, "i64": 8, "f32": 4}[self.type]

    def json(self) -> dict[str, Any]:
        """As it stands in a program (`llmc_runtime.format.launch_param`)."""
        if self.kind in ("arg", "map"):
            return {self.kind: self.index}
        return {self.kind: str(self.size) if self.kind == "size" else self.value, "type": self.type}


@dataclass(frozen=True)
class Source:
    """One kernel as text, self-contained: no file beside it is needed to compile it.

    `entry` is its function's name, `sizes` the values handed to it as int64, in order, `scratch` the bytes a thread
    needs. Dynamic sizes reach the text by position only (`sizes[0]`), never by symbol name: nodes of different entry
    points whose texts are equal share one binary.
    On GPUs `grid` counts the programs along x, y and z, `params` are the types of all parameters in order ("*bf16",
    "i32"), `options` the compiler's options (num_warps, num_stages), and `pdl` says that the text itself waits for
    the launch before it; threads and shared memory then come from the compiled binary. `maps`: see Map. `passes` lists
    the parameters that a launch passes; if it is empty, those are the operands and results, then `sizes` as i32.
    """

    entry: str
    language: str
    text: str
    sizes: tuple[Dim, ...] = ()
    scratch: Dim = field(default_factory=lambda: D(0))
    threads: int = 0
    shared: int = 0
    grid: tuple[Dim, ...] = ()
    params: tuple[str, ...] = ()
    options: tuple[tuple[str, int], ...] = ()
    pdl: bool = False
    maps: tuple[Map, ...] = ()
    passes: tuple[Param, ...] = ()


# What code generation adds to a schedule before `emit`, from the launches around the node's own:
SETTLED = "settled"  # the one in front writes none of the operands that `Kernel.early` names
LATE = "late"  # the next one has programs that crowd: let it begin when this one's are nearly done


@dataclass(frozen=True)
class Kernel:
    """One way to run some ops on one kind of machine. Instances are immutable and hold no results."""

    name: str = ""
    ops: tuple[str, ...] = ()
    language: str = "cpp"
    crowds: bool = False  # its programs take so much of a multiprocessor that they should find all of them free
    yields: bool = False  # it heeds LATE
    opt_in: bool = False  # `select` takes it only by measurement, or if its option `prefer` names it

    def claims(self, node: Node) -> bool:
        """True where the node's op is one that this kernel is about at all; `reject` then looks at the node."""
        return node.op.name in self.ops

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        """(operand, result) pairs that may share memory when the operand is not read afterwards."""
        return ()

    def reject(self, node: Node, target: Target) -> str | None:
        """None where the kernel can run the node on the target; else the reason in words."""
        return None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        """The candidate schedules of a node: dicts of JSON values, at least one, best guess first."""
        return [{}]

    def layouts(self, node: Node, schedule: Schedule, target: Target) -> dict[int, str]:
        """Operand index -> packed layout of a weight operand; operands left out are plain row-major."""
        return {}

    def pack(self, g: Graph, node: Node, schedule: Schedule, target: Target, ops: Mapping[str, OpDef]) -> None:
        """Put the node's weights into the layouts that `layouts` names: replace it by one that reads layout ops."""
        raise NotImplementedError

    def early(self, node: Node) -> tuple[int, ...]:
        """Operands that the kernel would read before it waits for the launch in front of it. Where that launch writes
        none of them, the schedule given to `emit` has the key SETTLED."""
        return ()

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        """The source of the node under a schedule: pure and deterministic."""
        raise NotImplementedError

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predicted microseconds with the symbols bound by `env`: the larger of arithmetic and traffic."""
        return roofline_us(node, target, env)


def roofline_us(node: Node, target: Target, env: Mapping[str, int]) -> float:
    """max(flops / peak, bytes / bandwidth) plus the target's cost of a launch, in microseconds."""
    from llmc.ir.cost import node_cost

    flops, nbytes = (d.subs(env).const or 0 for d in node_cost(node))
    dtype = next((v.type.dtype for v in node.operands if v.type.dtype in target.peaks), "f32")
    return max(flops / target.peaks[dtype], nbytes / target.bandwidth) * 1e6 + target.launch_us


def schedule_text(schedule: Schedule) -> str:
    """The canonical text of a schedule: the key under which a measurement of it is recorded."""
    return json.dumps(schedule, sort_keys=True)
