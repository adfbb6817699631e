"""Normalizations over the last axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.ir.opdef import op
from llmc.ir.scalar import E, arg, call


def _rms(attrs: Mapping[str, Any]) -> E:
    x = arg(0)
    return x * call("rsqrt", call("row_mean", x * x) + attrs["eps"]) * arg(1)


def _layer(attrs: Mapping[str, Any]) -> E:
    centred = arg(0) - call("row_mean", arg(0))
    return centred * call("rsqrt", call("row_mean", centred * centred) + attrs["eps"]) * arg(1) + arg(2)


@op(
    "(x: f[*b, d], w: f[d]) -> x[*b, d]",
    flops="4*b*d",
    oracle="torch.nn.functional.rms_norm",
    scalar=_rms,
    example={"*b": (3,), "d": 8, "eps": 1e-5},
)
def rms_norm(x: Any, w: Any, *, eps: float) -> Any:
    """x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w


@op(
    "(x: f[*b, d], w: f[d], b: f[d]) -> x[*b, d]",
    flops="7*b*d",
    oracle="torch.nn.functional.layer_norm",
    scalar=_layer,
    example={"*b": (3,), "d": 8, "eps": 1e-5},
)
def layer_norm(x: Any, w: Any, b: Any, *, eps: float) -> Any:
    """(x - mean) / sqrt(var + eps) * w + b, with the biased variance (Ba et al. 2016, arXiv 1607.06450)."""
    centred = x - np.mean(x, -1, keepdims=True)
    return centred / np.sqrt(np.mean(centred * centred, -1, keepdims=True) + eps) * w + b
