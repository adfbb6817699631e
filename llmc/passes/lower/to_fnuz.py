"""Converts quantised tensors of 8-bit floats to those of AMD's CDNA 3, which have another format (fnuz)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.ir.qformat import QFormat
from llmc.passes.base import Ctx, Pass

OCP, FNUZ = "f8e4m3", "f8e4m3fnuz"
SOURCES = ("assemble", "quantize")  # ops that make quantised tensors
NARROW_SCALES = ("f16", "f8e8m0")  # dtypes of scales whose largest numbers cannot be doubled


@dataclass(frozen=True)
class ToFnuz(Pass):
    """Replace f8e4m3 by f8e4m3fnuz in quantised tensors, their codes and the activations that they are multiplied with.

    The exponent bias of fnuz is 8 instead of 7, so equal bits are half the number: codes keep their bits, except that
    -0, whose bits are NaN in fnuz, becomes 0, and scales are doubled (those of dtype f16 or f8e8m0 in float32). All
    numbers of a checkpoint are preserved exactly. Tensors that an earlier pass quantises are rounded to fnuz directly,
    whose largest number is 240. Run it before lower-quantized.
    """

    name: ClassVar[str] = "to-fnuz"

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every launched graph; return the number of changes."""
        return sum(_graph(g, ctx) for g in m.launched)


def _graph(g: Graph, ctx: Ctx) -> int:
    """Convert the tensors of a graph, all or none: some may be parts of one concatenation."""
    sources = {n: f for n in g.nodes if n.op.name in SOURCES and _has_ocp(f := n.result.type.format)}
    if not sources or not ctx.spend():
        return 0
    new: dict[Value, Value] = {}
    for n in list(g.nodes):
        operands = [new.get(v, v) for v in n.operands]
        if n in sources:
            new[n.result] = _converted(g, n, sources[n], ctx)
        elif operands != n.operands and n.results[0].type.format:
            new[n.result] = g.add(n.op, operands, n.attrs, before=n, loc=n.loc).result
        elif operands != n.operands:
            g.set_operands(n, operands)
    for old, value in reversed(new.items()):
        assert old.node is not None
        value.name = old.name
        g.erase(old.node)
    return len(sources)


def _has_ocp(f: QFormat | None) -> TypeGuard[QFormat]:
    return f is not None and OCP in (f.code, f.act)


def _converted(g: Graph, n: Node, f: QFormat, ctx: Ctx) -> Value:
    """Return the quantised tensor of `n` with the format converted."""
    b: Any = Builder(g, ctx.opset, before=n, loc=n.loc)
    attrs = {key: FNUZ if value == OCP else value for key, value in n.attrs.items()}
    operands = list(n.operands)
    if n.op.name == "assemble" and f.code == OCP:
        operands[:2] = b.fnuz_codes(operands[0]), _doubled(b, operands[1])
    return g.add(n.op, operands, attrs, before=n, loc=n.loc).result


def _doubled(b: Any, scale: Value) -> Value:
    """Return the scales of codes that stand for half the numbers."""
    if scale.type.dtype in NARROW_SCALES:
        scale = b.cast(scale, dtype="f32")
    return b.mul(scale, b.constant(2.0, scale.type.dtype))
