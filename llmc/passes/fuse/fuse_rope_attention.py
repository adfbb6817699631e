"""Fuses decode attention with the launch before it, which rotates and appends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Graph, Module, Node, Value
from llmc.passes.analysis import made_by
from llmc.passes.base import Ctx, Pass, rejected
from llmc.passes.rewrite import substitute

NAME = "fuse-rope-attention"
KINDS = ("paged_attention", "paged_attention_split")
SLOTS = 4  # the result of row_begin with the slots; its third result is the positions, and its fifth operand the pages


@dataclass(frozen=True)
class FuseRopeAttention(Pass):
    """Fuse rope_append into the attention that reads its queries, in graphs of one token per row.

    Runs after `split-kv` and `fuse-rows`. A node without a kernel of the target stays as it is.
    """

    name: ClassVar[str] = NAME

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every graph; return the number of changes."""
        return sum(self._fuse(g, n, ctx) for g, n in m.find(*KINDS))

    def _fuse(self, g: Graph, n: Node, ctx: Ctx) -> bool:
        append = n.operands[0].node
        if append is None or append.op.name != "rope_append" or not g.name.startswith("decode") or not ctx.allows(n):
            return False
        if why := _why_not(n, append):
            ctx.miss(NAME, n, why)
            return False
        return ctx.spend() and _replace(g, n, append, ctx)


def _operand(n: Node, name: str) -> Value:
    found = n.operand(name)
    assert found is not None
    return found


def _why_not(n: Node, append: Node) -> str | None:
    """Return why the attention `n` cannot do what `append` does, or None."""
    queries, appended = append.results
    if _operand(n, "q") is not queries or len(queries.uses) != 1 or _operand(n, "kv") is not appended:
        return "other nodes read the queries, or its pool is not the one that they are appended to"
    pages, rows, positions = (_operand(n, name) for name in ("pages", "rows", "positions"))
    if positions.type.shape != rows.type.shape:
        return "rows have several tokens"
    if n.operand("sinks") is not None:
        return "it has sinks"
    begin = made_by(_operand(append, "slots"), "row_begin")
    if begin is None:
        return "the slots are not those of row_begin"
    if begin.results[SLOTS] is not append.operand("slots") or begin.results[2] is not positions:
        return "the slots are not those of its positions"
    return None if begin.operands[4] is pages and begin.operands[0] is rows else "the slots are not those of its pages"


def _replace(g: Graph, n: Node, append: Node, ctx: Ctx) -> bool:
    """Replace both nodes by one; leave them if no kernel of the target supports it."""
    step = (_operand(n, name) for name in ("pages", "rows", "positions"))
    rest = (append.operand(name) for name in ("scales", "cos", "sin", "qw", "kw"))
    attrs = {**append.attrs, **{k: v for k, v in n.attrs.items() if k in ("scale", "window", "softcap", "splits")}}
    op = ctx.opset["rope_attention_split" if "splits" in n.attrs else "rope_attention"]
    operands = [_operand(append, "x"), _operand(append, "kv"), *step, *(v for v in rest if v is not None)]
    new = g.add(op, operands, attrs, before=n, loc=n.loc)
    if why := rejected(new, ctx):
        g.erase(new)
        ctx.miss(NAME, n, why)
        return False
    appended = append.results[1]
    substitute(g, n, new.results[:-1], NAME)
    new.results[-1].name = appended.name
    g.replace(appended, new.results[-1])
    g.erase(append)
    return True
