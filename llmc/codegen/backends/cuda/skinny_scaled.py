"""The binding of `kernels/skinny_scaled.cu`: few tokens times weights, both codes of 8 bits, which are read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmc.codegen.backends.cuda import strip_division as strips
from llmc.codegen.backends.cuda.cuda_epilogue import epilogue, reject_operands
from llmc.codegen.backends.cuda.cuda_kernel import (
    CTYPES,
    FLOATS,
    HOPPER,
    SCALAR_MATH,
    STREAMING,
    STRIP_SUMS,
    Binding,
    CudaKernel,
)
from llmc.codegen.kernel import Schedule
from llmc.codegen.product import ProductNode
from llmc.ir.graph import Node
from llmc.passes.analysis import Origin, origin
from llmc.targets.target import Target

CODES = ("f8e4m3", "i8")
MAX_PARTS = 2
MAX_COLUMNS = 1 << 16  # whose products have a sum below 2^31
# Assumed, as for codes of 4 bits: microseconds of a launch, and the share of the bandwidth that is reached.
_START, _SHARE = 3.0, 0.85


@dataclass(frozen=True)
class ScaledProduct(ProductNode):
    """y[m, n] = epilogue(x @ w_0.T, x @ w_1.T, others) of k columns, over codes."""

    n: int
    k: int

    @staticmethod
    def of(node: Node) -> ScaledProduct:
        """Read the problem from a node whose weight has constant sizes."""
        parts, w = node.attrs.get("parts", 1), node.operands[1].type
        return ScaledProduct(node, parts, int(w.shape[0]) // parts, int(w.shape[1]))

    def shared(self, s: Schedule, target: Target) -> int:
        """Bytes of shared memory of a block."""
        return strips.shared(self.n, self.parts, strips.STRIP * s["chunks"] * strips.BLOCK, s, target)


@dataclass(frozen=True)
class SkinnyScaled(CudaKernel):
    """linear and linear_map of few tokens over codes of e4m3 or i8, of one or two parts, on sm_90.

    More tokens than a tile read the weights again.
    """

    def reject(self, node: Node, target: Target) -> str | None:
        if target.family != "cuda" or target.arch != "sm_90" or target.has("interpret"):
            return f"{target.name} is not sm_90, for which the kernel is written"
        x, w = (v.type for v in node.operands[:2])
        if x.dtype not in CODES or w.dtype != x.dtype or w.format is not None:
            return f"factors of {x} and {w}; both must be {' or '.join(CODES)}"
        if node.result.type.dtype not in FLOATS:
            return f"a result of {node.result.type.dtype}"
        return _reject_sizes(node, target) or reject_operands(ScaledProduct.of(node).extras, node.result.type)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return list(_schedules(ScaledProduct.of(node), target))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: the strips of all blocks in whole rounds, read once for each tile of tokens."""
        p, s = ScaledProduct.of(node), schedule
        read = strips.units(p.n, p.parts, s, target) * strips.clusters(s, target) * strips.STRIP * strips.columns(s)
        tiles = -(-int(p.m.subs(env)) // s["tokens"])
        return float(tiles * read / (target.bandwidth * _SHARE) * 1e6 + _START)

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, s = ScaledProduct.of(node), schedule
        clusters = strips.clusters(s, target)
        return Binding(
            grid=(p.m.ceildiv(s["tokens"]) * (clusters * s["split"]),),
            threads=s["warps"] * 32,
            constants={
                "N": p.n, "PARTS": p.parts, "K": p.k, "TOKENS": s["tokens"], "WARPS": s["warps"],
                "CHUNKS": s["chunks"], "SPLIT": s["split"], "CLUSTERS": clusters, "DEPTH": s["depth"],
                "RESIDENT": strips.registers(s), "E4M3": int(p.x.dtype == "f8e4m3"),
                "OUT": CTYPES[node.result.type.dtype],
            },
            shared=p.shared(s, target),
            sizes=(p.m,),
            cluster=(s["split"], 1, 1) if s["split"] > 1 else (),
            text=epilogue(node.attrs.get("body", "a0"), p.parts, p.extras, node.result.type),
        )  # fmt: skip


def _reject_sizes(node: Node, target: Target) -> str | None:
    parts, (rows, k) = node.attrs.get("parts", 1), (d.const for d in node.operands[1].type.shape)
    if not 1 <= parts <= MAX_PARTS:
        return f"{parts} parts; the maximum is {MAX_PARTS}"
    if not rows or not k or rows % (strips.STRIP * parts) or k % strips.BLOCK or k > MAX_COLUMNS:
        sizes = f"constant multiples of {strips.STRIP * parts} and {strips.BLOCK}, and at most {MAX_COLUMNS} columns"
        return f"the weight's sizes {rows} x {k} are not {sizes}"
    p = ScaledProduct.of(node)
    if p.m.const is not None and p.m.const > strips.TOKENS[-1]:
        return f"{p.m} tokens; at most {strips.TOKENS[-1]} are supported"
    if origin(node.operands[1]) is Origin.INPUTS:
        return "the weight is not known before the previous kernel has completed"
    return None if list(_schedules(p, target)) else f"{p.k} columns"


def _schedules(p: ScaledProduct, target: Target) -> Iterator[Schedule]:
    """Yield the divisions that fit."""
    yield from (s for s in strips.divisions(p.m, p.k) if strips.fits(p.shared(s, target), s, target))


SKINNY_SCALED = SkinnyScaled(
    "cuda/skinny_scaled",
    ("linear", "linear_map"),
    opt_in=True,
    file="llmc.codegen.backends.cuda.kernels:skinny_scaled.cu",
    entry="llmc_skinny_scaled",
    headers=(HOPPER, SCALAR_MATH, STREAMING, STRIP_SUMS),
)
