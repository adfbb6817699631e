"""Arithmetic that memory-bound Triton kernels share: sizes as text, programs by rows and columns, what they cost."""

from __future__ import annotations

from collections.abc import Mapping
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
    waves = -(-count // max(1, target.limits.units * max(1, 32 // warps)))
    alone = nbytes / count / rate
    at_once = nbytes / (min(count, target.limits.units) * _UNIT_BYTES_US)
    return target.launch_us + max(nbytes / target.bandwidth * 1e6, waves * (_START_US + alone), _START_US + at_once)
