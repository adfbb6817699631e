"""Rewrites what follows a recurrence so that its heads divide over ranks.

Heads get an axis of their own, and norms over the channels of several heads add up squares, a sum that ranks can
complete.
"""

from __future__ import annotations

from llmc.ir.dim import Dim
from llmc.ir.graph import Builder, Graph, Node, Value
from llmc.passes.base import Ctx
from llmc.passes.lower.shard_rules import RECURRENCES, is_elementwise, recurrence_of


def divide_heads(g: Graph, ranks: int, ctx: Ctx) -> int:
    """Rewrite what follows the recurrences whose heads divide over the ranks; return the number of changes."""
    recurrences = [n for n in g.nodes if n.op.name in RECURRENCES and ctx.allows(n) and recurrence_of(n, ranks)]
    if not recurrences:
        return 0
    done = _separate_heads(g, ctx)
    for n in recurrences:
        size = n.results[0].type.shape[2]
        for norm in _norms_after(n.results[0]):
            if norm.operands[1].type.shape[0] != size:
                _open_norm(g, norm, ctx)
                done += 1
    return done


def _separate_heads(g: Graph, ctx: Ctx) -> int:
    """Give the values of shape [heads * tokens, channels] the shape [tokens, heads, channels]; return how many did."""
    divided: dict[Value, Value] = {}
    for n in list(g.nodes):
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        heads = _merged_heads(n) if n.op.name == "reshape" and n.operands[0] not in divided else None
        if heads is not None:
            x = n.operands[0]
            divided[n.result] = b.reshape(x, shape=(x.type.shape[0], heads, n.result.type.shape[1]))
        elif any(v in divided for v in n.operands):
            _read_divided(b, n, divided)
    for n in reversed(list(g.nodes)):
        if any(v in divided for v in (*n.operands, *n.results)) and not g.is_used(n):
            g.erase(n)
    return len(divided)


def _read_divided(b: Builder, n: Node, divided: dict[Value, Value]) -> None:
    """Let a node read divided values: as they are, if it computes each row or element by itself, else merged again."""
    by_row = is_elementwise(n) or n.op.row_wise
    if n.op.name == "reshape":
        b.graph.replace(n.result, b.reshape(divided[n.operands[0]], shape=n.attrs["shape"]))
    elif by_row and len(n.results) == 1 and all(v in divided or v.type.rank < 2 for v in n.operands):
        divided[n.result] = b.emit(n.op, [divided.get(v, v) for v in n.operands], n.attrs)
    else:
        merged = [b.reshape(divided[v], shape=v.type.shape) if v in divided else v for v in n.operands]
        b.graph.set_operands(n, merged)


def _merged_heads(n: Node) -> Dim | None:
    """Return the number of heads that a reshape merges with the tokens; None if it does not."""
    x, shape = n.operands[0].type, n.result.type.shape
    if len(shape) != 2 or x.shape[0].const is not None or shape[0] == x.shape[0]:
        return None
    heads = x.numel.divide(x.shape[0] * shape[1])
    return heads if heads is not None and shape[0] == x.shape[0] * heads else None


def _norms_after(v: Value) -> list[Node]:
    """Return the norms that a value reaches through reshapes and ops on elements."""
    norms, seen, work = list[Node](), set[Node](), list(v.uses)
    while work:
        n = work.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.op.name == "rms_norm":
            norms.append(n)
        elif is_elementwise(n) or n.op.name == "reshape":
            work += n.result.uses
    return norms


def _open_norm(g: Graph, n: Node, ctx: Ctx) -> None:
    """Compute an rms_norm in single ops, rounded once as before."""
    b = Builder(g, ctx.opset, before=n, loc=n.loc)
    (x, w), dtype = n.operands, n.result.type.dtype
    if dtype != "f32":
        x = b.cast(x, dtype="f32")
    if w.type.dtype != "f32":
        w = b.cast(w, dtype="f32")
    total = b.sum(b.square(x), axis=-1, keepdim=True)
    mean = b.mul(total, b.constant(1 / int(w.type.shape[0]), "f32"))
    scale = b.rsqrt(b.add(mean, b.constant(n.attrs["eps"], "f32")))
    normed: Value = b.mul(b.mul(x, scale), w)
    g.replace_node(n, normed if dtype == "f32" else b.cast(normed, dtype=dtype))
