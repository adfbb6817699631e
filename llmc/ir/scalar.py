"""Scalar expressions over about thirty primitives, written in Python and printed in any target language.

A pointwise op declares its expression, and a target only defines how each primitive is written
(`llmc.codegen.print_expr`). Reductions over the last axis (`row_sum`, `row_mean`, `row_max`) extend this to row
programs such as norms and softmax.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Union

ExprLike = Union["E", float, int]

UNARY = (
    "neg", "abs", "floor", "exp", "exp2", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "sigmoid", "not",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "max", "min", "pow", "eq", "ne", "lt", "le", "gt", "ge", "and", "or")
REDUCTIONS = ("row_sum", "row_mean", "row_max")
# primitive -> number of operands
ARITY = MappingProxyType(
    {**dict.fromkeys(UNARY, 1), **dict.fromkeys(BINARY, 2), **dict.fromkeys(REDUCTIONS, 1), "select": 3}
)


@dataclass(frozen=True)
class E:
    """An expression node: `fn` is a primitive, "arg" (args = (index,)) or "const" (args = (value,))."""

    fn: str
    args: tuple[Any, ...] = ()

    def __add__(self, o: ExprLike) -> E:
        return E("add", (self, expr(o)))

    def __sub__(self, o: ExprLike) -> E:
        return E("sub", (self, expr(o)))

    def __mul__(self, o: ExprLike) -> E:
        return E("mul", (self, expr(o)))

    def __truediv__(self, o: ExprLike) -> E:
        return E("div", (self, expr(o)))

    def __radd__(self, o: ExprLike) -> E:
        return expr(o) + self

    def __rsub__(self, o: ExprLike) -> E:
        return expr(o) - self

    def __rmul__(self, o: ExprLike) -> E:
        return expr(o) * self

    def __rtruediv__(self, o: ExprLike) -> E:
        return expr(o) / self

    def __neg__(self) -> E:
        return E("neg", (self,))

    def __str__(self) -> str:
        if self.fn == "arg":
            return f"a{self.args[0]}"
        if self.fn == "const":
            return repr(float(self.args[0]))
        return f"{self.fn}({', '.join(map(str, self.args))})"


def expr(x: ExprLike) -> E:
    """Wrap a number as a constant; return an expression unchanged."""
    return x if isinstance(x, E) else E("const", (float(x),))


def arg(i: int) -> E:
    """Return the expression for operand i."""
    return E("arg", (i,))


def call(fn: str, *args: ExprLike) -> E:
    """Apply a primitive to expressions; raises ValueError for an unknown primitive or a wrong number of arguments."""
    arity = ARITY.get(fn)
    if arity is None:
        raise ValueError(f"{fn!r} is not a scalar primitive; known: {', '.join(sorted(ARITY))}")
    if arity != len(args):
        raise ValueError(f"{fn} takes {arity} arguments, not {len(args)}")
    return E(fn, tuple(map(expr, args)))


def trace(fn: Callable[..., ExprLike], arity: int) -> E:
    """Return the expression that a Python function of `arity` expressions computes."""
    return expr(fn(*(arg(i) for i in range(arity))))


def walk(e: E) -> Iterator[E]:
    """Yield every node, operands before their users. Shared nodes are yielded once."""
    seen: set[int] = set()

    def visit(x: E) -> Iterator[E]:
        if id(x) in seen:
            return
        seen.add(id(x))
        if x.fn not in ("arg", "const"):
            for a in x.args:
                yield from visit(a)
        yield x

    yield from visit(e)


def reduces_rows(e: E) -> bool:
    """Return whether the expression contains a reduction over the last axis."""
    return any(x.fn in REDUCTIONS for x in walk(e))


def substitute(e: E, args: Sequence[E]) -> E:
    """Replace operand i by `args[i]`."""
    done: dict[int, E] = {}
    for x in walk(e):
        if x.fn == "arg":
            done[id(x)] = args[x.args[0]]
        elif x.fn == "const":
            done[id(x)] = x
        else:
            done[id(x)] = E(x.fn, tuple(done[id(a)] for a in x.args))
    return done[id(e)]


def evaluate(e: E, table: Mapping[str, Callable[..., Any]], args: Sequence[Any]) -> Any:
    """Evaluate the expression with the functions in `table`, for example numpy's."""
    done: dict[int, Any] = {}
    for x in walk(e):
        if x.fn == "arg":
            done[id(x)] = args[x.args[0]]
        elif x.fn == "const":
            done[id(x)] = x.args[0]
        else:
            done[id(x)] = table[x.fn](*(done[id(a)] for a in x.args))
    return done[id(e)]


def flops(e: E) -> int:
    """Return the number of operations per element; a reduction counts as one."""
    return sum(1 for x in walk(e) if x.fn not in ("arg", "const"))


_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+|inf|nan)|[(),])")


@lru_cache(maxsize=4096)
def parse_expr(text: str) -> E:
    """Parse calls of primitives over a0, a1, ... and numbers, the inverse of `str(e)`; raises ValueError."""
    tokens: list[str] = []
    pos = 0
    while pos < len(text.rstrip()):
        m = _TOKEN.match(text, pos)
        if not m:
            raise ValueError(f"not an expression: {text!r} (at {text[pos:]!r})")
        tokens.append(m[1])
        pos = m.end()
    tokens.append("")
    e = _parse(tokens, text)
    if tokens[0]:
        raise ValueError(f"not an expression: {text!r} (at {tokens[0]!r})")
    return e


def _parse(tokens: list[str], text: str) -> E:
    """Parse one expression from the front of `tokens`, consuming it."""
    token = tokens.pop(0) if tokens[0] else ""  # "" marks the end
    if m := re.fullmatch(r"a(\d+)", token):
        return arg(int(m[1]))
    if token in ("inf", "nan") or (token and not (token[0].isalpha() or token[0] in "_(),")):
        return E("const", (float(token),))
    if not token or tokens[0] != "(":
        raise ValueError(f"not an expression: {text!r}")
    tokens.pop(0)
    args = [_parse(tokens, text)]
    while tokens[0] == ",":
        tokens.pop(0)
        args.append(_parse(tokens, text))
    if tokens.pop(0) != ")":
        raise ValueError(f"not an expression: {text!r} (unclosed call)")
    return call(token, *args)
