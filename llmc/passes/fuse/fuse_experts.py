"""Fuses the small ops around the experts of a mixture: the choice of experts, and the sum of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Builder, Graph, Node, Value
from llmc.ir.scalar import E, arg, call, substitute
from llmc.passes.analysis import const_value
from llmc.passes.base import Ctx, Pass
from llmc.passes.fuse.fuse_pointwise import expression
from llmc.passes.rewrite import Match, Pat, Rewrite, apply, through

NAME = "fuse-experts"
MAX_COLUMNS, MAX_K = 4096, 64  # maximum sizes of a row that one program keeps in registers
p = Pat()
TOTAL = p.sum(p.y, axis=1, keepdim=False)


def _of_experts(m: Match) -> str | None:
    """Return None if the sum is over a token's experts, else the reason."""
    y: Value = m["y"]
    producer = y.node.op.name if y.node else "an input"
    return None if producer.endswith("moe_down") else f"the sum is over the results of {producer}, not of experts"


def _added(m: Match) -> str | None:
    """Return None if the sum over a token's experts is added to a value of its own shape, else the reason."""
    y, r = m["y"].type, m["r"].type
    if r.shape != (y.shape[0], y.shape[2]):
        return f"the other operand is {r}, the sum is over {y}"
    return _of_experts(m)


ADD = Rewrite("combine-add", p.add(through(TOTAL), p.r), lambda b, m: b.moe_combine(m["y"], m["r"]), _added)
CAST = Rewrite(
    "combine", p.cast(TOTAL, dtype=p.dtype), lambda b, m: b.moe_combine(m["y"], dtype=m["dtype"]), _of_experts
)


@dataclass(frozen=True)
class FuseExperts(Pass):
    """Replace topk and the row ops around it by topk_map, and the sum of a token's experts by moe_combine.

    topk_map also computes the row op before topk, such as a softmax of the router's logits, if it has one operand; the
    row op after topk, such as the normalisation of the chosen scores; and casts of the indices to i32. In graphs of one
    token, topk_route also sorts the pairs. moe_combine includes a cast and the addition of a residual. The terms of its
    sum are rounded to the dtype of the experts' other activations, which halves the bytes between the two kernels. The
    pass runs after `split-moe`.

    route: whether to make topk_route.
    """

    route: bool = True
    name: ClassVar[str] = NAME

    def graph(self, g: Graph, ctx: Ctx) -> int:
        """Replace the nodes of a graph; return the number of changes."""
        topk_nodes = [n for n in g.nodes if n.op.name == "topk"]
        done = sum(_fuse_topk(g, n, ctx) for n in topk_nodes)
        routes = [n for n in g.nodes if n.op.name == "moe_route"] if self.route else []
        done += sum(_fuse_route(g, n, ctx) for n in routes)
        done += apply(g, (ADD,), ctx) + apply(g, (CAST,), ctx)
        for n in [n for n in g.nodes if n.op.name == "moe_down"]:
            _round(g, n, ctx)
        return done


def _round(g: Graph, n: Node, ctx: Ctx) -> None:
    """Round the terms of a moe_combine to the dtype of the rows of its moe_down."""
    dtype = n.operands[0].type.dtype
    summed = all(u.op.name == "moe_combine" for u in n.result.uses) and n.result not in g.outputs
    if n.result.type.dtype == dtype or not summed:
        return
    b = Builder(g, ctx.opset, before=n, loc=n.loc)
    g.replace(n.result, b.moe_down(*n.operands, dtype=dtype))
    g.erase(n)


def _fuse_topk(g: Graph, n: Node, ctx: Ctx) -> bool:
    """Replace a topk, or record why it remains; return whether it was replaced."""
    casts = list(dict.fromkeys(n.results[1].uses))
    if not ctx.allows(n):
        return False
    if why := _why_not(g, n, casts):
        ctx.miss(NAME, n, why)
        return False
    if not ctx.spend():
        return False
    x, before, first = _before(g, n)
    last, after, erased = _after(g, n)
    b = Builder(g, ctx.opset, before=n, loc=n.loc)
    dtype = "" if last.type.dtype == x.type.dtype else last.type.dtype
    values, indices = b.topk_map(x, k=n.attrs["k"], before=str(before), after=str(after), dtype=dtype)
    g.replace(last, values)
    for c in casts:
        g.replace(c.result, indices)
    for old in (*casts, *erased, n, *first):
        g.erase(old)
    return True


def _fuse_route(g: Graph, n: Node, ctx: Ctx) -> bool:
    """Replace the topk_map of one token and its moe_route by topk_route; return whether they were replaced."""
    indices = n.operands[0]
    topk = indices.node
    if topk is None or topk.op.name != "topk_map" or not ctx.allows(n):
        return False
    x = topk.operands[0].type
    is_only_reader = len(indices.uses) == 1 and indices not in g.outputs
    chooses_from_all = [d.const for d in x.shape] == [1, n.attrs["experts"]]
    if not is_only_reader or not chooses_from_all or not ctx.spend():
        return False
    b = Builder(g, ctx.opset, before=topk, loc=topk.loc)
    values, order, starts = b.topk_route(*topk.operands, **topk.attrs)
    for old, new in ((n.results[0], order), (n.results[1], starts), (topk.results[0], values)):
        g.replace(old, new)
    g.erase(n)
    g.erase(topk)
    return True


def _why_not(g: Graph, n: Node, casts: Sequence[Node]) -> str | None:
    """Return the reason why a topk cannot be part of a topk_map, or None."""
    columns, k = n.operands[0].type.shape[-1].const, n.attrs["k"]
    if columns is None or columns > MAX_COLUMNS or k > MAX_K:
        return f"it selects {k} of {n.operands[0].type.shape[-1]} elements; at most {MAX_K} of {MAX_COLUMNS}"
    if n.results[1] in g.outputs:
        return "its indices are a result of the graph"
    others = [u for u in casts if u.op.name != "cast" or u.result.type.dtype != "i32"]
    return f"{others[0].op.name} reads its indices; only casts to i32 may" if others else None


def _before(g: Graph, n: Node) -> tuple[Value, E, list[Node]]:
    """Return the replacement's operand, the expression of its rows that topk reads, and the nodes replaced."""
    x = n.operands[0]
    producer = x.node
    if producer is None or len(set(x.uses)) > 1 or x in g.outputs:
        return x, arg(0), []
    e = _row_expression(producer, [v for v in producer.operands if const_value(v) is None][:1])
    source = next((v for v in producer.operands if const_value(v) is None), x)
    if e is None or source.type.shape != x.type.shape:
        return x, arg(0), []
    return source, e, [producer]


def _after(g: Graph, n: Node) -> tuple[Value, E, list[Node]]:
    """Return the value that the replacement computes, as an expression of the selected ones, and the nodes replaced."""
    values = n.results[0]
    users = list(dict.fromkeys(values.uses))
    sums = [u for u in users if _is_row_sum(u)]
    others = list(dict.fromkeys([*(u for u in users if u not in sums), *(r for s in sums for r in s.result.uses)]))
    selected = [values, *(s.result for s in sums)]
    if len(others) != 1 or any(v in g.outputs for v in selected):
        return values, arg(0), []
    (last,) = others
    e = _row_expression(last, selected)
    if e is None or last.result.type.shape != values.type.shape:
        return values, arg(0), []
    return last.result, e, [last, *sums]


def _is_row_sum(n: Node) -> bool:
    """Whether a node is the sum of the last axis, which stays as an axis of size 1."""
    rank = n.operands[0].type.rank
    return n.op.name == "sum" and n.attrs["keepdim"] and n.attrs["axis"] % rank == rank - 1


def _row_expression(n: Node, known: Sequence[Value]) -> E | None:
    """Return a node as an expression of known[0] and its row sums, the other known values; None if it is not one."""
    e = expression(n)
    if e is None:
        return None
    operands: list[E] = []
    for v in n.operands:
        value = const_value(v)
        at = next((i for i, o in enumerate(known) if o is v), None)
        if value is None and at is None:
            return None
        if value is not None:
            operands.append(E("const", (value,)))
        else:
            operands.append(call("row_sum", arg(0)) if at else arg(0))
    return substitute(e, operands)
