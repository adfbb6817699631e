"""The binding of `kernels/skinny_gemm.cu`: few tokens times weights of 4 bits, which are read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llmc.codegen.backends.cuda import strip_division as strips
from llmc.codegen.backends.cuda.cuda_kernel import (
    CTYPES,
    HOPPER,
    INT4_TO_BF16,
    SCALAR_MATH,
    STREAMING,
    STRIP_SUMS,
    Binding,
)
from llmc.codegen.backends.cuda.fragment_product import (
    NORMED,
    NORMED_PACKED,
    PACKED,
    PLAIN,
    FragmentKernel,
    FragmentProduct,
)
from llmc.codegen.kernel import Schedule
from llmc.ir.graph import Node
from llmc.ir.ops.packed_fragments import BLOCK
from llmc.targets.target import Target

# Fitted to measurements on an H200 (bench.gpu.quantized_products): microseconds that do not depend on the weights, and
# the share of the bandwidth that is reached, by tokens; what a second block on a multiprocessor adds.
_START, _SHARE = MappingProxyType({8: 2.6, 16: 3.9}), MappingProxyType({8: 0.76, 16: 0.58})
_SECOND = 0.7


@dataclass(frozen=True)
class SkinnyGemm(FragmentKernel):
    """Few tokens: quantized_linear over codes of 4 bits, on sm_90, also of normed tokens.

    More tokens than a tile read the weights again.
    """

    def reject(self, node: Node, target: Target) -> str | None:
        if why := super().reject(node, target):
            return why
        p = FragmentProduct.of(node)
        if p.m.const is not None and p.m.const > strips.TOKENS[-1]:
            return f"{p.m} tokens; at most {strips.TOKENS[-1]} are supported"
        return None if list(_schedules(p, target)) else f"{p.k} columns with {p.group} for each scale"

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return list(_schedules(FragmentProduct.of(node), target))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: the copies of all blocks in whole rounds, plus a constant per number of tokens."""
        p, s = FragmentProduct.of(node), schedule
        tokens = s["tokens"]
        copied = strips.units(p.n, p.parts, s, target) * strips.clusters(s, target) * strips.STRIP * strips.columns(s)
        nbytes = p.weight_bytes / (p.parts * p.n * p.k) * copied
        tiles = -(-int(p.m.subs(env)) // tokens)
        us = tiles * nbytes / (target.bandwidth * _SHARE[tokens]) * 1e6 + _START[tokens]
        return us + _SECOND * (strips.resident(s) - 1)

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, s = FragmentProduct.of(node), schedule
        clusters, tokens = strips.clusters(s, target), s["tokens"]
        return Binding(
            grid=(p.m.ceildiv(tokens) * (clusters * s["split"]),),
            threads=s["warps"] * 32,
            constants={
                "N": p.n, "PARTS": p.parts, "K": p.k, "GROUP": p.group, "ZERO_POINT": p.zero_point, "TOKENS": tokens,
                "WARPS": s["warps"], "CHUNKS": s["chunks"], "SPLIT": s["split"], "CLUSTERS": clusters,
                "DEPTH": s["depth"], "RESIDENT": strips.registers(s), "NORMED": int(p.normed),
                "EPS": float(node.attrs.get("eps", 0.0)), "SCALE": p.scale,
                "OUT": CTYPES[node.result.type.dtype],
            },
            shared=_shared(p, s, target),
            sizes=(p.m,),
            cluster=(s["split"], 1, 1) if s["split"] > 1 else (),
            text=p.epilogue(),
        )  # fmt: skip


def _shared(p: FragmentProduct, s: Schedule, target: Target) -> int:
    """Bytes of shared memory of a block: what all strip products have, the sums of squares and of x."""
    columns = s["chunks"] * BLOCK
    entries = max(1, columns // p.group)
    slot = strips.STRIP * (columns // 2 + entries * (3 if p.node.attrs["zeros"] else 2))
    squares = (s["warps"] + 1) * s["tokens"] * 4 if p.normed else 0
    of_x = s["warps"] * entries * s["tokens"] * 4
    return int(strips.shared(p.n, p.parts, slot, s, target) + squares + of_x)


def _schedules(p: FragmentProduct, target: Target) -> Iterator[Schedule]:
    """Yield the divisions whose warps have whole groups of columns or parts of one, if they fit."""
    for s in strips.divisions(p.m, p.k):
        columns = s["chunks"] * BLOCK
        even = columns % p.group == 0 or p.group % columns == 0
        if even and strips.fits(_shared(p, s, target), s, target):
            yield s


SKINNY_GEMM = SkinnyGemm(
    "cuda/skinny_gemm",
    (PLAIN, PACKED, NORMED, NORMED_PACKED),
    file="llmc.codegen.backends.cuda.kernels:skinny_gemm.cu",
    entry="llmc_skinny_gemm",
    headers=(HOPPER, SCALAR_MATH, INT4_TO_BF16, STREAMING, STRIP_SUMS),
)
