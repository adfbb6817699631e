"""Common subexpression elimination, by structural equality."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.ir.graph import Graph, Node
from llmc.passes.base import Ctx, Pass


@dataclass(frozen=True)
class Cse(Pass):
    """Merge equal nodes. This is sound for states because a version has one writer, so two reads of it are equal."""

    name: ClassVar[str] = "cse"

    def graph(self, g: Graph, ctx: Ctx) -> int:
        """Merge the equal nodes of a graph; return the number of nodes that are removed."""
        done = 0
        seen: dict[Hashable, Node] = {}
        for n in g.nodes:
            if n.op.writes:
                continue
            first = seen.setdefault(_key(n), n)
            if first is n or not ctx.allows(n):
                continue
            if not ctx.spend():
                return done
            for a, b in zip(n.results, first.results, strict=True):
                g.replace(a, b)
            g.erase(n)
            done += 1
        return done


def _key(n: Node) -> Hashable:
    operands = [id(v) for v in n.operands]
    if n.op.commutes and len(operands) == 2:
        operands.sort()
    return n.op.name, tuple(operands), tuple(_frozen(v) for v in n.attrs.values()), tuple(n.choice.items())


def _frozen(value: Any) -> Hashable:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
