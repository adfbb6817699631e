"""Mixture of experts, as one op (`moe`) or as several (`moe_route`, `moe_up`, `moe_down`, `moe_combine`).

The first three of these work on (token, expert) pairs sorted by expert. `moe_gather_up` and `moe_gather_down` replace
all four for few tokens, whose pairs need no sorting. Ordinary ops before them select the experts. The attribute `body`
is the activation between an expert's two products: a scalar expression of the gate value a0 and the up value a1. If it
does not read a1, the experts have no gate: gate_up has the rows of one product, a0. Biases have one row per expert;
either both products have one or neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llmc.ir import contents
from llmc.ir.contents import Drawing, Shape
from llmc.ir.dim import Dim
from llmc.ir.opdef import op
from llmc.ir.ops.common import NUMPY
from llmc.ir.ops.reduce import row_expr, topk_map
from llmc.ir.scalar import E, evaluate, parse_expr, walk
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type, tensor

SWIGLU = "mul(mul(a0, sigmoid(a0)), a1)"


def gate(text: str) -> E:
    """Parse a `body`; raises Mismatch if it is malformed or is not a pointwise expression of a0 and a1."""
    try:
        e = parse_expr(text)
    except ValueError as error:
        raise Mismatch(str(error)) from None
    if rejected := [x for x in walk(e) if x.fn.startswith("row_") or (x.fn == "arg" and x.args[0] > 1)]:
        raise Mismatch(
            f"body {text!r} uses {rejected[0]}; only pointwise expressions of a0 (gate) and a1 (up) are allowed"
        )
    return e


def parts(body: str) -> int:
    """Return the number of row blocks of gate_up: 2, gate and up, if the activation reads both values; otherwise 1."""
    return 1 + any(x.fn == "arg" and x.args[0] == 1 for x in walk(gate(body)))


def _columns(m: Dim, body: str) -> Dim:
    """Return the columns of the second product, for m rows of gate_up; raises Mismatch if there are none."""
    if (columns := m.divide(parts(body))) is None:
        raise Mismatch(f"gate_up has {m} rows per expert; with a gate, their number must be even")
    return columns


def _moe_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    if ("gate_bias" in env) != ("down_bias" in env):
        raise Mismatch("only one of gate_bias and down_bias is present; pass both or neither")
    count = parts(attrs["body"])
    if env["m"] != env["i"] * count:
        times = "twice" if count == 2 else "as many as"
        raise Mismatch(f"gate_up has {env['m']} rows per expert, expected {times} the {env['i']} columns of down")
    return [env["x"]]


@op(
    "(x: f[t, d], idx: i[t, k], weights: f[t, k], gate_up: fq[e, m, d], down: fq[e, d, i], gate_bias?: f[e, m],"
    " down_bias?: f[e, d]) -> x[t, d]",
    infer=_moe_type, flops="2*t*k*m*d + 2*t*k*i*d",
    holds={"idx": contents.index("gate_up", distinct=True), "weights": contents.probability},
    example={"t": 7, "d": 8, "k": 2, "e": 4, "m": 12, "i": 6},
)  # fmt: skip
def moe(
    x: Any, idx: Any, weights: Any, gate_up: Any, down: Any, gate_bias: Any = None, down_bias: Any = None, *,
    body: str = SWIGLU,
) -> Any:  # fmt: skip
    """Sum of weight * down(body(gate(x), up(x))) over each token's k experts.

    The first i rows of gate_up are the gate. Without a gate, gate_up has i rows, and `body` reads only their products.
    """
    out = np.zeros_like(x)
    for expert in np.unique(idx):
        t, j = np.nonzero(idx == expert)
        h = _gated(x[t], gate_up, gate_bias, expert, body)
        y = h @ down[expert].T + (0 if down_bias is None else down_bias[expert])
        np.add.at(out, t, y * weights[t, j, None])
    return out


def _gated(x: Any, gate_up: Any, bias: Any, expert: int, body: str) -> Any:
    """Return the input of an expert's second product, for rows x."""
    sums = x @ gate_up[expert].T + (0 if bias is None else bias[expert])
    return evaluate(gate(body), NUMPY, np.split(sums, parts(body), axis=-1))


def _route_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    if attrs["experts"] < 1:
        raise Mismatch("experts must be at least 1")
    return [tensor("i32", env["t"] * env["k"]), tensor("i32", attrs["experts"] + 1)]


@op(
    "(idx: i[t, k]) -> idx[...], idx[...]", infer=_route_type, holds={"idx": contents.index("experts", distinct=True)},
    example={"t": 7, "k": 2, "experts": 6, "idx": "i32"},
)  # fmt: skip
def moe_route(idx: Any, *, experts: int) -> Any:
    """Sort the pairs t*k+j (token t, its j-th expert) by expert, stably; return the order and each expert's start."""
    flat = idx.reshape(-1)
    order = np.argsort(flat, kind="stable")
    return order, np.searchsorted(flat[order], np.arange(experts + 1))


def _topk_route_types(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x, k = env["x"], attrs["k"]
    row_expr(attrs["before"]), row_expr(attrs["after"])
    if env["t"].const != 1 or not 1 <= k <= (env["n"].const or k):
        raise Mismatch(f"{k} of {env['n']} experts for {env['t']} tokens; it routes one token")
    return [tensor(attrs["dtype"] or x.dtype, 1, k), tensor("i32", k), tensor("i32", env["n"] + 1)]


@op(
    "(x: f[t, n]) -> (values: x[t, k], order: i32[k], starts: i32[m])", infer=_topk_route_types, flops="6*n",
    example={"t": 1, "n": 9, "k": 4, "after": "div(a0, row_sum(a0))"},
)  # fmt: skip
def topk_route(x: Any, *, k: int, before: str = "a0", after: str = "a0", dtype: str = "") -> Any:
    """topk_map of the scores of one token over n experts, followed by moe_route of the indices."""
    values, indices = topk_map.ref(x, k=k, before=before, after=after)
    return values, *moe_route.ref(indices, experts=x.shape[-1])


def up_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    """Return the type of moe_up's result, also over codes: a row for each pair."""
    inner = _columns(env["m"], attrs["body"])
    if env["p"] != env["t"] * attrs["k"] or env["s"] != env["e"] + 1:
        raise Mismatch(
            f"{env['e']} experts, {env['p']} pairs of {env['t']} tokens, {env['s']} starts: "
            f"pairs must be {attrs['k']} per token, starts one more than experts"
        )
    return [env["x"].with_shape(env["p"], inner)]


def checked(check: Callable[[dict[str, Any], Mapping[str, Any], Dim], None], rule: Any, columns: str) -> Any:
    """Return the type rule `rule` with a check of the stack; `columns` names the size of a row of it."""

    def infer(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
        check(env, attrs, env[columns])
        return list(rule(env, attrs))

    return infer


def _routed(d: Drawing) -> tuple[Any, Any]:
    """Return the results of moe_route for random experts; `order` and `starts` of one node agree."""
    experts, pairs = d.shapes["starts"][0] - 1, d.shapes["order"][0]
    return tuple(d.shared("routed", lambda: moe_route.ref(d.rng.integers(0, experts, pairs), experts=experts)))


def drawn_order(d: Drawing, shape: Shape) -> Any:
    """Return the pairs, sorted by expert."""
    return _routed(d)[0]


def drawn_starts(d: Drawing, shape: Shape) -> Any:
    """Return the first pair of each expert, and the number of pairs."""
    return _routed(d)[1]


@op(
    "(x: f[t, d], order: i[p], starts: i[s], gate_up: fq[e, m, d], bias?: f[e, m]) -> x[...]", infer=up_type,
    flops="2*p*m*d", holds={"order": drawn_order, "starts": drawn_starts},
    example={"t": 7, "d": 8, "p": 14, "s": 7, "e": 6, "m": 10, "k": 2},
)  # fmt: skip
def moe_up(
    x: Any, order: Any, starts: Any, gate_up: Any, bias: Any = None, *, k: int, body: str = SWIGLU
) -> Any:  # fmt: skip
    """body(gate(x), up(x)) for every pair, in the order of moe_route; order[r] belongs to token order[r] // k."""
    out = np.zeros((len(order), gate_up.shape[1] // parts(body)), x.dtype)
    for expert in range(len(gate_up)):
        r = slice(starts[expert], starts[expert + 1])
        out[r] = _gated(x[order[r] // k], gate_up, bias, expert, body)
    return out


def down_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    """Return the type of moe_down's result, also over codes: a row for each token and expert."""
    if env["p"] != env["t"] * env["k"] or env["s"] != env["e"] + 1:
        raise Mismatch(f"{env['p']} pairs for {env['t']} x {env['k']} weights, {env['s']} starts of {env['e']} experts")
    return [tensor(attrs.get("dtype") or "f32", env["t"], env["k"], env["d"])]


@op(
    "(h: f[p, i], order: i[p], starts: i[s], down: fq[e, d, i], weights: f[t, k], bias?: f[e, d]) -> h[...]",
    infer=down_type, flops="2*p*d*i",
    holds={"order": drawn_order, "starts": drawn_starts, "weights": contents.probability},
    example={"p": 14, "i": 5, "s": 7, "e": 6, "d": 8, "t": 7, "k": 2},
)  # fmt: skip
def moe_down(
    h: Any, order: Any, starts: Any, down: Any, weights: Any, bias: Any = None, *, dtype: str = ""
) -> Any:  # fmt: skip
    """weight * down(h) for every pair, scattered to the pair's token and position k.

    dtype: of the result, f32 by default.
    """
    out = np.zeros((len(order), down.shape[1]), h.dtype)
    for expert, w in enumerate(down):
        r = slice(starts[expert], starts[expert + 1])
        out[order[r]] = h[r] @ w.T + (0 if bias is None else bias[expert])
    return out.reshape(*weights.shape, -1) * weights[..., None]


def _combined_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    residual = env.get("residual")
    return [tensor(attrs["dtype"] or (residual or env["y"]).dtype, env["t"], env["d"])]


@op(
    "(y: f[t, k, d], residual?: f[t, d]) -> y[t, d]", infer=_combined_type, flops="t*k*d",
    example={"t": 7, "k": 3, "d": 8},
)  # fmt: skip
def moe_combine(y: Any, residual: Any = None, *, dtype: str = "") -> Any:
    """The sum of a token's k results, and of `residual`.

    dtype: of the result; by default that of `residual`, else that of y.
    """
    return y.sum(1) + (0 if residual is None else residual)


def _gather_up_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    """Return the type of moe_gather_up's result: a row for each pair."""
    return [env["x"].with_shape(env["t"] * env["k"], _columns(env["m"], attrs["body"]))]


_CHOSEN = contents.index("gate_up", distinct=True)


@op(
    "(x: f[t, d], idx: i[t, k], gate_up: f[e, m, d], bias?: f[e, m]) -> x[...]", infer=_gather_up_type,
    flops="2*t*k*m*d", holds={"idx": _CHOSEN}, example={"t": 2, "d": 8, "k": 3, "e": 6, "m": 10},
)  # fmt: skip
def moe_gather_up(x: Any, idx: Any, gate_up: Any, bias: Any = None, *, body: str = SWIGLU) -> Any:
    """moe_up for pairs in the order of the tokens: row t*k+j is body(gate(x), up(x)) of token t and its j-th expert."""
    out = np.zeros((idx.size, gate_up.shape[1] // parts(body)), x.dtype)
    for p, expert in enumerate(idx.reshape(-1)):
        out[p] = _gated(x[p // idx.shape[1]], gate_up, bias, expert, body)
    return out


@op(
    "(x: f[t, d], idx: i[t, k], gate_up: f[e, m, d], gain: f[d], bias?: f[e, m]) -> x[...]", infer=_gather_up_type,
    flops="2*t*k*m*d + 4*t*d", holds={"idx": _CHOSEN},
    example={"t": 2, "d": 8, "k": 3, "e": 6, "m": 10, "eps": 1e-5},
)  # fmt: skip
def norm_moe_gather_up(
    x: Any, idx: Any, gate_up: Any, gain: Any, bias: Any = None, *, eps: float, body: str = SWIGLU
) -> Any:
    """moe_gather_up of rms_norm(x, gain), with the norm unrounded."""
    rms = np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
    return moe_gather_up.ref(x * gain / rms, idx, gate_up, *([] if bias is None else [bias]), body=body)


def _gather_down_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    if env["p"] != env["t"] * env["k"]:
        raise Mismatch(f"{env['p']} pairs for {env['t']} x {env['k']} weights")
    return [env["residual"]]


@op(
    "(h: f[p, i], idx: i[t, k], down: f[e, d, i], weights: f[t, k], residual: f[t, d], bias?: f[e, d])"
    " -> residual[t, d]",
    infer=_gather_down_type, flops="2*p*d*i",
    holds={"idx": contents.index("down", distinct=True), "weights": contents.probability},
    example={"p": 6, "i": 5, "e": 6, "d": 8, "t": 2, "k": 3},
)  # fmt: skip
def moe_gather_down(h: Any, idx: Any, down: Any, weights: Any, residual: Any, bias: Any = None) -> Any:
    """residual plus the sum of weight * down(h) over a token's k experts; h is in the order of the tokens."""
    out = residual.copy()
    for p, expert in enumerate(idx.reshape(-1)):
        y = down[expert] @ h[p] + (0 if bias is None else bias[expert])
        out[p // idx.shape[1]] += weights.reshape(-1)[p] * y
    return out
