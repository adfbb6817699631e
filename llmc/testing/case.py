"""One node with its kernel and inputs, its buffers between guard zones, and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.codegen.kernel import Kernel, Schedule
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.example import example_graph, op_example
from llmc.ir.graph import Graph, Node
from llmc.ir.interp import bind_symbols, round_to_type, run
from llmc.ir.opdef import OpDef
from llmc.ir.types import Type

GUARD_BYTES = 256  # bytes before and after every buffer, which a kernel must not write
POISON_BYTE = 0xFF  # initial value of every result byte: NaN in floats of every width
ALIGNMENT = 64
# One unit in the last place, relative to the value.
UNITS: Mapping[str, float] = MappingProxyType(
    {"bf16": 2.0**-7, "f16": 2.0**-10, "f8e4m3": 2.0**-3, "f8e4m3fnuz": 2.0**-3}
)


@dataclass
class Case:
    """One node in a separate graph, the kernel and schedule to run it with, and its operands.

    rtol, atol: permitted errors of floats, to which one unit in the last place of the result's dtype is added (unless
    rtol is 0). sizes: symbols that no operand's shape binds. exact: compare with the reference in float64, whose result
    is not rounded.
    """

    name: str
    graph: Graph
    kernel: Kernel
    schedule: dict[str, Any]
    inputs: list[np.ndarray]
    rtol: float = 1e-5
    atol: float = 1e-5
    sizes: dict[str, int] = field(default_factory=dict)
    exact: bool = False

    @property
    def node(self) -> Node:
        """The node that the kernel runs."""
        (node,) = self.graph.nodes
        return node

    def expected(self, inputs: Sequence[np.ndarray], sizes: Mapping[str, int]) -> list[np.ndarray]:
        """Compute the expected results from inputs that are rounded to their dtypes, by the reference of the op.

        sizes: the value of every symbol.
        """
        return run(self.graph, inputs, sizes, exact=self.exact)


def case_of(
    kernel: Kernel,
    op: OpDef,
    inputs: Sequence[Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
    dtype: str = "f32",
    schedule: Schedule | None = None,
    seed: int = 0,
) -> Case:
    """Return a case that applies `op` to arrays.

    inputs, attrs: drawn from the op's declaration (`holds`, `example`) if `inputs` is None. dtype: of float operands
    whose signature leaves it open. schedule: the kernel's parameters, which may be empty.
    """
    arrays = None if inputs is None else [np.asarray(x) for x in inputs]
    values = dict(attrs or {})
    if arrays is None:
        drawn, declared = op_example(op, np.random.default_rng(seed))
        arrays, values = [np.asarray(x) for x in drawn], {**declared, **values}
    graph = example_graph(op, arrays, values, dtype).graphs["main"]
    return Case(f"{kernel.name} {op.name} {dtype} {schedule or {}}", graph, kernel, dict(schedule or {}), arrays)


class Buffer:
    """Bytes for one value, poisoned, between two guard zones; aligned to 64 bytes."""

    def __init__(self, nbytes: int):
        """Reserve `nbytes` bytes."""
        self.raw = np.full(nbytes + 2 * GUARD_BYTES + ALIGNMENT, POISON_BYTE, np.uint8)
        start = GUARD_BYTES + (-(self.raw.ctypes.data + GUARD_BYTES)) % ALIGNMENT
        self.body = self.raw[start : start + nbytes]
        self.start, self.end = start, start + nbytes

    def put(self, x: np.ndarray, t: Type) -> Buffer:
        """Write an array in the dtype of `t`."""
        self.body[:] = np.ascontiguousarray(x.astype(DTYPES[t.dtype].np)).reshape(-1).view(np.uint8)
        return self

    @staticmethod
    def holding(x: np.ndarray, t: Type) -> Buffer:
        """Return a buffer that holds `x` in the dtype of `t`."""
        return Buffer(x.size * DTYPES[t.dtype].bits // 8).put(x, t)

    def get(self, t: Type, shape: tuple[int, ...]) -> np.ndarray:
        """Return the bytes as an array of the dtype of `t`."""
        return self.body.view(DTYPES[t.dtype].np).reshape(shape)

    def check(self, subject: str) -> None:
        """Raise AssertionError if bytes outside the buffer were written."""
        assert (self.raw[: self.start] == POISON_BYTE).all(), f"{subject}: bytes before the buffer were written"
        assert (self.raw[self.end :] == POISON_BYTE).all(), f"{subject}: bytes after the buffer were written"


class Bound:
    """A case's operands and results in buffers, and the results that the reference computes from the same operands.

    sizes: the value of every symbol. wanted: the expected results. operands, results: buffers in the order of the node;
    the buffer of a state is that of the operand that is written.
    """

    def __init__(self, case: Case) -> None:
        """Round the inputs to their dtypes, run the reference, and fill the buffers."""
        node, g = case.node, case.graph
        self.case = case
        self.inputs = [round_to_type(x, v.type) for x, v in zip(case.inputs, g.inputs, strict=True)]
        self.sizes = bind_symbols(g, self.inputs, case.sizes)
        self.wanted = case.expected(self.inputs, self.sizes)
        self.of = {v: Buffer.holding(x, v.type) for v, x in zip(g.inputs, self.inputs, strict=True)}
        self.operands = [self.of[v] for v in node.operands]
        slots = [slot.name for slot in node.op.operands]
        written = iter(node.op.writes)
        self.results = []
        for result, expected in zip(node.results, self.wanted, strict=True):
            if result.type.state:
                self.results.append(self.operands[slots.index(next(written))])
            else:
                self.results.append(Buffer(expected.size * DTYPES[result.type.dtype].bits // 8))

    def value(self, size: Dim) -> int:
        """Return the value of a symbolic size."""
        const = size.subs(self.sizes).const
        assert const is not None, f"{size} is not bound"
        return int(const)

    def check(self) -> None:
        """Raise AssertionError if a result is wrong, an operand changed, or bytes outside a buffer were written."""
        case = self.case
        for i, buffer in enumerate([*self.operands, *self.results]):
            buffer.check(f"{case.name}: buffer {i}")
        for array, v in zip(self.inputs, case.graph.inputs, strict=True):
            if self.of[v] not in self.results:
                np.testing.assert_array_equal(self.of[v].body, Buffer.holding(array, v.type).body, "an operand changed")
        for result, expected, buffer in zip(case.node.results, self.wanted, self.results, strict=True):
            t = result.type
            compare(case, t.dtype, round_to_type(buffer.get(t, expected.shape), t), expected)


def compare(case: Case, dtype: str, actual: np.ndarray, expected: np.ndarray) -> None:
    """Compare floats within the case's tolerance and a unit in the last place, everything else exactly."""
    if DTYPES[dtype].kind == "f":
        unit = UNITS.get(dtype, 0.0) if case.rtol else 0.0
        np.testing.assert_allclose(actual, expected, rtol=case.rtol + unit, atol=case.atol, err_msg=case.name)
    else:
        np.testing.assert_array_equal(actual, expected, err_msg=case.name)
