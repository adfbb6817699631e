"""Local rewrites as data: a pattern, a function that builds the replacement, and a condition with a reason.

Patterns use the ops' names. They are matched from the root upwards, in both orders for commutative ops:

    p = Pat()
    RMS = Rewrite("rms-norm",
        p.mul(through(p.mul(p.x, p.rsqrt(p.add(p.mean(p.square(p.x), axis=-1, keepdim=True), const("eps"))))), p.w),
        lambda b, m: b.rms_norm(m["x"], m["w"], eps=m["eps"]),
        when=lambda m: None if m["w"].type.rank == 1 else f"the weight has rank {m['w'].type.rank}")

`p.x` binds a value; if the name occurs again, it must be the same value, up to widening casts. `p.op(..., attr=...)`
requires an attribute value, or binds it (`eps=p.eps`). Inner nodes of a match must not have readers outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmc.diagnostics import Diagnostic, extension_code
from llmc.ir.graph import Builder, Graph, Node, Value
from llmc.ir.ops import OPS
from llmc.passes.analysis import same_type
from llmc.passes.base import Ctx, NoMatch
from llmc.passes.pattern import Match, Op, Pat, check, const, either, match, named, shared, size, through

__all__ = [
    "Match",
    "NoMatch",
    "Pat",
    "Rewrite",
    "Simplify",
    "apply",
    "const",
    "either",
    "hoist",
    "in_graph",
    "match",
    "named",
    "shared",
    "substitute",
    "sweep",
    "through",
]  # fmt: skip

Build = Callable[[Any], Value]


class Misses(dict[tuple[Node, str], str]):
    """(node, rule) -> why the rule did not apply there at the last attempt."""

    def report(self, g: Graph, ctx: Ctx) -> None:
        """Record the misses of nodes that still exist in `ctx`."""
        for (n, rule), why in self.items():
            if in_graph(g, n):
                ctx.miss(rule, n, why)


@dataclass(frozen=True)
class Rewrite:
    """A pattern and its replacement.

    build(b, m) returns the value that replaces the root. `b` is a Builder before the root, with the root's module path,
    or else that of the first matched node that has one. when(m) returns None, or the reason not to apply. near: a
    failure after that many matched ops is reported as a near miss (0: half of the pattern). Making one raises
    Diagnostic E424 if the pattern cannot match.
    """

    name: str
    pattern: Op
    build: Callable[[Any, Match], Value]
    when: Callable[[Match], str | None] = field(default=lambda m: None)
    near: int = 0

    def __post_init__(self) -> None:
        """Check the pattern against llmc's own ops; `apply` checks the ops of extensions, too."""
        if not isinstance(self.pattern, Op):
            raise Diagnostic("E424", f"rewrite {self.name}: the pattern is not an op", "write p.NAME(...)")
        check(self.pattern, OPS, f"rewrite {self.name}", partly=True)

    @property
    def roots(self) -> tuple[str, ...]:
        """The names of the ops at which the rule can apply."""
        return (self.pattern.op,)

    def attempt(self, g: Graph, node: Node, misses: Misses) -> Callable[[Any], Sequence[Value]] | None:
        """Match at `node`; return a function that builds the replacement, or None after recording a near miss."""
        m, t = match(self.pattern, node, g)
        min_depth = self.near or max(2, size(self.pattern) // 2)
        if m is None:
            if t.depth >= min_depth:
                misses[node, self.name] = t.why
            return None
        with extension_code(f"rewrite {self.name!r}: its condition", self.when, node):
            why = self.when(m)
            if not isinstance(why, str | None):
                raise TypeError(f"when returned {why!r}, not None (apply) or the reason not to apply")
        if why is not None:
            misses[node, self.name] = why
            return None
        misses.pop((node, self.name), None)
        matched = m

        def build(b: Any) -> Sequence[Value]:
            b.loc = b.loc or next((n.loc for n in matched.inner if n.loc), "")
            return [self.build(b, matched)]

        return build


@dataclass(frozen=True)
class Simplify:
    """A rewrite whose pattern is a function: `find(node)` returns None, or a function that builds the new value."""

    name: str
    roots: tuple[str, ...]
    find: Callable[[Node], Build | None]

    def attempt(self, g: Graph, node: Node, misses: Misses) -> Callable[[Any], Sequence[Value]] | None:
        """Return a function that builds the replacement, or None."""
        build = self.find(node)
        return None if build is None else lambda b: [build(b)]


Rule = Rewrite | Simplify
_MAX_ROUNDS = 100  # maximum rounds of `apply`; rules that undo each other would never end


def apply(g: Graph, rules: Sequence[Rule], ctx: Ctx, misses: Misses | None = None) -> int:
    """Apply rules, in order of priority, until none applies or fuel runs out; return the number of rewrites.

    It also ends after 100 rounds over the graph. Near misses are recorded in `ctx`; a caller that applies rules several
    times passes `misses` and records them itself. Raises Diagnostic E424 if a pattern cannot match any node.
    """
    by_root: dict[str, list[Rule]] = {}
    for r in rules:
        if isinstance(r, Rewrite):
            check(r.pattern, ctx.opset, f"rewrite {r.name}")
        for root in r.roots:
            if root not in ctx.opset:
                raise Diagnostic("E424", f"rewrite {r.name}: unknown op {root}", "`llmc ops` lists all ops")
            by_root.setdefault(root, []).append(r)
    recorded = Misses() if misses is None else misses
    total = 0
    for _ in range(_MAX_ROUNDS):
        done = sum(_once(g, n, by_root[n.op.name], ctx, recorded) for n in list(g.nodes) if n.op.name in by_root)
        total += done
        if not done:
            break
    if misses is None:
        recorded.report(g, ctx)
    return total


def _once(g: Graph, n: Node, rules: Sequence[Rule], ctx: Ctx, misses: Misses) -> int:
    """Apply the first matching rule at the node; return the number of rewrites, 0 or 1."""
    if not in_graph(g, n) or len(n.results) != 1 or not ctx.allows(n):
        return 0
    for r in rules:
        build = r.attempt(g, n, misses)
        if build is None:
            continue
        if not ctx.spend():
            return 0
        ctx.hit(r.name, n)
        with extension_code(f"rewrite {r.name!r}: its replacement", r.build if isinstance(r, Rewrite) else r.find, n):
            substitute(g, n, build(Builder(g, ctx.opset, before=n, loc=n.loc)), r.name)
        return 1
    return 0


def in_graph(g: Graph, n: Node) -> bool:
    """Whether the node has not been erased."""
    return n.prev is not None or g.nodes.head is n


def substitute(g: Graph, n: Node, new: Sequence[Value], rule: str = "") -> None:
    """Make readers of the node's results read `new`, then erase the node and what only it needed.

    Raises TypeError if a new value has another type than the one that it replaces; the message starts with `rule`.
    """
    for old, value in zip(n.results, new, strict=True):
        if not isinstance(value, Value):
            raise TypeError(f"{rule}: the new value is {value!r:.80}, not a Value")
        if not same_type(old.type, value.type):
            raise TypeError(f"{rule}: {old.type} would become {value.type}")
        if value.node is not None and not value.name and value.node.loc == n.loc:
            value.name = old.name
        g.replace(old, value)
    sweep(g, n)


def hoist(g: Graph, values: Sequence[Value], before: Node) -> None:
    """Move the nodes that compute `values` from weights in front of the node `before`, if they come after it."""
    producers: set[Node] = set()
    work = [v.node for v in values]
    while work:
        n = work.pop()
        if n is not None and n not in producers:
            producers.add(n)
            work += [v.node for v in n.operands]
    is_after = False
    for n in g.nodes:
        is_after = is_after or n is before
        if is_after and n in producers:
            g.move_before(n, before)


def sweep(g: Graph, n: Node) -> None:
    """Erase the node if it is unused, then its operands' nodes in the same way."""
    work = [n]
    while work:
        n = work.pop()
        if in_graph(g, n) and not g.is_used(n):
            work += [v.node for v in n.operands if v.node is not None]
            g.erase(n)
