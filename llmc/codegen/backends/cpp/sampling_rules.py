"""The C++ header `llmc_sampling_rules.h`: sampling parameters that are arithmetic, translated from Triton functions.

`triton/kernels/sampling_rules.py` holds the functions. They consist of assignments and a return, and may use numbers,
+ - * /, comparisons, & and |, `tl.where`, `tl.minimum`, `tl.maximum`, `tl.exp`, `tl.log`, and `tl.load(floats_ptr +
COLUMN)` with a float column of the device row.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from llmc.codegen.backends.triton import template
from llmc.codegen.print_expr import ELEMENT, VECTOR, Dag, statements
from llmc.ir.scalar import E, arg, call, expr

# The functions of the header: the types of their results, and their parameters after `f`, the row's float columns. A
# function of vectors (vf, and masks vi) computes VN ids.
FUNCTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "penalizes": ("bool", ""), "penalized": ("vf", ", vf logit, vf count, vi repeated"),
        "least_probability": ("float", ""),
    }
)  # fmt: skip
_OPERATORS: Mapping[type, str] = MappingProxyType(
    {
        ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.BitAnd: "and", ast.BitOr: "or",
        ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
    }
)  # fmt: skip
_CALLS: Mapping[str, str] = MappingProxyType(
    {"where": "select", "minimum": "min", "maximum": "max", "exp": "exp", "log": "log"}
)
Value: TypeAlias = "E | tuple[E, ...]"


def header() -> str:
    """Return the header's text. Raises ValueError at an operation that has no translation."""
    return "\n".join(
        [
            "// Translated from llmc/codegen/backends/triton/kernels/sampling_rules.py; f: a row's float columns",
            '#include "llmc_element.h"', '#include "llmc_row_columns.h"', "namespace llmc {",
            *(_function(name) for name in FUNCTIONS), "}", "",
        ]
    )  # fmt: skip


def _function(name: str) -> str:
    """Translate one function; `penalties` is the tuple that load_penalties returns."""
    kind, params = FUNCTIONS[name]
    rule = _Rule()
    names: dict[str, Value] = {
        param: rule.run("load_penalties", {}) if param == "penalties" else rule.argument(param)
        for param in template.load("sampling_rules").definitions[name].params
        if param != "floats_ptr"
    }
    result = rule.run(name, names)
    assert isinstance(result, E)
    dag, vectors = Dag(), kind == "vf"
    root = dag.add(result)
    arguments = [i for i, node in enumerate(dag.nodes) if node.fn == "arg"]
    texts = {i: rule.operand(dag.argument(i), vectors) for i in arguments}
    lines = statements(dag, dag.below([root]), texts, VECTOR if vectors else ELEMENT)
    body = "".join(f"  {line}\n" for line in (*lines, f"return {texts[root][0]};"))
    return f"static inline {kind} {name}(const float* f{params}) {{\n{body}}}"


@dataclass
class _Rule:
    """The translation of one function: the C++ texts of the arguments of its expression, by index."""

    arguments: list[str] = field(default_factory=list)

    def argument(self, text: str) -> E:
        """Return the expression for a parameter or a column."""
        if text not in self.arguments:
            self.arguments.append(text)
        return arg(self.arguments.index(text))

    def operand(self, index: int, vectors: bool) -> tuple[str, str]:
        """Return an argument's text and kind (see `print_expr`)."""
        text = self.arguments[index]
        if not vectors:
            return text, "s"
        if text.startswith("f["):
            return f"splat({text})", "f"
        return text, "m" if text == "repeated" else "f"

    def run(self, name: str, names: dict[str, Value]) -> Value:
        """Return the result of a function; `names` are its parameters."""
        text = template.load("sampling_rules").definitions[name].text
        (function,) = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        for statement in function.body:
            match statement:
                case ast.Assign(targets=[target], value=value):
                    names |= _bound(target, self.value(value, names))
                case ast.Return(value=ast.expr() as value):
                    return self.value(value, names)
                case ast.Expr(value=ast.Constant()):  # the docstring
                    pass
                case _:
                    raise _unknown(statement)
        raise ValueError(f"{name} in sampling_rules.py returns nothing")

    def value(self, node: ast.expr, names: Mapping[str, Value]) -> Value:
        """Return the value of an expression."""
        match node:
            case ast.Tuple(elts=parts):
                return tuple(self.scalars(parts, names))
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.Constant(value=float() | int() as number):
                return expr(number)
            case ast.BinOp(left=a, op=op, right=b) | ast.Compare(left=a, ops=[op], comparators=[b]):
                if type(op) in _OPERATORS:
                    return call(_OPERATORS[type(op)], *self.scalars([a, b], names))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="tl"), attr=name), args=args):
                if name in _CALLS:
                    return call(_CALLS[name], *self.scalars(args, names))
                match args:
                    case [ast.BinOp(left=ast.Name(id="floats_ptr"), right=ast.Name(id=column))] if name == "load":
                        return self.argument(f"f[{column}]")
        raise _unknown(node)

    def scalars(self, nodes: list[ast.expr], names: Mapping[str, Value]) -> Iterator[E]:
        """Yield the values of expressions that are not tuples."""
        for node in nodes:
            value = self.value(node, names)
            if not isinstance(value, E):
                raise _unknown(node)
            yield value


def _bound(target: ast.expr, value: Value) -> dict[str, Value]:
    """Return the names that an assignment binds."""
    match target, value:
        case ast.Name(id=name), _:
            return {name: value}
        case ast.Tuple(elts=parts), tuple() if len(parts) == len(value):
            return {part.id: element for part, element in zip(parts, value, strict=True) if isinstance(part, ast.Name)}
    raise _unknown(target)


def _unknown(node: Any) -> ValueError:
    return ValueError(f"sampling_rules.py: {ast.unparse(node)!r} has no translation to C++")
