"""The interface of kernels: which nodes they support, their schedules, and the source text that they emit."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from llmc_runtime.format.launch_param import TYPES

from llmc.ir.cost import node_cost
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.targets.target import Target

# Values of `Kernel.constant_reduction_order`: nothing is summed, or only integers are; the bits of a row depend only on
# the schedule.
EXACT, BY_SCHEDULE = "exact", "by schedule"
Schedule = dict[str, Any]  # attribute names -> JSON values; written on the node by `select`
Box = tuple[tuple[int, ...], int]  # of a tensor map: box sizes, and the swizzle as a CUtensorMapSwizzle


@dataclass(frozen=True)
class Map:
    """A kernel parameter that is a tensor map (CUtensorMap) instead of a pointer.

    param: the number of the parameter. shape: the buffer's shape in elements. box: elements per bulk copy and axis;
    elements outside of the tensor are zeros. swizzle: the layout of a box in shared memory as a CUtensorMapSwizzle, 0
    to 3; Triton chooses its own. strides: in elements, one for every axis except the last; empty means row-major.
    offset: bytes from the start of the buffer to the tensor. Shape, strides and offset are evaluated at the symbols'
    upper bounds; symbols of states, at the sizes for which they were allocated.
    """

    param: int
    shape: tuple[Dim, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    strides: tuple[Dim, ...] = ()
    offset: Dim = field(default_factory=lambda: D(0))

    def json(self, box: Sequence[int], swizzle: int) -> dict[str, Any]:
        """Return the map as written in a program (`llmc_runtime.format.launch_param.TensorMap`)."""
        out = {"arg": self.param, "shape": [str(d) for d in self.shape], "box": list(box), "swizzle": swizzle}
        return {**out, "strides": [str(s) for s in self.strides], "offset": str(self.offset)}


@dataclass(frozen=True)
class Param:
    """One parameter that a launch passes.

    kind: "arg" (the address of operand or result `index`, plus `offset` bytes, evaluated at the symbols' upper bounds),
    "tensor" (16 bytes: the same address, then `size` as i32), "map" (tensor map `index` of `Source.maps`), "size"
    (`size`, as `type` i32 or i64) or "value" (`value`, as `type` i32, i64, f32 or u8).
    """

    kind: str
    index: int = 0
    size: Dim | None = None
    value: int | float = 0
    type: str = ""
    offset: Dim = field(default_factory=lambda: D(0))

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return {"arg": 8, "tensor": 16, "map": 128}.get(self.kind) or struct.calcsize(TYPES[self.type])

    def json(self) -> dict[str, Any]:
        """Return the parameter as written in a program (`llmc_runtime.format.launch_param`)."""
        if self.kind == "arg":
            return {self.kind: self.index, "offset": str(self.offset)}
        if self.kind == "tensor":
            return {self.kind: self.index, "size": str(self.size), "offset": str(self.offset)}
        if self.kind == "map":
            return {self.kind: self.index}
        return {self.kind: str(self.size) if self.kind == "size" else self.value, "type": self.type}


@dataclass(frozen=True)
class Source:
    """The source of one kernel; the text is self-contained, without includes or imports of local files.

    Invariant: the text refers to run-time sizes by position (`sizes[0]`), never by symbol name, so that nodes of
    different graphs with equal texts share one binary.

    entry: the name of the kernel function. sizes: run-time sizes passed as int64, in order. scratch: bytes per CPU
    thread. threads, shared: threads and bytes of dynamic shared memory per block; 0 if the compiler determines them.
    grid: programs along x, y and z. params: types of all parameters of a Triton kernel in order ("*bf16", "i32").
    options: of the compiler (num_warps, num_stages). pdl: whether the kernel uses programmatic dependent launch, and
    waits for the previous kernel itself. maps: see Map. passes: the parameters that a launch passes; empty means
    operands and results, then `sizes` as i32. cluster: blocks of a cluster along x, y and z (at most 8 in total); empty
    without clusters. group: whether launches pass the memory of a group of ranks (`llmc_runtime.format.group_memory`)
    after operands and results. package: the top-level module of an extension that the kernel is from, for errors; empty
    for llmc's own. license: the distribution whose licence applies to the binary, if it contains another project's
    code.
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
    cluster: tuple[int, ...] = ()
    group: bool = False
    package: str = field(default="", compare=False)
    license: str = ""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel and its launch configuration.

    threads: threads of a block; shared: bytes of dynamic shared memory; both 0 on CPUs. boxes: for each tensor map, in
    the order of the parameters, its box and its swizzle (0: none, 1 to 3: 32, 64 and 128 bytes).
    """

    binary: bytes
    threads: int = 0
    shared: int = 0
    boxes: tuple[Box, ...] = ()


# Keys that code generation adds to a schedule before `emit`, depending on the neighbouring launches. In CUDA's terms of
# programmatic dependent launch, a kernel waits for the grids before it, and triggers the launch of the next kernel.
# No launch that may still run writes the operands that `Kernel.reads_before_wait` returns:
READ_BEFORE_WAIT = "read_before_wait"
# The next kernel `fills_multiprocessors`; it is triggered after this kernel's last loads:
TRIGGER_AFTER_LOADS = "trigger_after_loads"
# The next kernel `preloads` weights, or leads to one that does; it is triggered before this kernel waits:
TRIGGER_BEFORE_WAIT = "trigger_before_wait"


@dataclass(frozen=True)
class Kernel:
    """Base class of kernels: one way to run some ops on one kind of machine. Instances are immutable.

    name: such as "triton/gemv". ops: names of the ops that it implements. language: of the emitted source.
    fills_multiprocessors: its programs need whole multiprocessors, so it should not start while programs of the
    previous kernel still run. preloads: its programs load weights on chip before they wait for the previous launch.
    can_trigger_after_loads, can_trigger_before_wait: it supports the keys TRIGGER_AFTER_LOADS and TRIGGER_BEFORE_WAIT
    of a schedule. opt_in: `select` uses it only if it was measured, or if the option `prefer` of `select` names it.
    """

    name: str = ""
    ops: tuple[str, ...] = ()
    language: str = "cpp"
    fills_multiprocessors: bool = False
    can_trigger_after_loads: bool = False
    preloads: bool = False
    can_trigger_before_wait: bool = False
    opt_in: bool = False
    constant_reduction_order: ClassVar[str | None] = None  # that of all nodes; see `reduction_order`
    # Whether every program waits for the previous launch before it allows the next kernel to begin, unless the schedule
    # has TRIGGER_BEFORE_WAIT.
    waits_first: ClassVar[bool] = False

    def claims(self, node: Node) -> bool:
        """Whether this kernel implements the node's op; `reject` then checks the node itself."""
        return node.op.name in self.ops

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        """Return (operand, result) pairs that may share memory if the operand is not read afterwards."""
        return ()

    def reject(self, node: Node, target: Target) -> str | None:
        """Return why the kernel cannot run the node on the target, or None if it can."""
        return None

    def missing(self) -> str:
        """Return which package the kernel needs that is not installed, or "". `select` then uses another kernel."""
        return ""

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        """Return the candidate schedules of a node, at least one, best guess first."""
        return [{}]

    def leads(self, node: Node, target: Target, env: Mapping[str, int]) -> bool:
        """Return whether `select` takes the kernel at the sizes `env` even if others were measured and it was not.

        It is a rule with evidence of its own, for a kernel that needs optional packages and is faster wherever the rule
        holds. A measurement of the kernel at these sizes takes precedence.
        """
        return False

    def reduction_order(self, node: Node, schedule: Schedule, target: Target) -> str | None:
        """Return a text that names the order in which the elements of a result are summed, or None.

        Kernels and schedules with equal texts give a token's or a row's results the same bits, regardless of what else
        a launch computes: other rows, their number, the chunk of a prompt. EXACT is the text of kernels that do not
        round, or round every element by itself in one way. None means that the bits may depend on the batch, or that
        this is unknown; compiles with --deterministic do not use such a kernel. The default is the class's
        `constant_reduction_order`, to which BY_SCHEDULE adds the schedule.
        """
        order = self.constant_reduction_order
        return f"{self.name} {schedule_text(schedule)}" if order == BY_SCHEDULE else order

    def layouts(self, node: Node, schedule: Schedule, target: Target) -> dict[int, str]:
        """Return operand index -> packed layout of weight operands; other operands are row-major."""
        return {}

    def pack(self, g: Graph, node: Node, schedule: Schedule, target: Target, ops: Mapping[str, OpDef]) -> None:
        """Replace the node by one that reads its weights in the packed layouts that `layouts` returns."""
        raise NotImplementedError

    def reads_before_wait(self, node: Node) -> tuple[int, ...]:
        """Return the operands that the kernel can read before it waits for the previous launch.

        If neither that launch nor an earlier one that may still run writes them, the schedule passed to `emit` has the
        key READ_BEFORE_WAIT.
        """
        return ()

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        """Return the source of the node under a schedule. Must be pure and deterministic."""
        raise NotImplementedError

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds at the sizes `env`; by default the roofline plus the launch."""
        return roofline_us(node, target, env)


def roofline_us(node: Node, target: Target, env: Mapping[str, int]) -> float:
    """Return max(flops / peak, bytes / bandwidth) plus the target's launch overhead, in microseconds."""
    flops, nbytes = (d.subs(env).const or 0 for d in node_cost(node))
    dtype = next((v.type.dtype for v in node.operands if v.type.dtype in target.peaks), "f32")
    return max(flops / target.peaks[dtype], nbytes / target.bandwidth) * 1e6 + target.launch_us


def schedule_text(schedule: Schedule) -> str:
    """Return the canonical text of a schedule, under which its measurements are recorded."""
    return json.dumps(schedule, sort_keys=True)
