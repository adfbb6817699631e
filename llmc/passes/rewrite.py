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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Builder, Graph, Node, Value
from llmc.passes.analysis import const_value, core, rounds_little, same_type
from llmc.passes.base import Ctx

Bound = dict[str, Any]


@dataclass(frozen=True)
class Var:
    """Matches any value and binds it. Calling a Var with patterns makes an Op of that name; TypeError for others."""

    name: str

    def __call__(self, *args: Pattern, **attrs: Any) -> Op:
        if other := [a for a in args if not isinstance(a, Pattern)]:
            raise TypeError(f"{self.name}(...): {other[0]!r} is not a pattern; write const({other[0]!r}) for a number")
        return Op(self.name.rstrip("_"), args, tuple(attrs.items()))


@dataclass(frozen=True)
class Op:
    """Matches a node of one op. `shared` nodes may have other readers; `bind` names the value."""

    op: str
    args: tuple[Pattern, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    shared: bool = False
    bind: str = ""


@dataclass(frozen=True)
class Const:
    """Matches a scalar constant: one equal to `value`, or any, bound to `name` as a float."""

    name: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Through:
    """Matches the inner pattern below any number of casts between floats of at least 16 bits."""

    inner: Pattern


@dataclass(frozen=True)
class Either:
    """Tries several patterns; the first one that leads to a complete match wins."""

    options: tuple[Pattern, ...]


Pattern = Var | Op | Const | Through | Either


class Pat:
    """Builds patterns by attribute access: in `p.mul(p.x, p.silu(p.y))`, called names are ops, others variables."""

    def __getattr__(self, name: str) -> Var:
        return Var(name)


def const(value: str | float) -> Const:
    """Match a scalar constant equal to the number `value`; a text matches any constant and binds it to that name."""
    return Const(name=value) if isinstance(value, str) else Const(value=float(value))


def through(inner: Pattern) -> Through:
    """Match `inner` below any number of float casts."""
    return Through(inner)


def either(*options: Pattern) -> Either:
    """Match any of several patterns."""
    return Either(options)


def shared(op: Op) -> Op:
    """Return a pattern whose value may have other readers; the value is then computed twice."""
    return Op(op.op, op.args, op.attrs, True, op.bind)


def named(name: str, op: Op) -> Op:
    """Return a pattern whose value is bound to a name."""
    return Op(op.op, op.args, op.attrs, op.shared, name)


@dataclass
class Tracker:
    """The furthest failure of a match: the number of nodes matched before it, and its reason."""

    depth: int = 0
    why: str = ""

    def fail(self, depth: int, why: str) -> None:
        """Record a failure if it is further than the previous one."""
        if depth > self.depth:
            self.depth, self.why = depth, why


@dataclass
class Match:
    """A successful match. `m["x"]` is a Value, an attribute or a float; `root` is the node at the top."""

    root: Node
    bound: Bound
    inner: tuple[Node, ...]

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return what a name is bound to, or `default`."""
        return self.bound.get(name, default)


Build = Callable[[Any], Value]
State = tuple[Bound, tuple[tuple[Node, bool], ...]]


def _match(p: Pattern, v: Value, s: State, t: Tracker) -> Iterator[State]:
    """Yield every extension of state `s` in which pattern `p` matches `v`; failures go to `t`."""
    bound, inner = s
    if isinstance(p, Var):
        if p.name not in bound:
            yield {**bound, p.name: v}, inner
        elif bound[p.name] is v or core(bound[p.name]) is core(v):
            yield s
        else:
            t.fail(len(inner), f"%{p.name} would stand for two different values")
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
        t.fail(len(s[1]), f"expected a constant, got {v.node.op.name if v.node else 'an input'}")
    elif p.value is not None and got != p.value:
        t.fail(len(s[1]), f"expected the constant {p.value:g}, got {got:g}")
    elif p.name:
        yield {**s[0], p.name: got}, s[1]
    else:
        yield s


def _match_op(p: Op, v: Value, s: State, t: Tracker) -> Iterator[State]:
    """Match the op, its attributes, then its operands, in both orders if it commutes."""
    bound, inner = s
    n = v.node
    if n is None or n.op.name != p.op:
        t.fail(len(inner), f"expected {p.op}, got {n.op.name if n else 'an input'}")
        return
    bound = dict(bound)
    for key, expected in p.attrs:
        got = n.attrs.get(key)
        if isinstance(expected, Var):
            if bound.setdefault(expected.name, got) != got:
                t.fail(len(inner), f"{p.op} has {key}={got}, not {bound[expected.name]}")
                return
        elif got != expected:
            t.fail(len(inner), f"{p.op} has {key}={got}, not {expected}")
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
    """The reason why an inner node cannot be removed, or None if all can be."""
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
    """Return the first match at the node, or None, together with the furthest failure."""
    t = Tracker()
    for bound, inner in _match(p, node.results[0], ({}, ()), t):
        if (why := _outside(inner, g, node)) is None:
            return Match(node, bound, tuple(n for n, _ in inner)), t
        t.fail(len(inner), why)
    return None, t


def size(p: Pattern) -> int:
    """Number of ops in a pattern."""
    if isinstance(p, Op):
        return 1 + sum(map(size, p.args))
    if isinstance(p, Through):
        return size(p.inner)
    return max(map(size, p.options)) if isinstance(p, Either) else 0


def ops_of(p: Pattern) -> tuple[str, ...]:
    """The names of the ops in a pattern."""
    if isinstance(p, Op):
        return (p.op, *(name for part in p.args for name in ops_of(part)))
    if isinstance(p, Through):
        return ops_of(p.inner)
    return tuple(name for part in p.options for name in ops_of(part)) if isinstance(p, Either) else ()


class Misses(dict[tuple[Node, str], str]):
    """(node, rule) -> why the rule did not apply there at the last attempt."""

    def report(self, g: Graph, ctx: Ctx) -> None:
        """Record the misses of nodes that still exist in `ctx`."""
        for (n, rule), why in self.items():
            if alive(g, n):
                ctx.miss(rule, n, why)


@dataclass(frozen=True)
class Rewrite:
    """A pattern and its replacement.

    build(b, m) returns the value that replaces the root. `b` is a Builder before the root, with the root's module path,
    or else that of the first matched node that has one. when(m) returns None, or the reason not to apply. near: a
    failure after that many matched ops is reported as a near miss (0: half of the pattern).
    """

    name: str
    pattern: Op
    build: Callable[[Any, Match], Value]
    when: Callable[[Match], str | None] = field(default=lambda m: None)
    near: int = 0

    @property
    def roots(self) -> tuple[str, ...]:
        """The names of the ops at which the rule can apply."""
        return (self.pattern.op,)

    def attempt(self, g: Graph, node: Node, misses: Misses) -> Callable[[Any], Sequence[Value]] | None:
        """Match at `node`; return a function that builds the replacement, or None after recording a near miss."""
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
        matched = m

        def made(b: Any) -> Sequence[Value]:
            b.loc = b.loc or next((n.loc for n in matched.inner if n.loc), "")
            return [self.build(b, matched)]

        return made


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


def apply(g: Graph, rules: Sequence[Rule], ctx: Ctx, misses: Misses | None = None, rounds: int = 100) -> int:
    """Apply rules, in order of priority, until none applies or fuel runs out; return the number of rewrites.

    Near misses are recorded in `ctx`. A caller that applies rules several times passes `misses` and records them
    itself. Raises Diagnostic E424 if a pattern names an op that does not exist.
    """
    by_root: dict[str, list[Rule]] = {}
    for r in rules:
        for name in ops_of(r.pattern) if isinstance(r, Rewrite) else ():
            if name not in ctx.opset:
                raise Diagnostic("E424", f"rewrite {r.name}: unknown op {name}", "`llmc ops` lists all ops")
        for root in r.roots:
            by_root.setdefault(root, []).append(r)
    total, recorded = 0, Misses() if misses is None else misses
    for _ in range(rounds):
        done = sum(_once(g, n, by_root[n.op.name], ctx, recorded) for n in list(g.nodes) if n.op.name in by_root)
        total += done
        if not done:
            break
    if misses is None:
        recorded.report(g, ctx)
    return total


def _once(g: Graph, n: Node, rules: Sequence[Rule], ctx: Ctx, misses: Misses) -> int:
    """Apply the first matching rule at the node; return the number of rewrites, 0 or 1."""
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
    """Whether the node has not been erased."""
    return n.prev is not None or g.nodes.head is n


def substitute(g: Graph, n: Node, new: Sequence[Value], rule: str = "") -> None:
    """Make readers of the node's results read `new`, then erase the node and what only it needed."""
    for old, value in zip(n.results, new, strict=True):
        assert same_type(old.type, value.type), f"{rule}: {old.type} would become {value.type} ({n.loc})"
        if value.node is not None and not value.name and value.node.loc == n.loc:
            value.name = old.name
        g.replace(old, value)
    sweep(g, n)


def sweep(g: Graph, n: Node) -> int:
    """Erase the node if it is unused, then its operands' nodes in the same way; return the number of erased nodes."""
    erased, work = 0, [n]
    while work:
        n = work.pop()
        if alive(g, n) and not g.is_used(n):
            work += [v.node for v in n.operands if v.node is not None]
            g.erase(n)
            erased += 1
    return erased
