"""Arithmetic that memory-bound Triton kernels share: sizes as text, programs by rows and columns, what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import gcd

from llmc.codegen.emit import Sizes
from llmc.ir.cost import node_cost
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.targets.target import Target

BLOCK_THREADS = 1024  # of a block, on every GPU
WIDEST = 16384  # elements that one program keeps in registers
_START_US = 0.9  # of a program, from its first load to its last store
_WARP_US = 0.01  # of a program's barriers, a warp
_RESIDENT_WARPS = 48  # of the programs that one multiprocessor holds at once
_UNIT_BYTES_US = 60e3  # that one multiprocessor moves in a microsecond
_THREAD_BYTES_US = 90.0  # that one thread keeps moving


def power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def most_warps(target: Target) -> int:
    return BLOCK_THREADS // target.limits.warp


def wide(d: Dim) -> bool:
    """Whether a number of elements may pass 2^31."""
    return d.const is None or d.const >= 2**31


def factored(d: Dim | int, sizes: Sizes, big: bool = False) -> str:
    """A size as text whose constant factor is visible: Triton proves alignment by it. big: in 64 bits."""
    d = D(d)
    if d.const is not None:
        return str(d.const)
    factor = reduce(gcd, (c for _, c in d.terms))
    rest = d.divide(factor)
    assert rest is not None
    text = f"{sizes(rest)}.to(tl.int64)" if big else sizes(rest)
    return text if factor == 1 else f"({text} * {factor})"


def times(index: str, stride: Dim, total: Dim, sizes: Sizes) -> str:
    """index * stride as an offset into `total` elements."""
    if stride.const == 1:
        return index
    return (
        f"{index}.to(tl.int64) * {factored(stride, sizes)}" if wide(total) else f"{index} * {factored(stride, sizes)}"
    )


def cost_us(
    node: Node, target: Target, env: Mapping[str, int], programs: Dim, warps: int, moved: Dim | None = None
) -> float:
    """Microseconds of a memory-bound launch: its traffic at full bandwidth, or what its programs can move while few."""
    nbytes = float((node_cost(node)[1] if moved is None else moved).subs(env).const or 0)
    count = max(1, programs.subs(env).const or 1)
    rate = min(_UNIT_BYTES_US, warps * target.limits.warp * _THREAD_BYTES_US)
    resident = max(1, min(32, _RESIDENT_WARPS // warps))
    waves = -(-count // max(1, target.limits.units * resident))
    busy = waves * (_START_US + nbytes / count / rate)
    few = _START_US + _WARP_US * warps + nbytes / (min(count, max(1, target.limits.units)) * _UNIT_BYTES_US)
    return target.launch_us + max(nbytes / target.bandwidth * 1e6, busy, few)


def tiles(rows: Dim, cols: Dim, target: Target, each: int = 8) -> list[tuple[int, int, int]]:
    """(rows, cols, warps) of tiles over a space that nothing ties together, `each` elements a thread at most, one at
    least: of threads that held the same element, one could read it after another has written over it."""
    n, outer, warp = cols.const, rows.const, target.limits.warp
    found = []
    for warps in (4, 1, 8):
        tile = warps * warp * each
        wide_ = tile if n is None else min(tile, power(n))
        tall = tile // wide_ if outer is None else min(tile // wide_, power(outer))
        found.append((tall, wide_, max(1, min(warps, tall * wide_ // warp))))
    return list(dict.fromkeys(found))


def decompose(index: str, axes: Sequence[Dim], sizes: Sizes, name: str = "i") -> list[str]:
    """Statements that split a row-major index into coordinates `name`0, `name`1, ..."""
    lines, rest = [], index
    for a in range(len(axes) - 1, 0, -1):
        lines.append(f"{name}{a} = {rest} % {sizes(axes[a])}")
        lines.append(f"{name}_{a} = {rest} // {sizes(axes[a])}")
        rest = f"{name}_{a}"
    return [*lines, f"{name}0 = {rest}"] if axes else []


def masked(*conditions: str, other: str = "") -> str:
    """The mask argument of a load or store; nothing where no condition is left."""
    found = [c for c in conditions if c]
    return (f", mask={' & '.join(found)}" + (f", other={other}" if other else "")) if found else ""
