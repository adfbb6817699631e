"""Mixture of experts: the experts are one op; routing is ordinary ops before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..opdef import OpDef, op
from ..scalar import E, evaluate
from ..signature import Mismatch
from ..types import Type
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


OPS = tuple(v for v in globals().values() if isinstance(v, OpDef))
