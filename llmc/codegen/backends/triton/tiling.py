"""The tiles of Triton's products, and helpers of generated, memory-bound kernels: sizes as text, tiles, costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import gcd
from typing import NamedTuple

from llmc.codegen.emit import Sizes
from llmc.ir.cost import node_cost
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.targets.target import Target

BLOCK_THREADS = 1024  # maximum threads per block, on every GPU
MAX_ELEMENTS = 16384  # maximum elements that one program keeps in registers
GROUP_ROWS, GROUP_COLUMNS, GROUP_WARPS = 64, 16, 4  # a tile of whole multiples is multiplied by warpgroups
_START_US = 0.9  # latency of a program, from its first load to its last store
_WARP_US = 0.01  # barriers of a program, per warp
_RESIDENT_WARPS = 48  # warps that one multiprocessor runs at once
_UNIT_BYTES_US = 60e3  # bytes per microsecond of one multiprocessor
_THREAD_BYTES_US = 90.0  # bytes per microsecond of one thread


class GemmTile(NamedTuple):
    """The tile of a program of a product by tl.dot; the fields are the entries of its schedule.

    bm: tokens. bn: weight rows of each part. bk: columns of a step. stages: steps in flight. split: slices of a step,
    each multiplied by warps of its own.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    split: int = 1


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def previous_power_of_2(n: int) -> int:
    """Return the largest power of two that is at most n, which is positive."""
    return 1 << n.bit_length() - 1


def max_block_warps(target: Target) -> int:
    """Return the maximum number of warps per block."""
    return BLOCK_THREADS // target.limits.warp


def wide(d: Dim) -> bool:
    """Whether a number of elements may reach 2^31, so that offsets need 64 bits."""
    return d.const is None or d.const >= 2**31


def factored(d: Dim | int, sizes: Sizes, big: bool = False) -> str:
    """Print a size with its constant factor separate, from which Triton proves alignment. big: compute in 64 bits."""
    d = D(d)
    if d.const is not None:
        return str(d.const)
    factor = reduce(gcd, (c for _, c in d.terms))
    rest = d.divide(factor)
    assert rest is not None
    text = f"{sizes(rest)}.to(tl.int64)" if big else sizes(rest)
    return text if factor == 1 else f"({text} * {factor})"


def times(index: str, stride: Dim, total: Dim, sizes: Sizes) -> str:
    """Print index * stride as an offset into `total` elements."""
    if stride.const == 1:
        return index
    return (
        f"{index}.to(tl.int64) * {factored(stride, sizes)}" if wide(total) else f"{index} * {factored(stride, sizes)}"
    )


def cost_us(
    node: Node, target: Target, env: Mapping[str, int], programs: Dim, warps: int, moved: Dim | None = None
) -> float:
    """Predict the microseconds of a memory-bound launch.

    The largest of three times: the traffic at full bandwidth, waves of programs limited by their threads, and, for few
    programs, the traffic at the bandwidth of the multiprocessors that run them.
    """
    nbytes = float((node_cost(node)[1] if moved is None else moved).subs(env).const or 0)
    count = max(1, programs.subs(env).const or 1)
    rate = min(_UNIT_BYTES_US, warps * target.limits.warp * _THREAD_BYTES_US)
    resident = max(1, min(32, _RESIDENT_WARPS // warps))
    waves = -(-count // max(1, target.limits.units * resident))
    busy = waves * (_START_US + nbytes / count / rate)
    few = _START_US + _WARP_US * warps + nbytes / (min(count, max(1, target.limits.units)) * _UNIT_BYTES_US)
    return target.launch_us + max(nbytes / target.bandwidth * 1e6, busy, few)


def tiles(rows: Dim, cols: Dim, target: Target, per_thread: int = 8) -> list[tuple[int, int, int]]:
    """Return (rows, cols, warps) of tiles over independent elements, with 1 to `per_thread` elements per thread.

    Invariant: no two threads have the same element. Otherwise, in place, one thread could read an element after another
    has overwritten it.
    """
    n, outer, warp = cols.const, rows.const, target.limits.warp
    shapes = []
    for warps in (4, 1, 8):
        tile = warps * warp * per_thread
        wide_ = tile if n is None else min(tile, next_power_of_2(n))
        tall = tile // wide_ if outer is None else min(tile // wide_, next_power_of_2(outer))
        shapes.append((tall, wide_, max(1, min(warps, tall * wide_ // warp))))
    return list(dict.fromkeys(shapes))


def decompose(index: str, axes: Sequence[Dim], sizes: Sizes, name: str = "i") -> list[str]:
    """Return the statements that split a row-major index into coordinates `name`0, `name`1, ..."""
    lines, rest = [], index
    for a in range(len(axes) - 1, 0, -1):
        lines.append(f"{name}{a} = {rest} % {sizes(axes[a])}")
        lines.append(f"{name}_{a} = {rest} // {sizes(axes[a])}")
        rest = f"{name}_{a}"
    return [*lines, f"{name}0 = {rest}"] if axes else []


def masked(*conditions: str, other: str = "") -> str:
    """Print the mask argument of a load or store from its non-empty conditions; "" if there are none."""
    present = [c for c in conditions if c]
    if not present:
        return ""
    mask = f", mask={' & '.join(present)}"
    return f"{mask}, other={other}" if other else mask


def dot_order(target: Target, dtype: str, rows: int, columns: int, warps: int) -> str:
    """Return the order of the sums of tl.dot, [rows, columns] of factors of `dtype`, in one chain over the depth.

    It depends on the matrix instruction that Triton chooses for a tile. All instructions of a kind add the same number
    of columns at a time, from the first to the last: tiles of other sizes give an element the same bits. Warpgroups
    have their own instruction (wgmma), whose sums may be rounded otherwise.
    """
    if dtype in ("f32", "tl.float32"):
        return "fma"  # float32 is multiplied without matrix instructions, one column after another
    whole = rows % GROUP_ROWS == columns % GROUP_COLUMNS == warps % GROUP_WARPS == 0
    return f"{'wgmma' if target.arch == 'sm_90' and whole else 'mma'} {dtype}"
