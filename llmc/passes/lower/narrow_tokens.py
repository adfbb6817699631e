"""Skips the work of tokens whose results nothing reads: in a model's last layer, all but the last one of each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.ir.dim import D
from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.ir.token_axes import TOKENS, mixing_of, token_axes
from llmc.passes.analysis import made_by
from llmc.passes.base import Ctx, Pass
from llmc.passes.lower.specialize import with_sizes
from llmc.passes.rewrite import substitute

_PAGED = ("paged_attention", "paged_alibi_attention", "paged_latent_attention")


@dataclass(frozen=True)
class NarrowTokens(Pass):
    """Compute values only for the tokens that a graph reads, if these are one per entry.

    In @step, this applies to everything after the keys and values of the last layer: its attention, whose queries are
    then single tokens, its output projection, its MLP or experts, and the final norm.

    The tokens are selected by a `take` whose indices row_last or row_first computes. Each of these takes moves up as
    long as a token's result depends only on that token. If other nodes also read a value, such as the residual before
    the last layer, the take stays after it. The pass runs after `specialize`.

    above: graphs of at most that many tokens remain as they are, because reading the weights takes the same time for
    all of their tokens, and each take is a launch of its own.
    """

    name: ClassVar[str] = "narrow-tokens"
    above: int = 0

    def run(self, m: Module, ctx: Ctx) -> int:
        """Move the takes of every graph; return the number of nodes that compute fewer tokens."""
        return sum(self._graph(g, ctx) for g in m.launched if m.bounds(g).get(TOKENS, (0, 0))[1] > self.above)

    def _graph(self, g: Graph, ctx: Ctx) -> int:
        takes = [n for n in g.nodes if n.op.name == "take" and made_by(n.operands[1], "row_last", "row_first")]
        return sum(_Narrowing(g, n, ctx).run() for n in takes if token_axes(n.operands[0].type) == [0])


class _Narrowing:
    """What one take reads, of which every entry needs a single token."""

    def __init__(self, g: Graph, take: Node, ctx: Ctx):
        self.g, self.take, self.ctx = g, take, ctx
        self.index = take.operands[1]
        self.entries = self.index.type.shape[0]
        self.narrowed: dict[Value, Value] = {}  # value of all tokens -> the same of one token per entry
        self.starts: Value | None = None  # the starts that row_spans returns if each entry has one token

    def run(self) -> int:
        """Move the take up; return the number of nodes that compute fewer tokens."""
        nodes = self._nodes()
        if not nodes or not self.ctx.spend():
            return 0
        for n in nodes:
            self._narrow(n)
        result = self.narrowed[self.take.operands[0]]
        result.name = self.take.result.name or result.name
        substitute(self.g, self.take, [result], NarrowTokens.name)
        return len(nodes)

    def _nodes(self) -> list[Node]:
        """Return the nodes of which only `take` reads results, directly or through others of these nodes, in order."""
        nodes: set[Node] = set()
        for n in reversed(list(self.g.nodes)):
            if self._only_read_by(n, nodes) and self.ctx.allows(n) and _narrows(n):
                nodes.add(n)
        return [n for n in self.g.nodes if n in nodes]

    def _only_read_by(self, n: Node, nodes: set[Node]) -> bool:
        return all(
            r not in self.g.outputs and r.uses and all(u in nodes or u is self.take for u in r.uses) for r in n.results
        )

    def _narrow(self, n: Node) -> None:
        """Add a copy of a node that computes one token per entry."""
        b = Builder(self.g, self.ctx.opset, before=n, loc=n.loc)
        changed: dict[str, Value] = {}
        if n.op.name in _PAGED:
            changed["starts"] = self._single_starts(b)
        names = {i: name for name, i in n.op.places([v.type for v in n.operands]).items()}
        operands = [changed.get(names.get(i, "")) or self._of_entries(b, v) for i, v in enumerate(n.operands)]
        new = b.emit(n.op, operands, _sizes(n.attrs, self.entries), [r.name for r in n.results])
        self.narrowed |= dict(zip(n.results, new if isinstance(new, tuple) else (new,), strict=True))

    def _of_entries(self, b: Builder, v: Value) -> Value:
        """Return a value for one token per entry: the narrowed one, a selection from that of all tokens, or itself."""
        if v in self.narrowed or not token_axes(v.type):
            return self.narrowed.get(v, v)
        self.narrowed[v] = b.take(v, self.index)
        return self.narrowed[v]

    def _single_starts(self, b: Builder) -> Value:
        """Return the starts of entries that have one token each, or none, as padding does."""
        if self.starts is None:
            chosen = made_by(self.index, "row_last", "row_first")
            spans = made_by(chosen.operands[0], "row_spans") if chosen else None
            assert spans is not None, "entries are numbered by row_spans"
            rows, counts, length = spans.operands
            ones = b.minimum(counts, b.constant(1, "i32"))
            self.starts, *_ = b.row_spans(rows, ones, length, tokens=self.entries)
        return self.starts


def _narrows(n: Node) -> bool:
    """Whether a node computes each token, the index of the first axis, from that token of its operands.

    Attention does so as far as queries are concerned.
    """
    values = [*n.results, *(v for v in n.operands if token_axes(v.type))]
    if any(v.type.rank == 0 or v.type.shape[0] != D(TOKENS) for v in values):
        return False
    if n.op.name in _PAGED:
        return True
    return not any(v.type.state for v in n.operands) and not mixing_of(n)


def _sizes(attrs: Mapping[str, Any], entries: Any) -> dict[str, Any]:
    """Return attributes with the number of entries in place of that of tokens."""
    return {key: with_sizes(value, {TOKENS: entries}) for key, value in attrs.items()}
