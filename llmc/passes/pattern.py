"""Patterns of rewrites: how they are written, checked against the op set, and matched. See `llmc.passes.rewrite`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc_runtime.format.nearest import did_you_mean

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph, Node, Value
from llmc.ir.opdef import OpDef
from llmc.ir.signature import Mismatch
from llmc.passes.analysis import const_value, core, rounds_little

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
    """A successful match.

    `m["x"]` is a Value, an attribute or a float; LookupError if the pattern binds no x. `root` is the node at the top,
    `inner` are all matched nodes, the root first.
    """

    root: Node
    bound: Bound
    inner: tuple[Node, ...]

    def __getitem__(self, name: str) -> Any:
        if name not in self.bound:
            raise LookupError(f"the pattern binds no {name!r}; it binds {', '.join(sorted(self.bound)) or 'nothing'}")
        return self.bound[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value that a name is bound to, or `default`."""
        return self.bound.get(name, default)


# What is bound so far, and the nodes matched so far, with whether each may have readers outside of the match.
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
        yield from _match_through(p, v, s, t)
    else:
        yield from _match_op(p, v, s, t)


def _match_through(p: Through, v: Value, s: State, t: Tracker) -> Iterator[State]:
    """Match the inner pattern at `v`, then below each of the casts that `v` is made by."""
    bound, inner = s
    while True:
        yield from _match(p.inner, v, (bound, inner), t)
        cast = v.node
        if cast is None or cast.op.name != "cast" or not rounds_little(cast):
            return
        inner = (*inner, (cast, False))
        v = cast.operands[0]


def _match_const(p: Const, v: Value, s: State, t: Tracker) -> Iterator[State]:
    """Match a scalar constant, and bind it if the pattern has a name."""
    number = const_value(v)
    if number is None:
        t.fail(len(s[1]), f"expected a constant, got {v.node.op.name if v.node else 'an input'}")
    elif p.value is not None and number != p.value:
        t.fail(len(s[1]), f"expected the constant {p.value:g}, got {number:g}")
    elif p.name:
        yield {**s[0], p.name: number}, s[1]
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
    why = _bind_attrs(p, n, bound)
    if why is None and len(p.args) != len(n.operands):
        why = f"{p.op} has {len(n.operands)} operands"
    if why is not None:
        t.fail(len(inner), why)
        return
    if p.bind:
        bound[p.bind] = v
    orders: Sequence[Sequence[Value]] = (n.operands,)
    if n.op.commutes and len(p.args) == 2:
        orders = (n.operands, n.operands[::-1])
    for operands in orders:
        yield from _match_all(p.args, operands, (bound, (*inner, (n, p.shared))), t)


def _bind_attrs(p: Op, n: Node, bound: dict[str, Any]) -> str | None:
    """Add the attributes that the pattern binds to `bound`; return why the node's attributes do not match, or None."""
    for key, expected in p.attrs:
        attr = n.attrs.get(key)
        if isinstance(expected, Var):
            expected = bound.setdefault(expected.name, attr)
        if attr != expected:
            return f"{p.op} has {key}={attr}, not {expected}"
    return None


def _match_all(ps: Sequence[Pattern], vs: Sequence[Value], s: State, t: Tracker) -> Iterator[State]:
    if not ps:
        yield s
        return
    for after in _match(ps[0], vs[0], s, t):
        yield from _match_all(ps[1:], vs[1:], after, t)


def _outside(inner: Sequence[tuple[Node, bool]], g: Graph, root: Node) -> str | None:
    """Return the reason why an inner node cannot be removed, or None if all can be."""
    matched = {id(n) for n, _ in inner}
    outputs = {id(v) for v in g.outputs}
    for n, is_shared in inner:
        if n is root or is_shared:
            continue
        users = {id(u) for r in n.results for u in r.uses}
        if not users <= matched:
            return f"{n.op.name} has {len(users)} users"
        if any(id(r) in outputs for r in n.results):
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
    """Return the number of ops in a pattern."""
    sizes = [size(part) for part in _parts(p)]
    if isinstance(p, Op):
        return 1 + sum(sizes)
    return max(sizes, default=0)


def _parts(p: Pattern) -> tuple[Pattern, ...]:
    """Return the patterns directly below a pattern."""
    if isinstance(p, Op):
        return p.args
    if isinstance(p, Either):
        return p.options
    return (p.inner,) if isinstance(p, Through) else ()


def check(p: Pattern, ops: Mapping[str, OpDef], rule: str, partly: bool = False) -> None:
    """Raise Diagnostic E424 if no node can match: an unknown op, a wrong number of operands, or a wrong attribute.

    `rule` starts the message. If `partly`, ops that `ops` lacks are skipped: an extension may provide them.
    """
    if isinstance(p, Op):
        if p.op in ops:
            _check_op(p, ops[p.op], rule)
        elif not partly:
            remedy = did_you_mean(p.op, ops, "`llmc ops` lists all ops")
            raise Diagnostic("E424", f"{rule}: unknown op {p.op}", remedy)
    for part in _parts(p):
        check(part, ops, rule, partly)


def _check_op(p: Op, op: OpDef, rule: str) -> None:
    """Raise Diagnostic E424 if no node of the op has as many operands, or such attributes, as the pattern."""
    remedy = f"`llmc ops {p.op}` prints its signature"
    if wrong := _wrong_count(len(p.args), op):
        raise Diagnostic("E424", f"{rule}: {p.op} takes {wrong} operands, the pattern has {len(p.args)}", remedy)
    for key, expected in p.attrs:
        if key not in op.attrs:
            attributes = ", ".join(op.attrs) or "none"
            raise Diagnostic("E424", f"{rule}: {p.op} has no attribute {key!r} (its attributes: {attributes})", remedy)
        if not isinstance(expected, Var):
            try:
                op.attrs[key].normal(p.op, key, expected)
            except Mismatch as e:
                raise Diagnostic("E424", f"{rule}: {e}", remedy) from None


def _wrong_count(count: int, op: OpDef) -> str:
    """Return the numbers of operands that the op takes, such as "2 to 3"; empty if `count` is one of these numbers."""
    minimum = sum(1 for s in op.operands if not (s.optional or s.many or s.scales))
    if any(s.many for s in op.operands):
        return "" if count >= minimum else f"{minimum} or more"
    maximum = len(op.operands)
    if minimum <= count <= maximum:
        return ""
    return str(minimum) if minimum == maximum else f"{minimum} to {maximum}"
