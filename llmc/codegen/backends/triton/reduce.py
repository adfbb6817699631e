"""Reductions, softmax, cumulative sums and top-k along any axis in Triton (generated).

`row_kernels.py` handles float reductions of the last axis. The operand is [outer, n, inner]. If inner is 1, a tile is
[outer rows, block of the axis], else [block of the axis, inner columns]; a loop runs along the axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmc.codegen.backends.triton.tiling import (
    MAX_ELEMENTS,
    cost_us,
    factored,
    masked,
    max_block_warps,
    next_power_of_2,
    times,
)
from llmc.codegen.backends.triton.triton_expr import helpers, loaded
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, element
from llmc.codegen.emit import indent
from llmc.codegen.kernel import BY_SCHEDULE, Schedule
from llmc.ir.dim import Dim, product
from llmc.ir.dtype import FLOATS, INTS
from llmc.ir.graph import Node
from llmc.targets.target import Target

ORDERED = '''
@triton.jit
def ordered(x):
    """Integers in the order of finite and infinite floats; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
'''


def key_function(nan: str) -> str:
    """Generate the functions that map floats to integers of the same order; NaN becomes `nan`."""
    return f"{ORDERED}\n\n@triton.jit\ndef key(x):\n    return tl.where(x == x, ordered(x), {nan})\n"


def split(node: Node) -> tuple[Dim, Dim, Dim]:
    """Return (outer, n, inner): the sizes before, of and after the node's axis."""
    shape = node.operands[0].type.shape
    a = node.attrs.get("axis", -1) % len(shape)
    return product(shape[:a]), shape[a], product(shape[a + 1 :])


def computed(dtype: str) -> str:
    """Return the Triton dtype in which values are computed.

    Sums of narrow integers wrap modulo 2^32, which is correct modulo their own width; comparing u32 needs 64 bits.
    """
    if dtype in FLOATS:
        return "tl.float32"
    return "tl.int64" if dtype in ("i64", "u32") else "tl.int32"


@dataclass
class Walk:
    """Generates the code of one program's tiles over [outer, n, inner].

    The schedule's `rows` are outer rows or inner columns ("lines"), its `cols` the tile's elements along the axis.
    """

    u: Unit

    def __post_init__(self) -> None:
        self.outer, self.n, self.inner = split(self.u.node)
        self.last = self.inner.const == 1
        self.across, self.block = self.u.schedule["rows"], self.u.schedule["cols"]
        self.axis = 1 if self.last else 0
        self.shape = f"({self.across}, {self.block})" if self.last else f"({self.block}, {self.across})"

    def head(self) -> list[str]:
        """Return the code that defines `base` (offsets of the program's lines) and `there` (lines that exist)."""
        sizes, total = self.u.sizes, self.u.node.operands[0].type.numel
        if self.last:
            lines = [f"line = tl.program_id(0) * {self.across} + tl.arange(0, {self.across})[:, None]"]
            return [*lines, f"there = line < {sizes(self.outer)}", f"base = {times('line', self.n, total, sizes)}"]
        blocks = sizes(self.inner.ceildiv(self.across))
        return [
            f"outer = tl.program_id(0) // {blocks}",
            f"line = tl.program_id(0) % {blocks} * {self.across} + tl.arange(0, {self.across})[None, :]",
            f"there = line < {sizes(self.inner)}",
            f"base = {times('outer', self.n * self.inner, total, sizes)} + line",
        ]

    def along(self, start: str = "at + ") -> list[str]:
        """Return the code that defines `k` (indices along the axis), `inside` (which exist) and `place` (offsets)."""
        k = f"k = {start}tl.arange(0, {self.block})[{'None, :' if self.last else ':, None'}]"
        return [k, f"inside = there & (k < {self.u.sizes(self.n)})", f"place = base + {self.step('k')}"]

    def step(self, k: str) -> str:
        """Print the offset of index `k` along the axis."""
        return times(k, self.inner, self.u.node.operands[0].type.numel, self.u.sizes)

    def loop(self, inner: list[str]) -> str:
        """Print a loop along the axis around the statements `inner`."""
        body = "\n".join([*self.along(), *inner])
        return f"for at in range(0, {factored(self.n, self.u.sizes)}, {self.block}):\n{indent(body, 4)}"

    def value(self, other: str) -> str:
        """Return the operand's tile in the dtype of the computation, with `other` for elements that do not exist."""
        dtype = self.u.node.operands[0].type.dtype
        text = loaded("tl.load(x0 + place, mask=inside)", dtype)
        return f"tl.where(inside, {text}.to({computed(dtype)}), {other})"

    def result(self, to: int, value: str, dtype: str) -> str:
        """Return the statement that stores one value per line."""
        offset = "line"
        if not self.last:
            offset = f"{times('outer', self.inner, self.outer * self.inner, self.u.sizes)} + line"
        return f"tl.store(y{to} + {offset}, {value}.to({dtype}), mask=there)"


class Lines(TritonKernel):
    """Base class: schedules and costs by lines of the axis."""

    constant_reduction_order = BY_SCHEDULE
    dtypes: ClassVar[tuple[str, ...]] = (*FLOATS, *INTS)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        outer, n, inner = split(node)
        warp = target.limits.warp
        if inner.const == 1:
            block = 1024 if n.const is None else min(4096, next_power_of_2(n.const))
            rows = max(1, min(256 // block, next_power_of_2(outer.const or 256)))
            warps = max(1, min(max_block_warps(target), rows * block // (warp * 8)))
            return [{"rows": rows, "cols": block, "warps": warps}]
        lines = 32 if inner.const is None else min(64, next_power_of_2(inner.const))
        block = max(1, 1024 // lines) if n.const is None else min(next_power_of_2(n.const), max(1, 1024 // lines))
        return [{"rows": lines, "cols": block, "warps": 4}, {"rows": lines, "cols": max(1, block // 4), "warps": 1}]

    def programs(self, node: Node, schedule: Schedule) -> Dim:
        """Return the number of programs of a schedule."""
        outer, _, inner = split(node)
        return outer.ceildiv(schedule["rows"]) if inner.const == 1 else outer * inner.ceildiv(schedule["rows"])

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return cost_us(node, target, env, self.programs(node, schedule), schedule["warps"])

    def finish(self, u: Unit, lines: list[str], helper: str = "") -> Code:
        """Return the code made of these statements."""
        return Code("\n".join(x for x in lines if x), (self.programs(u.node, u.schedule),), helper, u.schedule["warps"])


def smallest_value(dtype: str) -> str:
    """Return the smallest value of the dtype in which `dtype` is computed."""
    smallest = {"tl.float32": 'float("-inf")', "tl.int64": str(-(2**63)), "tl.int32": str(-(2**31))}
    return smallest[computed(dtype)]


class Reduce(Lines):
    """sum, mean, amax, amin. The minimum is the negated maximum of negated values (integers: complements)."""

    def code(self, u: Unit) -> Code:
        walk, op = Walk(u), u.node.op.name
        dtype = u.node.operands[0].type.dtype
        is_float = dtype in FLOATS
        negate, helper = "", ""
        if op in ("sum", "mean"):
            start = "0.0" if is_float else "0"
            update, reduce = "best + {}", f"tl.sum(best, {walk.axis}, keep_dims=True)"
        elif is_float:
            start, helper = smallest_value(dtype), helpers(["row_max"], u.interpret)
            update, reduce = "larger(best, {})", f"largest(best, {walk.axis}, True)"
        else:
            start = smallest_value(dtype)
            update, reduce = "tl.maximum(best, {})", f"tl.max(best, {walk.axis}, keep_dims=True)"
        if op == "amin":
            negate = "-" if is_float else "~"
            tile = f"({negate}{walk.value(f'{negate}({start})')})"
        else:
            tile = walk.value(start)
        if op == "mean":
            reduce += f" / {u.sizes(walk.n)}"
        lines = [
            *walk.head(),
            u.wait,
            f"best = tl.full({walk.shape}, {start}, {computed(dtype)})",
            walk.loop([f"best = {update.format(tile)}"]),
            walk.result(0, f"({negate}{reduce})", element(u.node.result.type)),
        ]
        return self.finish(u, lines, helper)


class Argmax(Lines):
    """The lowest index of the maximum; NaN is larger than all numbers, as in numpy."""

    def code(self, u: Unit) -> Code:
        w = Walk(u)
        t = u.node.operands[0].type.dtype
        kind = "tl.int32" if t in FLOATS else computed(t)
        value = loaded("tl.load(x0 + place, mask=inside)", t)
        keys = f"key({value})" if t in FLOATS else f"{value}.to({kind})"
        low = str(-(2**63) if kind == "tl.int64" else -(2**31))
        inner = [
            f"new = {keys}",
            "better = inside & ((new > best) | (which < 0))",
            "best = tl.where(better, new, best)",
            "which = tl.where(better, k, which)",
        ]
        lines = [
            *w.head(),
            u.wait,
            f"best = tl.full({w.shape}, {low}, {kind})",
            f"which = tl.full({w.shape}, -1, tl.int32)",
            w.loop(inner),
            f"top = tl.max(best, {w.axis}, keep_dims=True)",
            "which = tl.where((best == top) & (which >= 0), which, 2147483647)",
            w.result(0, f"tl.min(which, {w.axis}, keep_dims=True)", "tl.int64"),
        ]
        return self.finish(u, lines, key_function("0x7FFFFFFF") if t in FLOATS else "")


class Cumsum(Lines):
    """Cumulative sums: a scan of each tile plus the sum of the previous tiles."""

    def code(self, u: Unit) -> Code:
        w = Walk(u)
        t = u.node.operands[0].type
        carry = f"({w.across}, 1)" if w.last else f"(1, {w.across})"
        inner = [
            f"value = {w.value('0.0' if t.dtype in FLOATS else '0')}",
            f"scan = tl.cumsum(value, {w.axis}) + before",
            f"tl.store(y0 + place, scan.to({element(t)}), mask=inside)",
            f"before += tl.sum(value, {w.axis}, keep_dims=True)",
        ]
        lines = [*w.head(), u.wait, f"before = tl.full({carry}, 0, {computed(t.dtype)})", w.loop(inner)]
        return self.finish(u, lines)


class Softmax(Lines):
    """Softmax over an axis other than the last, in three loops: maximum, sum, quotients."""

    dtypes = FLOATS

    def code(self, u: Unit) -> Code:
        w = Walk(u)
        value = w.value('float("-inf")')
        store = f"tl.store(y0 + place, (e / total).to({element(u.node.result.type)}), mask=inside)"
        lines = [
            *w.head(),
            u.wait,
            f'best = tl.full({w.shape}, float("-inf"), tl.float32)',
            w.loop([f"best = larger(best, {value})"]),
            f"top = largest(best, {w.axis}, True)",
            f"part = tl.full({w.shape}, 0.0, tl.float32)",
            w.loop([f"part += tl.where(inside, tl.exp({value} - top), 0.0)"]),
            f"total = tl.sum(part, {w.axis}, keep_dims=True)",
            w.loop([f"e = tl.exp({value} - top)", store]),
        ]
        return self.finish(u, lines, helpers(["row_max"], u.interpret))


class Topk(Lines):
    """The k largest elements, one after the other: each is the largest key below the previous one.

    A key orders by value, then by lower index, so that all keys differ. NaN is below all numbers, because numpy sorts
    -NaN to the end. Rows that do not fit in one tile are read k times.
    """

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        n, warp = node.operands[0].type.shape[-1].const, target.limits.warp
        block = MAX_ELEMENTS if n is None else min(MAX_ELEMENTS, next_power_of_2(n))
        return [{"rows": 1, "cols": block, "warps": max(1, min(max_block_warps(target), block // (warp * 8)))}]

    def programs(self, node: Node, schedule: Schedule) -> Dim:
        return split(node)[0]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return super().cost_us(node, schedule, target, env) + 0.3 * int(node.attrs["k"])

    def code(self, u: Unit) -> Code:
        x, n = u.node.operands[0].type, split(u.node)[1]
        block, k = u.schedule["cols"], u.node.attrs["k"]
        single_tile = n.const is not None and n.const <= block
        bounds, keep = [], []  # statements that mask the row's last tile, if it is not full
        if not n.divisible(block):
            bounds, keep = [f"inside = col < {u.sizes(n)}"], [f"keys = tl.where(inside, keys, {-(2**63)})"]
        load = loaded(f"tl.load(x0 + base + col{masked('inside' if bounds else '')})", x.dtype)
        tile = [f"keys = (key({load}).to(tl.int64) << 32) | (0x7FFFFFFF - col).to(tl.int64)", *keep]
        below = f"tl.where(keys < last, keys, {-(2**63)})"
        if single_tile:
            first = [f"col = tl.arange(0, {block})", *bounds, u.wait, *tile]
            find = [f"last = tl.max({below}, 0)"]
        else:
            first = [u.wait]
            inner = [f"col = at + tl.arange(0, {block})", *bounds, *tile, f"best = tl.maximum(best, {below})"]
            find = [
                f"best = tl.full(({block},), {-(2**63)}, tl.int64)",
                f"for at in range(0, {factored(n, u.sizes)}, {block}):\n{indent(chr(10).join(inner), 4)}",
                "last = tl.max(best, 0)",
            ]
        body = [
            *find,
            "which = 0x7FFFFFFF - (last & 0x7FFFFFFF)",
            f"tl.store(y0 + row * {k} + j, tl.load(x0 + base + which))",
            f"tl.store(y1 + row * {k} + j, which)",
        ]
        lines = [
            "row = tl.program_id(0).to(tl.int64)",
            f"base = row * {factored(n, u.sizes)}",
            *first,
            f"last = tl.full((), {2**63 - 1}, tl.int64)",
            f"for j in range({k}):\n{indent(chr(10).join(body), 4)}",
        ]
        return self.finish(u, lines, key_function("-0x7FFFFFFF"))


REDUCE = Reduce("triton/reduce", ("sum", "mean", "amax", "amin"))
ARGMAX = Argmax("triton/argmax", ("argmax",))
CUMSUM = Cumsum("triton/cumsum", ("cumsum",))
SOFTMAX = Softmax("triton/softmax", ("softmax",))
TOPK = Topk("triton/topk", ("topk",))
