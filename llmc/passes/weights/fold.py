"""Folds scalar factors into weights, norm gains and the attention scale. Quantised weights are left unchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.ir.graph import Graph, Node, Value
from llmc.passes.analysis import Origin, const_value, made_by, origin
from llmc.passes.base import Ctx, Pass
from llmc.passes.rewrite import Build, Match, Pat, Rewrite, Rule, Simplify, apply, const, through

p = Pat()
MOVES = ("transpose", "reshape", "rope", "cast")


def _power_of_two(c: float) -> bool:
    return c != 0 and math.isfinite(c) and math.frexp(abs(c))[0] == 0.5


def _into_weight(m: Match) -> str | None:
    """Return None if the factor can be folded into the weight, else the reason."""
    w, c = m["w"], m["c"]
    if w.type.format is not None:
        return f"the weight is quantised ({w.type.format.name})"
    if origin(w) is Origin.INPUTS:
        return "the second operand is not a weight"
    if w.type.dtype not in ("f32", "f64") and not _power_of_two(c):
        return f"{w.type.dtype} cannot hold the weight times {c:g} exactly"
    if m.root.result.type.dtype != m["x"].type.dtype:
        return f"its result is {m.root.result.type.dtype}"
    return None


def _into_gain(m: Match) -> str | None:
    """Return None if the factor can be folded into the norm's gain, which is float32, else the reason."""
    same = m.root.result.type.dtype == m["x"].type.dtype
    return None if same else f"its result is {m.root.result.type.dtype}"


def _scaled(b: Any, w: Value, c: float, dtype: str) -> Value:
    """Return `w` times `c`, computed and stored in `dtype`."""
    w = w if w.type.dtype == dtype else b.cast(w, dtype=dtype)
    return b.mul(w, b.constant(c, dtype))


RULES: tuple[Rule, ...] = (
    Rewrite(
        "scale-weight",
        p.mul(p.linear(p.x, p.w), const("c")),
        lambda b, m: b.linear(m["x"], _scaled(b, m["w"], m["c"], m["w"].type.dtype)),
        _into_weight,
        near=2,
    ),
    Rewrite(
        "scale-gain",
        p.mul(through(p.rms_norm(p.x, p.w, eps=p.eps)), const("c")),
        lambda b, m: b.rms_norm(m["x"], _scaled(b, m["w"], m["c"], "f32"), eps=m["eps"]),
        _into_gain,
        near=2,
    ),
)


def _scale_of(v: Value) -> tuple[float, list[Node], Node] | None:
    """Return (factor, moves, mul) if the query or key is a scaled value with no other readers."""
    moves: list[Node] = []
    while (n := made_by(v, *MOVES)) and len(v.uses) == 1:
        moves.append(n)
        v = n.operands[0]
    n = made_by(v, "mul")
    if n is None or len(v.uses) != 1:
        return None
    for x, c in (n.operands, n.operands[::-1]):
        value = const_value(c)
        if value and math.isfinite(value) and x.type == v.type:
            return value, moves, n
    return None


def _attention(n: Node) -> Build | None:
    """attention(c*q, k) -> attention(q, k) with c in its scale, also if q is moved or rotated in between."""
    sides = (0, 1) if n.op.name in ("attention", "alibi_attention") else (0,)
    return next((build for i in sides if (build := _scaled_side(n, i))), None)


def _scaled_side(n: Node, index: int) -> Build | None:
    """Build the attention on the unscaled operand, repeating the moves in between."""
    scaling = _scale_of(n.operands[index])
    if scaling is None:
        return None
    factor, moves, mul = scaling
    source = mul.operands[0] if const_value(mul.operands[1]) is not None else mul.operands[1]

    def build(b: Any) -> Value:
        v = source
        for move in reversed(moves):
            v = b.emit(move.op, (v, *move.operands[1:]), move.attrs)
        operands = [*n.operands[:index], v, *n.operands[index + 1 :]]
        return b.emit(n.op, operands, {**n.attrs, "scale": n.attrs["scale"] * factor})

    return build


ATTENTION = Simplify(
    "scale-attention", ("attention", "paged_attention", "alibi_attention", "paged_alibi_attention"), _attention
)


@dataclass(frozen=True)
class Fold(Pass):
    """Fold scalar factors of queries and keys, norms and products.

    They go into the attention scale, the norm's gain and the product's weight. A weight is scaled only if its dtype
    represents the result exactly; quantised weights never are.
    """

    name: ClassVar[str] = "fold"

    def graph(self, g: Graph, ctx: Ctx) -> int:
        """Fold the factors of one graph; return the number of changes."""
        return apply(g, (ATTENTION,), ctx) + apply(g, RULES, ctx)
