"""Prints scalar expressions in Triton, one statement per node; every value has a dtype.

Floats are computed in float32, integers in their own width, bools as int1. NaN and infinities behave as in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from llmc.codegen.backends.triton.triton_kernel import ELEMENTS
from llmc.codegen.print_expr import Dag
from llmc.ir.dtype import DTYPES, FLOATS
from llmc.ir.ops.common import NUMPY
from llmc.ir.scalar import E

# The dtype of a computed value is "f32", "bool" (int1), or the name of an integer dtype.
COMPARE = MappingProxyType({"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="})
ARITHMETIC = MappingProxyType({"add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})"})
LOGIC = MappingProxyType({"and": "({0} & {1})", "or": "({0} | {1})", "not": "({0} == 0)"})
_LARGER = """
@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
"""
# Primitives over float32. Division and square root are correctly rounded.
FLOAT = MappingProxyType(
    {
        "div": "tl.div_rn({0}, {1})", "pow": "scalar_pow({0}, {1})", "exp": "tl.exp({0})", "exp2": "tl.exp2({0})",
        "log": "tl.log({0})", "sqrt": "tl.sqrt_rn({0})", "rsqrt": "tl.rsqrt({0})", "sin": "tl.sin({0})",
        "cos": "tl.cos({0})", "tanh": "scalar_tanh({0})", "erf": "tl.erf({0})", "sigmoid": "tl.sigmoid({0})",
        "floor": "tl.floor({0})",
    }
)  # fmt: skip
HELPERS = MappingProxyType(
    {
        "tanh": '''
@triton.jit
def scalar_tanh(x):
    """A polynomial near zero, where 1 - 2 / (exp(2x) + 1) would cancel (Cephes)."""
    z = x * x
    p = (((z * -5.70498872745e-3 + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    small = x + x * z * (p - 3.33332819422e-1)
    big = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0.0, -big, big))
''',
        "pow": '''
@triton.jit
def scalar_pow(x, y):
    """pow with C's special cases, in float64 so that the exponent does not amplify the logarithm's error."""
    a = tl.abs(x)
    size = tl.exp2(y.to(tl.float64) * tl.log2(a.to(tl.float64))).to(tl.float32)
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    size = tl.where((x < 0.0) & odd, -size, size)
    size = tl.where((x < 0.0) & (a < float("inf")) & (whole == 0), float("nan"), size)
    one = (x == 1.0) | (y == 0.0) | ((a == 1.0) & (tl.abs(y) == float("inf")))
    return tl.where(one, 1.0, size)
''',
        "row_max": _LARGER
        + """

@triton.jit
def largest(x, axis: tl.constexpr, keep: tl.constexpr):
    return tl.reduce(x, axis, larger, keep_dims=keep)
""",
    }
)
# In the interpreter, tl.reduce with a custom function runs element by element, which is too slow.
INTERPRETED = MappingProxyType(
    {
        "row_max": _LARGER
        + """

@triton.jit
def largest(x, axis: tl.constexpr, keep: tl.constexpr):
    nans = tl.sum((x != x).to(tl.int32), axis, keep_dims=keep)
    return tl.where(nans > 0, float("nan"), tl.max(x, axis, keep_dims=keep))
""",
    }
)


def loaded(text: str, dtype: str) -> str:
    """Convert a loaded element to its computed dtype."""
    if dtype == "bool":
        return f"({text} != 0)"
    return f"{text}.to(tl.float32)" if dtype in FLOATS and dtype != "f32" else text


def convert(text: str, of: str, to: str) -> str:
    """Convert a value between computed dtypes: float to integer truncates, bool means "not zero"."""
    if of == to:
        return text
    if to == "bool":
        return f"({text} != 0)"
    if of != "f32" and to in ("bf16", "f16"):
        text = f"{text}.to(tl.float32)"
    return f"{text}.to({ELEMENTS[to][0]})"


def stored(text: str, of: str, dtype: str) -> str:
    """Convert a computed value to its stored dtype: rounded once, to nearest even; a bool is one byte."""
    if dtype == "bool":
        return f"{convert(text, of, 'bool')}.to(tl.int8)"
    return convert(text, of, dtype)


def number(x: float) -> str:
    """Print a float32 constant. Triton would type literals outside of the normal range of float32 as float64."""
    with np.errstate(over="ignore"):
        value = np.float32(x)
    if not np.isfinite(value):
        return f'float("{value!s}")'
    return str(value) if value == 0 or abs(value) >= 2.0**-126 else f"tl.full((), {value!s}, tl.float32)"


def constant(x: float, dtype: str) -> str:
    """Print a scalar constant in the computed dtype of `dtype`."""
    kind = DTYPES[dtype].kind
    if kind == "f":
        return f"tl.full((), {number(x)}, tl.float32)"
    return f"tl.full((), {int(x != 0 if kind == 'b' else x)}, {'tl.int1' if kind == 'b' else ELEMENTS[dtype][0]})"


def common_dtype(dtypes: Iterable[str]) -> str:
    """Return the common dtype of operands: f32 if any is a float, else by numpy's rule; bools count as i32."""
    distinct = {"i32" if d == "bool" else d for d in dtypes}
    if "f32" in distinct:
        return "f32"
    name = np.result_type(*(DTYPES[d].np for d in sorted(distinct))).name
    return next((d.name for d in DTYPES.values() if d.numpy == name), "f32")


def fold(e: E) -> E:
    """Evaluate operations on constants, in float32."""
    if e.fn in ("arg", "const"):
        return e
    args = tuple(fold(a) for a in e.args)
    if any(a.fn != "const" for a in args) or e.fn.startswith("row_"):
        return E(e.fn, args)
    with np.errstate(all="ignore"):
        return E("const", (float(NUMPY[e.fn](*(np.float32(a.args[0]) for a in args))),))


def dtypes(dag: Dag, args: Sequence[str]) -> list[str]:
    """Return the computed dtype of every node; `args` are the stored dtypes of the arguments."""
    out: list[str] = []
    for i, (fn, _) in enumerate(dag.nodes):
        if fn == "arg":
            stored_dtype = args[dag.argument(i)]
            out.append("f32" if stored_dtype in FLOATS else stored_dtype)
        else:
            out.append(_result_dtype(fn, [out[o] for o in dag.operands(i)]))
    return out


def _result_dtype(fn: str, operands: Sequence[str]) -> str:
    """Return the dtype in which a function of operands of these dtypes is computed."""
    if fn in COMPARE or fn in LOGIC:
        return "bool"
    if fn == "const" or fn in FLOAT or fn.startswith("row_"):
        return "f32"
    if fn != "select":
        return common_dtype(operands)
    _, chosen, other = operands
    return chosen if chosen == other else common_dtype([chosen, other])


def statement(dag: Dag, i: int, names: Mapping[int, str], kinds: Sequence[str]) -> str:
    """Print the right-hand side of node `i`, which is neither an argument nor a reduction."""
    fn, args = dag.nodes[i]
    if fn == "const":
        return number(args[0])
    operands = []
    for operand, dtype in zip(dag.operands(i), _operand_dtypes(dag, i, kinds), strict=True):
        text = names[operand]
        is_literal = dag.nodes[operand].fn == "const"
        if fn == "pow" and is_literal:  # the function takes values, not literals
            text = f"tl.full((), {text}, tl.float32)"
        operands.append(text if is_literal and dtype == "f32" else convert(text, kinds[operand], dtype))
    return _template(fn, kinds[i]).format(*operands)


def _operand_dtypes(dag: Dag, i: int, kinds: Sequence[str]) -> list[str]:
    """Return the dtypes to which node `i` converts its operands; `kinds` are the computed dtypes of all nodes."""
    fn, below = dag.nodes[i].fn, dag.operands(i)
    if fn in LOGIC:
        return ["bool"] * len(below)
    if fn in COMPARE:
        return [common_dtype(kinds[b] for b in below)] * 2
    if fn == "select":
        return ["bool", kinds[i], kinds[i]]
    return [kinds[i]] * len(below)


def _template(fn: str, kind: str) -> str:
    for table in (ARITHMETIC, LOGIC, FLOAT):
        if fn in table:
            return table[fn]
    if fn in COMPARE:
        return f"({{0}} {COMPARE[fn]} {{1}})"
    if fn in ("max", "min"):
        nan = ", propagate_nan=tl.PropagateNan.ALL" if kind == "f32" else ""
        return f"tl.{fn}imum({{0}}, {{1}}{nan})"
    return {"neg": "(-{0})", "abs": "tl.abs({0})", "select": "tl.where({0}, {1}, {2})"}[fn]


def helpers(fns: Iterable[str], interpret: bool = False) -> str:
    """Return the text of the jitted functions that these primitives call."""
    table = {**HELPERS, **INTERPRETED} if interpret else HELPERS
    return "\n\n".join(table[fn].strip("\n") + "\n" for fn in sorted(set(fns)) if fn in table)


def inline(
    e: E, args: Sequence[str], prefix: str = "e", reduction: Callable[[str, str], str] | None = None
) -> tuple[list[str], str]:
    """Return (statements, value) of an expression over float32 values named `args`.

    prefix: of the names of intermediate values. reduction(fn, operand): prints a reduction of the row; needed if the
    expression has one. The entry must be preceded by the `helpers` of the expression's primitives.
    """
    dag = Dag()
    root = dag.add(fold(e))
    kinds = dtypes(dag, ["f32"] * len(args))
    names: dict[int, str] = {}
    lines = []
    for i in dag.below([root]):
        fn = dag.nodes[i].fn
        if fn == "arg":
            names[i] = args[dag.argument(i)]
        elif fn == "const":
            names[i] = statement(dag, i, names, kinds)
        else:
            if reduction and fn.startswith("row_"):
                (operand,) = dag.operands(i)
                value = reduction(fn, convert(names[operand], kinds[operand], "f32"))
            else:
                value = statement(dag, i, names, kinds)
            names[i] = f"{prefix}{i}"
            lines.append(f"{names[i]} = {value}")
    return lines, convert(names[root], kinds[root], "f32")
