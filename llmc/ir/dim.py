"""Symbolic sizes: integer polynomials over named symbols in a normal form, extended by ceiling division.

A `Dim` is immutable and hashable; two sizes are equal exactly if their normal forms are. `D(str(d))` gives `d` back,
and the runtime evaluates the same text form, whose parser is `llmc_runtime.format.expr`. Inequalities are not solved;
`bounds` gives intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from llmc_runtime.format import expr
from llmc_runtime.format.errors import LlmcError

DimLike: TypeAlias = "Dim | int | str"
Bounds = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class CeilDiv:
    """ceil(num / den), an atom of a Dim that cannot be simplified further."""

    num: Dim
    den: int

    def __str__(self) -> str:
        return f"ceil({self.num}, {self.den})"


Atom = str | CeilDiv
Term = tuple[tuple[Atom, ...], int]


@dataclass(frozen=True)
class Dim:
    """A symbolic size: a sum of terms in normal form.

    Each term is a pair (sorted atoms, coefficient). Terms are sorted and their coefficients are not zero.
    """

    terms: tuple[Term, ...]

    def __hash__(self) -> int:
        return hash(self.terms)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.const == other
        return isinstance(other, Dim) and self.terms == other.terms

    @staticmethod
    def of(x: DimLike) -> Dim:
        """Convert an int, a text such as "ceil(T, 16)*2+1", or a Dim; raises ValueError for a malformed text."""
        if isinstance(x, Dim):
            return x
        if isinstance(x, str):
            return _parse_cached(x)
        return _const(int(x))

    def __add__(self, other: DimLike) -> Dim:
        o = Dim.of(other)
        a, b = self.const, o.const
        if a is not None and b is not None:
            return _const(a + b)
        out = dict(self.terms)
        for key, c in o.terms:
            out[key] = out.get(key, 0) + c
        return _norm(out)

    def __mul__(self, other: DimLike) -> Dim:
        o = Dim.of(other)
        a, b = self.const, o.const
        if a is not None and b is not None:
            return _const(a * b)
        out: dict[tuple[Atom, ...], int] = {}
        for x, cx in self.terms:
            for y, cy in o.terms:
                key = tuple(sorted(x + y, key=str))
                out[key] = out.get(key, 0) + cx * cy
        return _norm(out)

    __radd__ = __add__
    __rmul__ = __mul__

    def __sub__(self, other: DimLike) -> Dim:
        return self + Dim.of(other) * -1

    def __rsub__(self, other: DimLike) -> Dim:
        return Dim.of(other) - self

    def __neg__(self) -> Dim:
        return self * -1

    def ceildiv(self, den: int) -> Dim:
        """Return ceil(self / den) for a positive integer `den`."""
        if den <= 0:
            raise ValueError(f"ceil-division by {den}: the divisor must be positive")
        if self.const is not None:
            return _const(-(-self.const // den))
        whole = {k: c // den for k, c in self.terms if c % den == 0}
        rest = {k: c for k, c in self.terms if c % den}
        if not rest:
            return _norm(whole)
        part = _norm(rest)
        inner = _const(-(-part.const // den)) if part.const is not None else _norm({(CeilDiv(part, den),): 1})
        return _norm(whole) + inner

    def divide(self, den: DimLike) -> Dim | None:
        """Return the exact quotient by one term (an integer or a product of symbols), or None if unprovable."""
        d = Dim.of(den)
        if len(d.terms) != 1:
            return _const(1) if d == self else None
        atoms, coef = d.terms[0]
        out: dict[tuple[Atom, ...], int] = {}
        for key, c in self.terms:
            factors = list(key)
            for a in atoms:
                if a not in factors:
                    return None
                factors.remove(a)
            if c % coef:
                return None
            out[tuple(factors)] = c // coef
        return _norm(out)

    def divisible(self, n: int) -> bool:
        """Whether this is provably a multiple of `n` for all values of the symbols."""
        return all(c % n == 0 for _, c in self.terms)

    @property
    def const(self) -> int | None:
        """The value if no symbol occurs, else None."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def symbols(self) -> frozenset[str]:
        """The names of all symbols that occur, also inside ceiling divisions."""
        names: set[str] = set()
        for atoms, _ in self.terms:
            for a in atoms:
                names |= {a} if isinstance(a, str) else a.num.symbols
        return frozenset(names)

    def __int__(self) -> int:
        """Return the value; raises TypeError if a symbol occurs."""
        if self.const is None:
            raise TypeError(f"the size {self} is not a number")
        return self.const

    def subs(self, env: Mapping[str, DimLike]) -> Dim:
        """Replace symbols by sizes; symbols that `env` lacks are kept."""
        if self.const is not None:
            return self
        total = _const(0)
        for atoms, c in self.terms:
            term = _const(c)
            for a in atoms:
                if isinstance(a, CeilDiv):
                    term = term * a.num.subs(env).ceildiv(a.den)
                else:
                    term = term * (Dim.of(env[a]) if a in env else _symbol(a))
            total = total + term
        return total

    def bounds(self, symbols: Bounds) -> tuple[int, int]:
        """Return an inclusive interval that contains the value, by interval arithmetic over the symbols' bounds."""
        lo = hi = 0
        for atoms, c in self.terms:
            tlo = thi = c
            for a in atoms:
                alo, ahi = _atom_bounds(a, symbols)
                corners = (tlo * alo, tlo * ahi, thi * alo, thi * ahi)
                tlo, thi = min(corners), max(corners)
            lo, hi = lo + tlo, hi + thi
        return lo, hi

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        return "+".join(_term_text(atoms, c) for atoms, c in self.terms).replace("+-", "-")

    def __repr__(self) -> str:
        return f"D({str(self)!r})"


def D(x: DimLike) -> Dim:
    """Shorthand for `Dim.of`."""
    return Dim.of(x)


def product(dims: tuple[Dim, ...] | list[Dim]) -> Dim:
    """Return the product of sizes; 1 for an empty list."""
    total = _const(1)
    for d in dims:
        total = total * d
    return total


def _term_text(atoms: tuple[Atom, ...], c: int) -> str:
    body = "*".join(map(str, atoms))
    if not body:
        return str(c)
    prefix = {1: "", -1: "-"}.get(c, f"{c}*")
    return prefix + body


def _atom_bounds(a: Atom, symbols: Bounds) -> tuple[int, int]:
    if isinstance(a, CeilDiv):
        lo, hi = a.num.bounds(symbols)
        return -(-lo // a.den), -(-hi // a.den)
    return symbols[a]


def _norm(d: dict[tuple[Atom, ...], int]) -> Dim:
    return Dim(tuple(sorted(((k, c) for k, c in d.items() if c), key=_order)))


def _order(term: Term) -> tuple[int, str]:
    return -len(term[0]), "*".join(map(str, term[0]))


@lru_cache(maxsize=4096)
def _const(n: int) -> Dim:
    return Dim((((), n),) if n else ())


@lru_cache(maxsize=256)
def _symbol(name: str) -> Dim:
    return Dim((((name,), 1),))


@lru_cache(maxsize=4096)
def _parse_cached(text: str) -> Dim:
    """Evaluate the runtime's postfix code of a size text over dims."""
    try:
        code = expr.parse(text).code
    except LlmcError as error:
        raise ValueError(f"not a size: {error.cause}") from None
    stack: list[Dim] = []
    for item in code:
        if isinstance(item, int):
            stack.append(_const(item))
        elif isinstance(item, str):
            stack.append(_symbol(item))
        elif len(item) == 2:  # ("ceil", divisor)
            stack.append(stack.pop().ceildiv(item[1]))
        else:
            right, left = stack.pop(), stack.pop()
            stack.append({"+": left.__add__, "-": left.__sub__, "*": left.__mul__}[item[0]](right))
    return stack[0]
