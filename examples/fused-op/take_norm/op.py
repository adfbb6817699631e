"""The op: type rule, attributes, reference, cost, documentation, and what its operands hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmc.extend import contents, op


@op(
    "(x: f[n, d], rows: i[*r], w: f[d]) -> x[*r, d]",
    flops="4*r*d",
    bytes="2*r*d*bytes_x + d*bytes_w + r*bytes_rows",
    holds={"rows": contents.index("x", padding=True)},
    example={"n": 5, "d": 24, "*r": (4,), "eps": 1e-5},
)
def take_norm(x: Any, rows: Any, w: Any, *, eps: float) -> Any:
    """rms_norm(take(x, rows), w): normalizes rows of x selected by index; a negative index yields a row of zeros."""
    taken = np.where((rows >= 0)[..., None], x[np.maximum(rows, 0)], 0)
    return taken / np.sqrt(np.mean(taken * taken, -1, keepdims=True) + eps) * w
