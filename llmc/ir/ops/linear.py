"""Matrix products. A factor may be a quantised type, or hold the codes of one (i8, f8e4m3, f8e4m3fnuz).

The scales of codes are applied by the epilogue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir.contents import Content, factor
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.opdef import op
from llmc.ir.ops.common import NUMPY, broadcast_shapes
from llmc.ir.scalar import evaluate, parse_expr, walk
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type

FACTORS: Mapping[str, Content] = MappingProxyType({"x": factor("x"), "w": factor("w")})


@op(
    "(x: f[*b, k], w: fq[n, k]) -> x[*b, n]",
    flops="2*b*n*k",
    oracle="torch.nn.functional.linear",
    example={"*b": (3,), "k": 5, "n": 7},
)
def linear(x: Any, w: Any) -> Any:
    """x @ w.T. A quantised w is dequantised first, according to its format."""
    return x @ w.T


@op("(a: f[*b, m, k], c: f[*b, k, n]) -> a[*b, m, n]", flops="2*b*m*k*n", oracle="torch.matmul")
def matmul(a: Any, c: Any) -> Any:
    """Batched matrix product; the leading axes must be equal."""
    return a @ c


def product(x: Any, w: Any) -> Any:
    """x @ w.T; sums of integers are exact."""
    if x.dtype.kind == w.dtype.kind == "i":
        x, w = x.astype(np.float64), w.astype(np.float64)
    return x @ w.T


def _linear_map_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x, parts, extras = env["x"], attrs["parts"], env["extras"]
    if not attrs["dtype"] and (DTYPES[x.dtype].kind != "f" or DTYPES[x.dtype].bits < 16):
        raise Mismatch(f"x is {x}: the attribute dtype of the result is required")
    n = rows_per_part(env["m"], parts)
    return epilogue_type(parts, extras, attrs["body"], Type(attrs["dtype"] or x.dtype, (*env["*b"], n)))


def rows_per_part(m: Dim, parts: int) -> Dim:
    """Return m / parts; raises Mismatch if m rows of a weight do not split into `parts` equal parts."""
    n = m.divide(parts) if parts > 0 else None
    if n is None:
        raise Mismatch(f"{m} rows do not split into {parts} parts")
    return n


def epilogue_type(accumulators: int, extras: Sequence[Type], body: str, result: Type) -> list[Type]:
    """Check an epilogue over `accumulators` values and the extras; return its result types. Raises Mismatch."""
    check_epilogue(parse_expr(body), accumulators + len(extras))
    for e in extras:
        if broadcast_shapes([result.shape, e.shape]) != result.shape:
            raise Mismatch(f"extra {e} does not broadcast to [{', '.join(map(str, result.shape))}]")
    return [result]


def check_epilogue(body: Any, arity: int) -> None:
    """Raise Mismatch unless the body is pointwise over `arity` operands: an epilogue computes on one tile."""
    for e in walk(body):
        if e.fn.startswith("row_"):
            raise Mismatch(f"{e.fn} in an epilogue, which computes on one tile, not on whole rows")
        if e.fn == "arg" and e.args[0] >= arity:
            raise Mismatch(f"the body reads a{e.args[0]}, but there are {arity} values")


def split_parts(acc: Any, parts: int) -> list[Any]:
    """Split an accumulator [..., parts * n] into its parts."""
    return np.split(acc, parts, axis=-1)


@op(
    "(x: t[*b, k], w: tq[m, k], extras*: f[...]) -> x[...]", infer=_linear_map_type, flops="2*b*m*k",
    holds=FACTORS, example={
        "*b": (3,), "k": 5, "m": 14, "extras": [(3, 7)], "parts": 2, "body": "add(mul(mul(a0, sigmoid(a0)), a1), a2)",
    },
)  # fmt: skip
def linear_map(x: Any, w: Any, *extras: Any, parts: int, body: str, dtype: str = "") -> Any:
    """A product with a pointwise epilogue.

    The `parts` equal row blocks of w give accumulators a0 .. a{parts-1} of shape [*b, n]; the extras, broadcast to that
    shape, follow as a{parts} and so on. The result is the body, rounded once to dtype (x's if empty). Gate and up
    projection with SiLU: parts=2, body "mul(mul(a0, sigmoid(a0)), a1)". Residual: parts=1, body "add(a0, a1)".
    """
    return evaluate(parse_expr(body), NUMPY, [*split_parts(product(x, w), parts), *extras])


@op(
    "(x: f[*b, k], w: fq[m, k], gain: f[k], extras*: f[...]) -> x[...]", infer=_linear_map_type,
    flops="2*b*m*k + 4*b*k", holds=FACTORS, example={
        "*b": (3,), "k": 5, "m": 14, "extras": [(3, 7)], "eps": 1e-5, "parts": 2,
        "body": "add(mul(mul(a0, sigmoid(a0)), a1), a2)",
    },
)  # fmt: skip
def norm_linear(
    x: Any, w: Any, gain: Any, *extras: Any, eps: float, parts: int = 1, body: str = "a0", dtype: str = ""
) -> Any:
    """linear_map of rms_norm(x, gain), with the norm unrounded.

    Each accumulator is sum(w * gain * x) / sqrt(mean(x^2) + eps), so that the product can start before the norm's sum
    is complete.
    """
    rms = np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
    return evaluate(parse_expr(body), NUMPY, [*split_parts((x * gain) @ w.T / rms, parts), *extras])


def _linear_split_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    k, splits = env["k"], attrs["splits"]
    if splits < 1 or k.divide(splits) is None:
        raise Mismatch(f"{k} columns do not split into {splits} parts")
    return [Type("f32", (Dim.of(splits), *env["*b"], env["n"]))]


@op(
    "(x: t[*b, k], w: t[n, k]) -> f32[splits, *b, n]", infer=_linear_split_type, flops="2*b*n*k",
    holds=FACTORS, example={"*b": (3,), "k": 12, "n": 7, "splits": 3},
)  # fmt: skip
def linear_split(x: Any, w: Any, *, splits: int) -> Any:
    """linear with k divided into `splits` equal parts, one partial product each; their sum is the product."""
    return np.stack([product(a, b) for a, b in zip(np.split(x, splits, -1), np.split(w, splits, -1), strict=True)])


def _linear_combine_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    return epilogue_type(1, env["extras"], attrs["body"], Type(attrs["dtype"], (*env["*b"], env["n"])))


@op(
    "(partial: f32[s, *b, n], extras*: f[...]) -> dtype[*b, n]", infer=_linear_combine_type, flops="s*b*n",
    example={"s": 4, "*b": (3,), "n": 7, "extras": [(3, 7)], "dtype": "f32", "body": "mul(a0, a1)"},
)  # fmt: skip
def linear_combine(partial: Any, *extras: Any, dtype: str, body: str = "a0") -> Any:
    """Sum the parts of linear_split in order, and apply the epilogue of linear_map to the sum a0 and the extras."""
    return evaluate(parse_expr(body), NUMPY, [partial.sum(0), *extras])
