"""The op: type rule, attributes, reference, cost, documentation and example operands."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmc import op


def _example(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any]]:
    x, w = rng.standard_normal((5, 24)).astype(np.float32), rng.standard_normal(24).astype(np.float32)
    return [x, np.array([4, -1, 0, 4], np.int32), w], {"eps": 1e-5}


@op(
    "(x: f[n, d], rows: i[*r], w: f[d]) -> x[*r, d]",
    flops="4*r*d",
    bytes="2*r*d*bytes_x + d*bytes_w + r*bytes_rows",
    example=_example,
)
def take_norm(x: Any, rows: Any, w: Any, *, eps: float) -> Any:
    """rms_norm(take(x, rows), w): normalizes rows of x selected by index; a negative index yields a row of zeros."""
    taken = np.where((rows >= 0)[..., None], x[np.maximum(rows, 0)], 0)
    return taken / np.sqrt(np.mean(taken * taken, -1, keepdims=True) + eps) * w
