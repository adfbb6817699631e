"""Prints scalar expressions as C++ statements, over vectors or over single elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from llmc.ir.scalar import E, expr

# Kinds of values: f is a vector of floats, m a vector mask, s a single element of any C++ type.
Primitives: TypeAlias = Mapping[str, tuple[str, str, str]]  # name -> format, kinds of the operands, kind of the value
Names: TypeAlias = dict[int, tuple[str, str]]  # node of a Dag -> text and kind of its value
VECTOR: Primitives = MappingProxyType(
    {
        **{k: (f"({{0}} {c} {{1}})", "ff", "f") for k, c in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"))},
        **{k: (f"m_{k}({{0}})", "f", "f") for k in ("abs", "floor", "exp", "exp2", "log", "sqrt", "rsqrt", "sin")},
        **{k: (f"m_{k}({{0}})", "f", "f") for k in ("cos", "tanh", "erf", "sigmoid")},
        **{k: (f"m_{k}({{0}}, {{1}})", "ff", "f") for k in ("max", "min", "pow")},
        **{
            k: (f"({{0}} {c} {{1}})", "ff", "m")
            for k, c in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
        },
        "neg": ("(-{0})", "f", "f"),
        "and": ("({0} & {1})", "mm", "m"),
        "or": ("({0} | {1})", "mm", "m"),
        "not": ("(~{0})", "m", "m"),
        "select": ("select({0}, {1}, {2})", "mff", "f"),
    }
)
# Single elements: C++'s implicit conversions handle mixtures of int64_t, float and bool.
ELEMENT: Primitives = MappingProxyType(
    {
        **{k: (t, "s" * len(kinds), "s") for k, (t, kinds, _) in VECTOR.items() if not t.startswith(("m_", "select"))},
        **{k: (f"m_{k}((float){{0}})", "s", "s") for k, (t, kinds, _) in VECTOR.items() if t.startswith("m_")},
        "div": ("((float){0} / (float){1})", "ss", "s"),
        "pow": ("m_pow((float){0}, (float){1})", "ss", "s"),
        "abs": ("e_abs({0})", "s", "s"),
        "max": ("e_max({0}, {1})", "ss", "s"),
        "min": ("e_min({0}, {1})", "ss", "s"),
        "floor": ("e_floor({0})", "s", "s"),
        "and": ("({0} && {1})", "ss", "s"),
        "or": ("({0} || {1})", "ss", "s"),
        "not": ("(!{0})", "s", "s"),
        "select": ("({0} ? {1} : {2})", "sss", "s"),
    }
)


class DagNode(NamedTuple):
    """A primitive with its operands.

    args: the indices of the operand nodes; of an "arg", the number of the argument; of a "const", its value.
    """

    fn: str
    args: tuple[float, ...]


@dataclass
class Dag:
    """Expressions with common subexpressions merged. Nodes are identified by index; operands precede their users."""

    nodes: list[DagNode] = field(default_factory=list)
    index: dict[tuple[str, tuple[float, ...]], int] = field(default_factory=dict)

    def add(self, e: E) -> int:
        """Insert an expression and return its index."""
        if e.fn in ("arg", "const"):
            return self._node(e.fn, (e.args[0],))
        if e.fn == "pow" and (simple := _simple_pow(e)) is not None:
            return self.add(simple)
        return self._node(e.fn, tuple(self.add(a) for a in e.args))

    def _node(self, fn: str, args: tuple[float, ...]) -> int:
        key = (fn, tuple(map(repr, args)) if fn == "const" else args)
        if key not in self.index:
            self.index[key] = len(self.nodes)  # type: ignore[index]
            self.nodes.append(DagNode(fn, args))
        return self.index[key]  # type: ignore[index]

    def operands(self, i: int) -> tuple[int, ...]:
        """Return the operands' indices; empty for arguments and constants."""
        fn, args = self.nodes[i]
        return () if fn in ("arg", "const") else tuple(int(a) for a in args)

    def argument(self, i: int) -> int:
        """Return the number of the argument that node `i` stands for, which is an "arg"."""
        return int(self.nodes[i].args[0])

    def below(self, roots: Iterable[int], stop: Callable[[int], bool] = lambda i: False) -> list[int]:
        """Return all nodes that the roots depend on, operands first, without following operands of `stop` nodes."""
        seen: set[int] = set()
        todo = list(roots)
        while todo:
            i = todo.pop()
            if i not in seen:
                seen.add(i)
                if not stop(i):
                    todo += self.operands(i)
        return sorted(seen)


def _simple_pow(e: E) -> E | None:
    """Return the expression without pow if the exponent is a simple constant, else None."""
    base, exponent = e.args
    if exponent.fn != "const":
        return None
    value = exponent.args[0]
    whole = {1.0: base, 2.0: base * base, 3.0: base * base * base, -1.0: expr(1.0) / base}
    return {**whole, 0.5: E("sqrt", (base,)), -0.5: E("rsqrt", (base,))}.get(value)


def number(x: float, kind: str = "f") -> str:
    """Print a constant as a vector (kind f) or a single element (kind s; integers become integer literals)."""
    if kind == "s" and math.isfinite(x) and x == int(x) and abs(x) < 2**53:
        return f"INT64_C({int(x)})"
    special = {math.inf: "INFINITY", -math.inf: "-INFINITY"}
    text = "NAN" if math.isnan(x) else special.get(x, f"{x!r}f")
    return f"splat({text})" if kind == "f" else text


def convert(text: str, of: str, to: str) -> str:
    """Convert a value's text from one kind to another."""
    if of == to:
        return text
    return f"as_mask({text})" if to == "m" else f"as_float({text})"


def statements(dag: Dag, ids: Sequence[int], names: Names, table: Primitives = VECTOR) -> list[str]:
    """Return one C++ statement for each of `ids` without a name. `names` maps nodes to (text, kind) and is extended."""
    scalar = table is ELEMENT
    out = []
    for i in ids:
        if i in names:
            continue
        fn, args = dag.nodes[i]
        if fn == "const":
            names[i] = (number(args[0], "s" if scalar else "f"), "s" if scalar else "f")
            continue
        template, operand_kinds, kind = table[fn]
        operands = [convert(*names[a], k) for a, k in zip(dag.operands(i), operand_kinds, strict=True)]
        ctype = {"f": "const vf", "m": "const vi", "s": "const auto"}[kind]
        out.append(f"{ctype} t{i} = {template.format(*operands)};")
        names[i] = (f"t{i}", kind)
    return out


def inline(e: E, args: Sequence[str], table: Primitives = VECTOR) -> str:
    """Print an expression as a single C++ expression over vectors named `args`, for short epilogues."""
    kind = "s" if table is ELEMENT else "f"

    def visit(x: E) -> tuple[str, str]:
        if x.fn == "arg":
            return args[x.args[0]], kind
        if x.fn == "const":
            return number(x.args[0], kind), kind
        template, operand_kinds, result_kind = table[x.fn]
        operands = [convert(*visit(a), k) for a, k in zip(x.args, operand_kinds, strict=True)]
        return template.format(*operands), result_kind

    return convert(*visit(e), kind)
