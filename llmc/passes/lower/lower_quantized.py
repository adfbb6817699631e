"""Replaces quantised tensors by their parts: codes, scales and zero points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.ir.ops.quantize import FLOAT_CODES
from llmc.ir.ops.quantized_linear import multiplies_codes, multiplies_tiles
from llmc.ir.qformat import QFormat
from llmc.passes.base import Ctx, Pass, rejected, rejections
from llmc.passes.fuse.fuse_linear import PRODUCTS
from llmc.passes.lower.round_activations import Rounded, product_of_codes, product_of_experts, product_of_tiles

MOVES = ("slice", "concat")  # ops that move the parts of a quantised tensor as they move the tensor
EXPERTS = ("moe_up", "moe_down")
# The index of the weight among the operands, by op.
WEIGHT: Mapping[str, int] = MappingProxyType({**dict.fromkeys(PRODUCTS, 1), **dict.fromkeys(EXPERTS, 3)})
SCALE_DTYPE = "bf16"  # the dtype to which f8e8m0 scales are converted in products; it represents every power of two


@dataclass(frozen=True)
class LowerQuantized(Pass):
    """Replace quantised tensors by their parts, and products that read them by products over the parts.

    If a format allows activations to be rounded to the dtype of its codes, activations are quantised, too (see
    `round_activations`), and codes are multiplied by codes: by linear_map if each row of the weight has one scale, by
    block_scaled_linear if blocks of columns have one, and for experts by scaled_moe_up and scaled_moe_down. Other
    products become quantized_linear; those of experts become quantized_moe_up and quantized_moe_down. A product that no
    kernel of the target supports, and any other reader, gets the dequantised weight.

    act: the dtype to which quantized_linear, quantized_moe_up and quantized_moe_down round activations, even if the
      format does not name one; empty for none. Experts with 8-bit float codes do not round activations, nor do products
      that no kernel supports with rounded activations.
    act_block: columns of an activation that share a scale if the weight has one scale per row. Otherwise these are the
      columns of the weight's blocks.
    fallback: if false, products become quantized_linear whether or not the target has a kernel.
    """

    name: ClassVar[str] = "lower-quantized"
    act: str = ""
    act_block: int = 0
    fallback: bool = True

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every launched graph; return the number of changes."""
        refused: Counter[tuple[str, str]] = Counter()
        done = sum(self._graph(g, ctx, refused) for g in m.launched)
        for (name, why), count in refused.items():
            ctx.notes[f"{count} products with weights in {name} use dequantised weights: {why}"] = None
        return done

    def _graph(self, g: Graph, ctx: Ctx, refused: Counter[tuple[str, str]]) -> int:
        """Lower the readers of quantised values; count in `refused` why products got the dequantised weight."""
        parts, rounded = _Parts(g, ctx), Rounded(g, ctx)
        count = 0
        for n in list(g.nodes):
            if n.op.name in MOVES or not any(v.type.format for v in n.operands):
                continue
            count += 1
            place = WEIGHT.get(n.op.name)
            f = None if place is None else n.operands[place].type.format
            if f and ctx.allows(n) and ctx.spend():
                why = self._lower(g, n, parts, rounded, ctx)
                if why is None:
                    continue
                refused[f.name, why] += 1
            g.set_operands(n, [parts.dequantized(v, n) if v.type.format else v for v in n.operands])
        for n in reversed(list(g.nodes)):
            if n.results[0].type.format and not g.is_used(n):
                g.erase(n)
        return count

    def _lower(self, g: Graph, n: Node, parts: _Parts, rounded: Rounded, ctx: Ctx) -> str | None:
        """Replace a product by one over codes; return the reason if no kernel of the target supports it."""
        reasons = [] if self.act else self._codes(g, n, parts, rounded, ctx)
        if reasons is None:
            return None
        why = (self._experts if n.op.name in EXPERTS else self._product)(g, n, parts, ctx)
        if why is None:
            return None
        return "; ".join([*reasons, why])

    @staticmethod
    def _codes(g: Graph, n: Node, parts: _Parts, rounded: Rounded, ctx: Ctx) -> list[str] | None:
        """Replace a product by one of quantised activations and weights, and return None if that succeeds.

        Otherwise return the reasons of the kernels that reject it; none, if the format does not permit such products.
        """
        x, w = n.operands[0], n.operands[WEIGHT[n.op.name]]
        f = w.type.format
        assert f is not None
        tiled, group = multiplies_tiles(f), f.block[1]
        if not (tiled or multiplies_codes(f)) or ctx.target is None:
            return []
        if tiled and not w.type.shape[-1].divisible(group):
            return [f"{w.type.shape[-1]} columns are not a multiple of {group}"]
        code, scale = parts.of(w, n)
        codes, x_scale = rounded.of(x, f.act, group if tiled else 0, n)
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        if n.op.name in EXPERTS:
            new = product_of_experts(b, n, (codes, code), (x_scale, scale), f.block)
        elif tiled:
            new = product_of_tiles(b, n, (codes, code), (x_scale, scale), f.block)
        else:
            new = product_of_codes(b, n, (codes, code), scale, x_scale)
        assert new.node is not None and codes.node is not None
        for node in (new.node, codes.node):
            if (why := rejections(node, ctx)) is not None:
                g.erase(new.node)
                rounded.drop(codes)
                return why
        g.replace_node(n, new)
        return None

    def _product(self, g: Graph, n: Node, parts: _Parts, ctx: Ctx) -> str | None:
        """Replace a product by quantized_linear; return the reason if no kernel of the target supports that."""
        x, w, *extras = n.operands
        f = w.type.format
        assert f is not None
        if f.values:
            return f"codes of {f.code}; only products of experts read them"
        code, scale, *zeros = parts.of(w, n)
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        new = b.quantized_linear(
            x, code, scale, *zeros, *extras, block=f.block, zero_point=f.zero_point, zeros=f.has_zeros, act=self.act,
            act_block=f.block[1] or self.act_block if self.act else 0, parts=n.attrs.get("parts", 1),
            body=n.attrs.get("body", "a0"), dtype=n.attrs.get("dtype", ""), bits=DTYPES[f.code].bits,
        )  # fmt: skip
        if self.fallback and (why := rejected(new.node, ctx)):
            g.erase(new.node)
            return why
        g.replace_node(n, new)
        return None

    def _experts(self, g: Graph, n: Node, parts: _Parts, ctx: Ctx) -> str | None:
        """Replace a product of experts by one over codes; return the reason if no kernel of the target supports it."""
        x, order, starts, w, *rest = n.operands
        f = w.type.format
        assert f is not None
        weights, bias = ([], rest) if n.op.name == "moe_up" else (rest[:1], rest[1:])
        code, scale, *zeros = parts.of(w, n)
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        if scale.type.dtype == "f8e8m0":
            scale = b.cast(scale, dtype=SCALE_DTYPE)
        attrs = {
            **n.attrs, "block": f.block, "zero_point": f.zero_point, "zeros": f.has_zeros, "values": f.values,
            "bits": DTYPES[f.code].bits,
        }  # fmt: skip
        operands = (x, order, starts, code, scale, *weights, *zeros, *bias)
        refused = None
        for act in dict.fromkeys(("" if f.code in FLOAT_CODES else self.act, "")):
            attrs |= {"act": act, "act_block": f.block[1] or self.act_block if act else 0}
            new = g.add(ctx.opset[f"quantized_{n.op.name}"], operands, attrs, before=n, loc=n.loc)
            if self.fallback and (why := rejected(new, ctx)):
                g.erase(new)
                refused = refused or why
                continue
            g.replace_node(n, new.result)
            return None
        return refused


class _Parts:
    """The parts of a graph's quantised values, each made once."""

    def __init__(self, g: Graph, ctx: Ctx) -> None:
        self.g, self.ctx = g, ctx
        self.known: dict[Value, tuple[Value, ...]] = {}
        self.floats: dict[Value, Value] = {}

    def of(self, v: Value, before: Node) -> tuple[Value, ...]:
        """Return codes, scales and, if there are any, zero points."""
        if v not in self.known:
            self.known[v] = self._make(v, before)
        return self.known[v]

    def dequantized(self, v: Value, before: Node) -> Value:
        """Return the numbers in the logical dtype."""
        if v not in self.floats:
            f = v.type.format
            assert f is not None
            parts = self.of(v, before)
            b = Builder(self.g, self.ctx.opset, before=before, loc=before.loc)
            wide = b.dequantize(*parts, block=f.block, dtype="f32", zero_point=f.zero_point, values=f.values)
            self.floats[v] = wide if v.type.dtype == "f32" else b.cast(wide, dtype=v.type.dtype)
        return self.floats[v]

    def _make(self, v: Value, before: Node) -> tuple[Value, ...]:
        """Return the parts of a quantised value: those of `assemble` or `quantize`, or moved as the value is."""
        n, f = v.node, v.type.format
        assert f is not None
        if n is None:
            cause = f"the input %{v.name} is {v.type}, whose parts are not known"
            raise Diagnostic("E436", cause, "make inputs of its parts, and the tensor by the op assemble")
        b = Builder(self.g, self.ctx.opset, before=before, loc=n.loc)
        if n.op.name == "assemble":
            return tuple(n.operands)
        if n.op.name == "quantize":
            scale = b.quantize_scale(n.operands[0], code=f.code, block=f.block, dtype=f.scale)
            code = b.quantize_code(n.operands[0], scale, code=f.code, block=f.block, zero_point=f.zero_point)
            return code, scale
        inner = [self.of(o, before) for o in n.operands]
        if n.op.name == "concat":
            return tuple(b.concat(*column, axis=n.attrs["axis"]) for column in zip(*inner, strict=True))
        return tuple(self._sliced(b, p, v, n, f, i) for i, p in enumerate(inner[0]))

    @staticmethod
    def _sliced(b: Any, part: Value, v: Value, n: Node, f: QFormat, index: int) -> Value:
        """Return the part of a slice: codes (index 0) are cut as the tensor is, scales and zero points at blocks."""
        axis = n.attrs["axis"] % v.type.rank
        blocks = (1,) * (v.type.rank - 2) + f.block
        size = blocks[axis] if index else 1
        ends = [n.attrs["start"], n.attrs["stop"]]
        if size == 0:  # a block spans the axis
            return part
        start, stop = ends if size == 1 else [d.ceildiv(size) for d in ends]
        return b.slice(part, axis=axis, start=start, stop=stop, step=n.attrs["step"])
