"""Scalar expressions as Triton text, one statement a node; every value has a dtype. It knows no shapes and no memory.

Floats compute in float32, integers in their own width, bools as int1. NaN and infinities are kept as numpy keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from llmc.codegen.backends.triton.triton_kernel import ELEMENTS, FLOATS
from llmc.codegen.print_expr import Dag
from llmc.ir.dtype import DTYPES
from llmc.ir.ops.common import NUMPY
from llmc.ir.scalar import E

# What a value is while it is computed: "f32", "bool" (int1), or the name of an integer dtype.
COMPARE = MappingProxyType({"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="})
ARITHMETIC = MappingProxyType({"add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})"})
LOGIC = MappingProxyType({"and": "({0} & {1})", "or": "({0} | {1})", "not": "({0} == 0)"})
# Spellings whose operands and value are float32. Division and square root round correctly.
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
    """Through float64, so that the error of the logarithm does not grow with the exponent; C's special cases."""
    a = tl.abs(x)
    size = tl.exp2(y.to(tl.float64) * tl.log2(a.to(tl.float64))).to(tl.float32)
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    size = tl.where((x < 0.0) & odd, -size, size)
    size = tl.where((x < 0.0) & (a < float("inf")) & (whole == 0), float("nan"), size)
    one = (x == 1.0) | (y == 0.0) | ((a == 1.0) & (tl.abs(y) == float("inf")))
    return tl.where(one, 1.0, size)
''',
        "row_max": """
@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, axis: tl.constexpr, keep: tl.constexpr):
    return tl.reduce(x, axis, larger, keep_dims=keep)
""",
    }
)
# The interpreter folds with functions of one's own element by element: far too slow.
INTERPRETED = MappingProxyType(
    {
        "row_max": """
@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, axis: tl.constexpr, keep: tl.constexpr):
    nans = tl.sum((x != x).to(tl.int32), axis, keep_dims=keep)
    return tl.where(nans > 0, float("nan"), tl.max(x, axis, keep_dims=keep))
""",
    }
)


def loaded(text: str, dtype: str) -> str:
    """A stored element as it is computed with."""
    if dtype == "bool":
        return f"({text} != 0)"
    return f"{text}.to(tl.float32)" if dtype in FLOATS and dtype != "f32" else text


def compute_dtype(dtype: str) -> str:
    """The dtype that an element of `dtype` has while it is computed with."""
    return "f32" if dtype in FLOATS else dtype


def convert(text: str, have: str, want: str) -> str:
    """A value of one dtype as another; float to integer truncates, anything to bool asks whether it is not zero."""
    if have == want:
        return text
    if want == "bool":
        return f"({text} != 0)"
    if have != "f32" and want in ("bf16", "f16"):
        text = f"{text}.to(tl.float32)"
    return f"{text}.to({ELEMENTS[want][0]})"


def stored(text: str, have: str, dtype: str) -> str:
    """A computed value as the element that is stored: rounded once to nearest even; a bool is one byte."""
    if dtype == "bool":
        return f"{convert(text, have, 'bool')}.to(tl.int8)"
    return convert(text, have, dtype)


def number(x: float) -> str:
    """A float32 constant; Triton would take what is too small or too large for float32 as float64."""
    with np.errstate(over="ignore"):
        value = np.float32(x)
    if not np.isfinite(value):
        return f'float("{value!s}")'
    return str(value) if value == 0 or abs(value) >= 2.0**-126 else f"tl.full((), {value!s}, tl.float32)"


def constant(x: float, dtype: str) -> str:
    """A scalar of a dtype, as it is computed with."""
    kind = DTYPES[dtype].kind
    if kind == "f":
        return f"tl.full((), {number(x)}, tl.float32)"
    return f"tl.full((), {int(x != 0 if kind == 'b' else x)}, {'tl.int1' if kind == 'b' else ELEMENTS[dtype][0]})"


def together(dtypes: Iterable[str]) -> str:
    """The dtype in which values of these meet: float32 beside any float, else numpy's rule; bools count as i32."""
    found = {"i32" if d == "bool" else d for d in dtypes}
    if "f32" in found:
        return "f32"
    name = np.result_type(*(DTYPES[d].np for d in sorted(found))).name
    return next((d.name for d in DTYPES.values() if d.numpy == name), "f32")


def fold(e: E) -> E:
    """The expression with operations on constants done, in float32."""
    if e.fn in ("arg", "const"):
        return e
    args = tuple(fold(a) for a in e.args)
    if any(a.fn != "const" for a in args) or e.fn.startswith("row_"):
        return E(e.fn, args)
    with np.errstate(all="ignore"):
        return E("const", (float(NUMPY[e.fn](*(np.float32(a.args[0]) for a in args))),))


def dtypes(dag: Dag, args: Sequence[str]) -> list[str]:
    """The dtype of every node, given the stored dtypes of the arguments."""
    out: list[str] = []
    for i, (fn, given) in enumerate(dag.nodes):
        below = [out[o] for o in dag.operands(i)]
        if fn == "arg":
            out.append(compute_dtype(args[int(given[0])]))
        elif fn in COMPARE or fn in LOGIC:
            out.append("bool")
        elif fn == "const" or fn in FLOAT or fn.startswith("row_"):
            out.append("f32")
        elif fn == "select":
            out.append(below[1] if below[1] == below[2] else together(below[1:]))
        else:
            out.append(together(below))
    return out


def statement(dag: Dag, i: int, names: Mapping[int, str], kinds: Sequence[str]) -> str:
    """The right-hand side of node `i`, which is neither an argument nor a reduction."""
    fn, args = dag.nodes[i]
    if fn == "const":
        return number(args[0])
    below = dag.operands(i)
    if fn in LOGIC:
        want = ["bool"] * len(below)
    elif fn in COMPARE:
        want = [together(kinds[b] for b in below)] * 2
    elif fn == "select":
        want = ["bool", kinds[i], kinds[i]]
    else:
        want = [kinds[i]] * len(below)
    if fn == "pow":  # the function takes values, not literals
        names = {b: f"tl.full((), {names[b]}, tl.float32)" if dag.nodes[b][0] == "const" else names[b] for b in below}
    literal = [dag.nodes[b][0] == "const" for b in below]
    given = [
        names[b] if c and w == "f32" else convert(names[b], kinds[b], w)
        for b, w, c in zip(below, want, literal, strict=True)
    ]
    return _template(fn, kinds[i]).format(*given)


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
    """The jitted functions that these primitives call."""
    table = {**HELPERS, **INTERPRETED} if interpret else HELPERS
    return "\n\n".join(table[fn].strip("\n") + "\n" for fn in sorted(set(fns)) if fn in table)


def inline(e: E, args: Sequence[str]) -> tuple[list[str], str]:
    """(statements, value) of an expression over float32 values called `args`, for epilogues. `helpers` of the
    expression's primitives go before the entry."""
    dag = Dag()
    root = dag.add(fold(e))
    kinds = dtypes(dag, ["f32"] * len(args))
    names: dict[int, str] = {}
    lines = []
    for i in dag.below([root]):
        fn, given = dag.nodes[i]
        if fn == "arg":
            names[i] = args[int(given[0])]
        elif fn == "const":
            names[i] = statement(dag, i, names, kinds)
        else:
            lines.append(f"e{i} = {statement(dag, i, names, kinds)}")
            names[i] = f"e{i}"
    return lines, convert(names[root], kinds[root], "f32")
