"""Local rewrites as data: a pattern, a small function that builds the replacement, the reason when it nearly fitted.

Patterns are written with the ops' own names, matched from the root up, in both orders of a commuting op:

    p = Pat()
    RMS = Rewrite("rms-norm",
        p.mul(through(p.mul(p.x, p.rsqrt(p.add(p.mean(p.square(p.x), axis=-1, keepdim=True), const("eps"))))), p.w),
        lambda b, m: b.rms_norm(m["x"], m["w"], eps=m["eps"]),
        when=lambda m: None if m["w"].type.rank == 1 else f"the weight has rank {m['w'].type.rank}")

`p.x` binds a value (two uses of a name must be the same value, up to widening casts); `p.op(..., attr=...)` wants an
attribute, or binds it (`eps=p.eps`). The inner nodes of a match may have no readers outside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmc.ir.graph import Builder, Graph, Node, Value

from .base import Ctx
from .facts import const_value, core, rounds_little, same_type

Bound = dict[str, Any]


@dataclass(frozen=True)
class Var:
    """Any value; called, it is an op over patterns."""

    name: str

    def __call__(self, *args: Pattern, **attrs: Any) -> Op:
        return Op(self.name.rstrip("_"), args, tuple(attrs.items()))


@dataclass(frozen=True)
class Op:
    """A node of one op over patterns; `shared` nodes may have other readers; `bind` names the value."""

    op: str
    args: tuple[Pattern, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    shared: bool = False
    bind: str = ""


@dataclass(frozen=True)
class Const:
    """A scalar constant: of one value, or any, bound under a name (a float)."""

    name: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Through:
    """A pattern below any number of casts among floats of 16 bits and more."""

    inner: Pattern


@dataclass(frozen=True)
class Either:
    """The first of several patterns that leads to a whole match."""

    options: tuple[Pattern, ...]


Pattern = Var | Op | Const | Through | Either


class Pat:
    """`p.mul(p.x, p.silu(p.y))`: a name called is an op, a name alone is a variable."""

    def __getattr__(self, name: str) -> Var:
        return Var(name)


def const(what: str | float) -> Const:
    return Const(name=what) if isinstance(what, str) else Const(value=float(what))


def through(inner: Pattern) -> Through:
    return Through(inner)


def either(*options: Pattern) -> Either:
    return Either(options)


def shared(op: Op) -> Op:
    """The same pattern; its value may be read elsewhere, too (it is then computed twice)."""
    return Op(op.op, op.args, op.attrs, True, op.bind)


def named(name: str, op: Op) -> Op:
    """The same pattern; its value is bound under a name."""
    return Op(op.op, op.args, op.attrs, op.shared, name)


@dataclass
class Tracker:
    """The furthest failure: how many nodes fitted before it, and why it failed."""

    depth: int = 0
    why: str = ""

    def fail(self, depth: int, why: str) -> None:
        if depth > self.depth:
            self.depth, self.why = depth, why


@dataclass
class Match:
    """What a pattern bound; `m["x"]` is a Value, an attribute, or a float. `root` is the node at its top."""

    root: Node
    bound: Bound
    inner: tuple[Node, ...]

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.bound.get(name, default)


Build = Callable[[Any], Value]
State = tuple[Bound, tuple[tuple[Node, bool], ...]]


def _match(p: Pattern, v: Value, s: State, t: Tracker) -> Iterator[State]:
    bound, inner = s
    if isinstance(p, Var):
        if p.name not in bound:
            yield {**bound, p.name: v}, inner
        elif bound[p.name] is v or core(bound[p.name]) is core(v):
            yield s
        else:
            t.fail(len(inner), f"%{p.name} would be two values")
    elif isinstance(p, Const):
        yield from _match_const(p, v, s, t)
    elif isinstance(p, Either):
        for option in p.options:
            yield from _match(option, v, s, t)
    elif isinstance(p, Through):
        while True:
            yield from _match(p.inner, v, (bound, inner), t)
            if v.node is None or v.node.op.name != "cast" or not rounds_little(v.node):
                return
            inner = (*inner, (v.node, False))
            v = v.node.operands[0]
    else:
        yield from _match_op(p, v, s, t)


def _match_const(p: Const, v: Value, s: State, t: Tracker) -> Iterator[State]:
    got = const_value(v)
    if got is None:
        t.fail(len(s[1]), f"want a constant, found {v.node.op.name if v.node else 'an input'}")
    elif p.value is not None and got != p.value:
        t.fail(len(s[1]), f"want the constant {p.value:g}, found {got:g}")
    elif p.name:
        yield {**s[0], p.name: got}, s[1]
    else:
        yield s


def _match_op(p: Op, v: Value, s: State, t: Tracker) -> Iterator[State]:
    bound, inner = s
    n = v.node
    if n is None or n.op.name != p.op:
        t.fail(len(inner), f"want {p.op}, found {n.op.name if n else 'an input'}")
        return
    bound = dict(bound)
    for key, want in p.attrs:
        got = n.attrs.get(key)
        if isinstance(want, Var):
            if bound.setdefault(want.name, got) != got:
                t.fail(len(inner), f"{p.op} has {key}={got}, not {bound[want.name]}")
                return
        elif got != want:
            t.fail(len(inner), f"{p.op} has {key}={got}, not {want}")
            return
    if p.bind:
        bound[p.bind] = v
    if len(p.args) != len(n.operands):
        t.fail(len(inner), f"{p.op} has {len(n.operands)} operands")
        return
    orders: Sequence[Sequence[Value]] = (n.operands,)
    if n.op.commutes and len(p.args) == 2:
        orders = (n.operands, n.operands[::-1])
    for operands in orders:
        yield from _match_all(p.args, operands, (bound, (*inner, (n, p.shared))), t)


def _match_all(ps: Sequence[Pattern], vs: Sequence[Value], s: State, t: Tracker) -> Iterator[State]:
    if not ps:
        yield s
        return
    for after in _match(ps[0], vs[0], s, t):
        yield from _match_all(ps[1:], vs[1:], after, t)


def _outside(inner: Sequence[tuple[Node, bool]], g: Graph, root: Node) -> str | None:
    """Why an inner node cannot go away; None where all can."""
    nodes = {id(n) for n, _ in inner}
    for n, is_shared in inner:
        if n is root or is_shared:
            continue
        outside = [u for r in n.results for u in r.uses if id(u) not in nodes]
        if outside:
            users = len({id(u) for r in n.results for u in r.uses})
            return f"{n.op.name} has {users} users"
        if any(r is o for r in n.results for o in g.outputs):
            return f"{n.op.name} is an output of the graph"
    return None


def match(p: Op, node: Node, g: Graph) -> tuple[Match | None, Tracker]:
    """The first match of the pattern at the node, or None and the furthest failure."""
    t = Tracker()
    for bound, inner in _match(p, node.results[0], ({}, ()), t):
        if (why := _outside(inner, g, node)) is None:
            return Match(node, bound, tuple(n for n, _ in inner)), t
        t.fail(len(inner), why)
    return None, t


def size(p: Pattern) -> int:
    """How many ops a pattern has."""
    if isinstance(p, Op):
        return 1 + sum(map(size, p.args))
    if isinstance(p, Through):
        return size(p.inner)
    return max(map(size, p.options)) if isinstance(p, Either) else 0


class Misses(dict[tuple[Node, str], str]):
    """(node, rule) -> why the rule did not apply there, the last time it was tried."""

    def tell(self, g: Graph, ctx: Ctx) -> None:
        """Note what is said of nodes that are still there."""
        for (n, rule), why in self.items():
            if alive(g, n):
                ctx.miss(rule, n, why)


@dataclass(frozen=True)
class Rewrite:
    """A pattern and its replacement.

    build(b, m) answers the value that takes the root's place, built with `b` (a Builder before the root, at its place
    in the model). when(m) answers None, or the reason not to. near: a failure after that many fitting ops is worth
    telling (0: half of the pattern).
    """

    name: str
    pattern: Op
    build: Callable[[Any, Match], Value]
    when: Callable[[Match], str | None] = field(default=lambda m: None)
    near: int = 0

    @property
    def roots(self) -> tuple[str, ...]:
        return (self.pattern.op,)

    def attempt(self, g: Graph, node: Node, misses: Misses) -> Callable[[Any], Sequence[Value]] | None:
        m, t = match(self.pattern, node, g)
        near = self.near or max(2, size(self.pattern) // 2)
        if m is None:
            if t.depth >= near:
                misses[node, self.name] = t.why
            return None
        if (why := self.when(m)) is not None:
            misses[node, self.name] = why
            return None
        misses.pop((node, self.name), None)
        found = m
        return lambda b: [self.build(b, found)]


@dataclass(frozen=True)
class Simplify:
    """A rewrite whose pattern is a function: `find(node)` answers None, or what builds the new value with a Builder."""

    name: str
    roots: tuple[str, ...]
    find: Callable[[Node], Build | None]

    def attempt(self, g: Graph, node: Node, misses: Misses) -> Callable[[Any], Sequence[Value]] | None:
        build = self.find(node)
        return None if build is None else lambda b: [build(b)]


Rule = Rewrite | Simplify


def apply(g: Graph, rules: Sequence[Rule], ctx: Ctx, misses: Misses | None = None, rounds: int = 100) -> int:
    """Apply rules, the earlier first, until none applies or the fuel is out; answer how often one did.

    Near misses go to `ctx`, or into `misses`, for a caller that applies rules several times and tells at the end.
    """
    by_root: dict[str, list[Rule]] = {}
    for r in rules:
        for root in r.roots:
            by_root.setdefault(root, []).append(r)
    total, found = 0, Misses() if misses is None else misses
    for _ in range(rounds):
        done = sum(_once(g, n, by_root[n.op.name], ctx, found) for n in list(g.nodes) if n.op.name in by_root)
        total += done
        if not done:
            break
    if misses is None:
        found.tell(g, ctx)
    return total


def _once(g: Graph, n: Node, rules: Sequence[Rule], ctx: Ctx, misses: Misses) -> int:
    if not alive(g, n) or len(n.results) != 1 or not ctx.allows(n):
        return 0
    for r in rules:
        build = r.attempt(g, n, misses)
        if build is None:
            continue
        if not ctx.spend():
            return 0
        ctx.hit(r.name, n)
        substitute(g, n, build(Builder(g, ctx.opset, before=n, loc=n.loc)), r.name)
        return 1
    return 0


def alive(g: Graph, n: Node) -> bool:
    """False for a node that was erased."""
    return n.prev is not None or g.nodes.head is n


def substitute(g: Graph, n: Node, new: Sequence[Value], rule: str = "") -> None:
    """Readers of the node's results read `new`; the node and what it alone needed go away."""
    for old, value in zip(n.results, new, strict=True):
        assert same_type(old.type, value.type), f"{rule}: {old.type} would become {value.type} ({n.loc})"
        if value.node is not None and not value.name and value.node.loc == n.loc:
            value.name = old.name
        g.replace(old, value)
    sweep(g, n)


def sweep(g: Graph, n: Node) -> int:
    """Erase the node if nobody reads it, then its operands' nodes likewise; answer how many went."""
    gone, work = 0, [n]
    while work:
        n = work.pop()
        if alive(g, n) and not g.is_used(n):
            work += [v.node for v in n.operands if v.node is not None]
            g.erase(n)
            gone += 1
    return gone
