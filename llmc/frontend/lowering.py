"""The interface between the converter and the lowerings of the aten table: operands, expected results, helpers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Builder, Value
from llmc.ir.types import Type

# 64-bit integers in these graphs are token ids, positions and expert numbers: all fit the 32 bits that we store.
IR_DTYPE = MappingProxyType(
    {
        torch.float64: "f64",
        torch.float32: "f32",
        torch.bfloat16: "bf16",
        torch.float16: "f16",
        torch.int64: "i32",
        torch.int32: "i32",
        torch.int16: "i16",
        torch.int8: "i8",
        torch.uint8: "u8",
        torch.bool: "bool",
    }
)
TORCH_DTYPE = MappingProxyType({ir: dtype for dtype, ir in IR_DTYPE.items() if dtype.is_floating_point})
# A complex tensor becomes a float tensor with a last axis of real and imaginary part.
PARTS = MappingProxyType({torch.complex64: torch.float32, torch.complex128: torch.float64})


class Unsupported(Exception):
    """Raised by a lowering for arguments that it does not support."""


class Sizes:
    """Translates torch's symbolic sizes to Dims, caching equal expressions."""

    def __init__(self, names: Mapping[Any, str]):
        """Take the names of torch's symbols: sympy symbol -> "T" or "R"."""
        self.names = names
        self.seen: dict[Any, Dim] = {}

    def dim(self, size: Any) -> Dim:
        """Return a size as a Dim; raises Unsupported if it is not a polynomial of T and R, up to floor division."""
        if isinstance(size, int):
            return Dim.of(size)
        expr = size.node.expr
        if expr not in self.seen:
            self.seen[expr] = self._walk(expr)
        return self.seen[expr]

    def shape(self, sizes: Sequence[Any]) -> tuple[Dim, ...]:
        """Return a shape as Dims."""
        return tuple(self.dim(s) for s in sizes)

    def type(self, fake: torch.Tensor) -> Type:
        """Return the IR type of a fake tensor."""
        if (floats := PARTS.get(fake.dtype)) is not None:
            return Type(IR_DTYPE[floats], (*self.shape(fake.shape), Dim.of(2)))
        return Type(IR_DTYPE[fake.dtype], self.shape(fake.shape))

    def _walk(self, e: Any) -> Dim:
        """Convert a sympy expression; floor division by a constant becomes ceiling division."""
        if e.is_Integer:
            return Dim.of(int(e))
        if e in self.names:
            return Dim.of(self.names[e])
        args = [self._walk(a) for a in e.args]
        kind = type(e).__name__
        if kind == "Add":
            return sum(args[1:], args[0])
        if kind in ("Mul", "Pow"):
            if kind == "Pow":
                args = args[:1] * int(e.args[1])
            total = Dim.of(1)
            for a in args:
                total = total * a
            return total
        if kind in ("FloorDiv", "CleanDiv") and (den := args[1].const):
            exact = args[0].divide(den)
            return exact if exact is not None else (args[0] - (den - 1)).ceildiv(den)
        raise Unsupported(f"the size {e} is not a polynomial of T and R")


@dataclass(frozen=True)
class Call:
    """An aten call that is being lowered.

    b: the builder that adds nodes. types: the types of the results in torch, with 64-bit integers as i32. positions:
    the graph's input of token positions, i32[T].
    """

    b: Builder
    types: tuple[Type, ...]
    positions: Value

    @property
    def type(self) -> Type:
        """The IR type of the first result."""
        return self.types[0]

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The shape of the first result."""
        return self.types[0].shape

    def value(self, x: Any, like: Value | Type) -> Value:
        """Return a Value unchanged; turn a number into a constant of `like`'s dtype (f32 if that would lose bits)."""
        if isinstance(x, Value):
            return x
        if isinstance(x, Dim):
            if x.const is None:
                raise Unsupported(f"arithmetic on the symbolic size {x}")
            x = x.const
        dtype = (like.type if isinstance(like, Value) else like).dtype
        kind = DTYPES[dtype].kind
        if kind == "f":
            return self.b.constant(float(x), dtype if _holds(dtype, float(x)) else "f32")
        if isinstance(x, float) and not x.is_integer():
            return self.b.constant(x, "f32")
        return self.b.constant(x, dtype if kind == "i" else "i32")

    def cast(self, x: Value, dtype: str) -> Value:
        """Cast x, unless it has the dtype already."""
        return x if x.type.dtype == dtype else self.b.cast(x, dtype=dtype)

    def reshape(self, x: Value, shape: Sequence[Dim]) -> Value:
        """Reshape x; a reshape of a reshape reads the original value."""
        shape = tuple(shape)
        while x.type.shape != shape and x.node is not None and x.node.op.name == "reshape":
            x = x.node.operands[0]
        return x if x.type.shape == shape else self.b.reshape(x, shape=shape)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """Permute the axes of x; a permutation that undoes the previous one returns the original value."""
        perm = tuple(perm)
        if perm == tuple(range(len(perm))):
            return x
        if x.node is not None and x.node.op.name == "transpose":
            inner = x.node.attrs["perm"]
            if tuple(inner[p] for p in perm) == tuple(range(len(perm))):
                return x.node.operands[0]
        return self.b.transpose(x, perm=perm)

    def broadcast(self, x: Value, shape: Sequence[Dim]) -> Value:
        """Broadcast x, unless it has the shape already."""
        return x if x.type.shape == tuple(shape) else self.b.broadcast(x, shape=tuple(shape))

    def part(self, x: Value, axis: int, start: Dim | int, stop: Dim | int) -> Value:
        """Slice one axis of x, unless the range covers it."""
        whole = x.type.shape[axis]
        if Dim.of(start).const == 0 and Dim.of(stop) == whole:
            return x
        return self.b.slice(x, axis=axis, start=Dim.of(start), stop=Dim.of(stop), step=1)


def axis_of(x: Value | Type, dim: int) -> int:
    """Return the axis as a non-negative number."""
    rank = (x.type if isinstance(x, Value) else x).rank
    return dim + rank if dim < 0 else dim


def _holds(dtype: str, x: float) -> bool:
    """Whether a scalar keeps its value in the dtype; torch computes with scalars of at least 32 bits."""
    if dtype in ("f32", "f64") or np.isinf(x):
        return True
    return float(np.asarray(x, dtype=DTYPES[dtype].np)) == x
