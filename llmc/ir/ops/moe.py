"""Mixture of experts: the experts are one op, or three that work on the pairs of a token and an expert in the order of
the experts (`moe_route`, `moe_up`, `moe_down`); choosing the experts is ordinary ops before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..opdef import OpDef, op
from ..scalar import E, evaluate
from ..signature import Mismatch
from ..types import Type, tensor
from .common import NUMPY
from .pointwise import OPS as POINTWISE

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def activation(name: str) -> E:
    """The expression of an expert's activation; Mismatch for an unknown name."""
    for o in POINTWISE:
        if o.name == name and name in ACTIVATIONS and o.scalar:
            return o.scalar({})
    raise Mismatch(f"activation {name!r}; known: {', '.join(ACTIVATIONS)}")


def _moe_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    activation(attrs["act"])
    if env["m"] != env["i"] * 2:
        raise Mismatch(f"gate_up has {env['m']} rows an expert, down {env['i']} columns: it must be twice as many")
    return [env["x"]]


def _moe_example(rng: Any) -> Any:
    shapes = ((7, 8), (4, 12, 8), (4, 8, 6))
    x, gate_up, down = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    idx = np.stack([rng.permutation(4)[:2] for _ in range(7)])
    return [x, idx, rng.random((7, 2)).astype(np.float32), gate_up, down], {}


@op(
    "(x: f[t, d], idx: i[t, k], weights: f[t, k], gate_up: fq[e, m, d], down: fq[e, d, i]) -> x[t, d]",
    infer=_moe_type, flops="6*t*k*i*d", example=_moe_example,
)  # fmt: skip
def moe(x: Any, idx: Any, weights: Any, gate_up: Any, down: Any, *, act: str = "silu") -> Any:
    """Sum over a token's k experts of weight * down(act(gate(x)) * up(x)); the first i rows of gate_up are the gate."""
    out = np.zeros_like(x)
    e = activation(act)
    for expert in np.unique(idx):
        t, j = np.nonzero(idx == expert)
        gate, up = np.split(x[t] @ gate_up[expert].T, 2, axis=-1)
        y = (evaluate(e, NUMPY, [gate]) * up) @ down[expert].T
        np.add.at(out, t, y * weights[t, j, None])
    return out


def _route_example(rng: Any) -> Any:
    return [np.stack([rng.permutation(6)[:2] for _ in range(7)]).astype(np.int32)], {"experts": 6}


def _route_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    if attrs["experts"] < 1:
        raise Mismatch("there must be an expert")
    return [tensor("i32", env["t"] * env["k"]), tensor("i32", attrs["experts"] + 1)]


@op("(idx: i[t, k]) -> idx[...], idx[...]", infer=_route_type, example=_route_example)
def moe_route(idx: Any, *, experts: int) -> Any:
    """The pairs t*k+j of token t and its j-th expert, expert by expert, tokens in order; where each expert's begin."""
    flat = idx.reshape(-1)
    order = np.argsort(flat, kind="stable")
    return order, np.searchsorted(flat[order], np.arange(experts + 1))


def _up_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    activation(attrs["act"])
    inner = env["m"].divide(2)
    if inner is None or env["p"] != env["t"] * attrs["k"] or env["s"] != env["e"] + 1:
        raise Mismatch(
            f"{env['m']} rows of {env['e']} experts, {env['p']} pairs of {env['t']} tokens, {env['s']} starts: "
            f"rows must be even, pairs {attrs['k']} a token, starts one more than experts"
        )
    return [env["x"].with_shape(env["p"], inner)]


def _up_example(rng: Any) -> Any:
    [idx], attrs = _route_example(rng)
    order, starts = moe_route.ref(idx, **attrs)
    x, gate_up = (rng.standard_normal(s).astype(np.float32) for s in ((7, 8), (6, 10, 8)))
    return [x, order, starts, gate_up], {"k": 2}


@op(
    "(x: f[t, d], order: i[p], starts: i[s], gate_up: fq[e, m, d]) -> x[...]", infer=_up_type, flops="2*p*m*d",
    example=_up_example,
)  # fmt: skip
def moe_up(x: Any, order: Any, starts: Any, gate_up: Any, *, k: int, act: str = "silu") -> Any:
    """act(gate(x)) * up(x) of every pair, in `order`; token order[r] // k is the pair's. See moe_route."""
    out = np.zeros((len(order), gate_up.shape[1] // 2), x.dtype)
    e = activation(act)
    for expert, w in enumerate(gate_up):
        r = slice(starts[expert], starts[expert + 1])
        gate, up = np.split(x[order[r] // k] @ w.T, 2, axis=-1)
        out[r] = evaluate(e, NUMPY, [gate]) * up
    return out


def _down_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    if env["p"] != env["t"] * env["k"] or env["s"] != env["e"] + 1:
        raise Mismatch(f"{env['p']} pairs for {env['t']} x {env['k']} weights, {env['s']} starts of {env['e']} experts")
    return [tensor("f32", env["t"], env["k"], env["d"])]


def _down_example(rng: Any) -> Any:
    [idx], attrs = _route_example(rng)
    order, starts = moe_route.ref(idx, **attrs)
    h, down, weights = (rng.standard_normal(s).astype(np.float32) for s in ((14, 5), (6, 8, 5), (7, 2)))
    return [h, order, starts, down, weights], {}


@op(
    "(h: f[p, i], order: i[p], starts: i[s], down: fq[e, d, i], weights: f[t, k]) -> h[...]", infer=_down_type,
    flops="2*p*d*i", example=_down_example,
)  # fmt: skip
def moe_down(h: Any, order: Any, starts: Any, down: Any, weights: Any) -> Any:
    """weight * down(h) of every pair, put where the pair's token and place are (f32)."""
    out = np.zeros((len(order), down.shape[1]), h.dtype)
    for expert, w in enumerate(down):
        r = slice(starts[expert], starts[expert + 1])
        out[order[r]] = h[r] @ w.T
    return out.reshape(*weights.shape, -1) * weights[..., None]


OPS = tuple(v for v in globals().values() if isinstance(v, OpDef))
