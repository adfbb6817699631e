"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): angle tables and the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..opdef import OpDef, op
from ..signature import Mismatch
from ..types import Type


def _tables_example(rng: Any) -> Any:
    return [rng.random(4).astype(np.float32), rng.integers(0, 50, 6)], {"scaling": 1.0, "dtype": "f32"}


@op("(inv_freq: f[h], pos: i[t]) -> (cos: dtype[t, h], sin: dtype[t, h])", flops="4*t*h", example=_tables_example)
def rope_tables(inv_freq: Any, pos: Any, *, scaling: float, dtype: str) -> Any:
    """cos and sin of pos * inv_freq (radians, one column a frequency), times the scaling of YaRN-like types."""
    angle = pos[:, None].astype(inv_freq.dtype) * inv_freq
    return np.cos(angle) * scaling, np.sin(angle) * scaling


def _rope_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    d, h = env["d"].const, env["h"].const
    if d is None or h is None or 2 * h > d:
        raise Mismatch(f"{env['h']} frequencies rotate {env['h'] * 2} of {env['d']} elements")
    return [env["x"]]


def _rope_example(rng: Any) -> Any:
    angle = rng.uniform(0, 6, (5, 3))
    return [rng.standard_normal((5, 2, 8)).astype(np.float32), np.cos(angle), np.sin(angle)], {}


@op(
    "(x: f[t, n, d], cos: f[t, h], sin: f[t, h]) -> x[t, n, d]",
    infer=_rope_type,
    flops="3*t*n*d",
    example=_rope_example,
)
def rope(x: Any, cos: Any, sin: Any, *, interleaved: bool = False) -> Any:
    """Rotate the first 2h elements of every head by the position's angles; the rest pass through. Pairs are (i, i + h),
    or (2i, 2i + 1) when interleaved."""
    h = cos.shape[-1]
    c, s = cos[:, None, :], sin[:, None, :]
    out = np.array(x)
    a, b = (
        (np.s_[..., 0 : 2 * h : 2], np.s_[..., 1 : 2 * h : 2])
        if interleaved
        else (np.s_[..., :h], np.s_[..., h : 2 * h])
    )
    out[a] = x[a] * c - x[b] * s
    out[b] = x[b] * c + x[a] * s
    return out


OPS = tuple(v for v in globals().values() if isinstance(v, OpDef))
