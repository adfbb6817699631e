"""Rules that move transposes past ops on the last axis, so that pairs of transposes cancel."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.ir.graph import Node, Value
from llmc.passes.analysis import made_by
from llmc.passes.canonicalize.shape_rules import axis_of
from llmc.passes.rewrite import Build, Simplify


def _last_stays(t: Node) -> bool:
    """Whether a transpose leaves the last axis in its place."""
    perm: Sequence[int] = t.attrs["perm"]
    return perm[-1] == len(perm) - 1


def _norm(n: Node) -> Build | None:
    """norm(transpose(x)) -> transpose(norm(x)), if only the norm reads the transpose."""
    t = made_by(n.operands[0], "transpose")
    if t is None or not _last_stays(t) or len(t.result.uses) != 1:
        return None
    operands = [t.operands[0], *n.operands[1:]]
    return lambda b: b.transpose(b.emit(n.op, operands, n.attrs), perm=t.attrs["perm"])


def _slice(n: Node) -> Build | None:
    """slice(transpose(x)) -> transpose(slice(x)), along the last axis."""
    t = made_by(n.operands[0], "transpose")
    if t is None or not _last_stays(t) or axis_of(n) != n.result.type.rank - 1:
        return None
    return lambda b: b.transpose(b.emit(n.op, t.operands, n.attrs), perm=t.attrs["perm"])


def _concat(n: Node) -> Build | None:
    """concat(transpose(x), transpose(y)) -> transpose(concat(x, y)), if all permutations are equal."""
    transposed = [t for v in n.operands if (t := made_by(v, "transpose"))]
    if len(transposed) < len(n.operands) or len({t.attrs["perm"] for t in transposed}) != 1:
        return None
    perm, operands = transposed[0].attrs["perm"], [t.operands[0] for t in transposed]
    axis = perm[axis_of(n)]
    return lambda b: b.transpose(b.concat(*operands, axis=axis), perm=perm)


def _scaled(n: Node) -> Build | None:
    """transpose(x) * c -> transpose(x * c), for a scalar c, if only the product reads the transpose."""
    for v, c in (n.operands, n.operands[::-1]):
        t = made_by(v, "transpose")
        if t and c.type.rank == 0 and len(v.uses) == 1 and n.result.type == v.type:
            return _scaled_below(n, t, c)
    return None


def _scaled_below(n: Node, t: Node, c: Value) -> Build:
    return lambda b: b.transpose(b.mul(t.operands[0], c), perm=t.attrs["perm"])


SINKS = (
    Simplify("sink-norm", ("rms_norm", "layer_norm"), _norm),
    Simplify("sink-slice", ("slice",), _slice),
    Simplify("sink-concat", ("concat",), _concat),
    Simplify("sink-scale", ("mul",), _scaled),
)
