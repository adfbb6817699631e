"""Ops that are declared by scalar expressions outside of llmc/ir/ops, as packages declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.extend import OPS, Ctx, arg, call, op, pointwise
from llmc.extension import load
from llmc.ir.interp import run
from llmc.ir.scalar import E
from llmc.ir.text import parse
from llmc.passes.pipeline import parse_pipeline, run_pipeline


def _expression(attrs: Mapping[str, Any]) -> E:
    return arg(0) / call("row_max", call("abs", arg(0))) * attrs["to"]


@op("(x: f[*b, d]) -> x[*b, d]", flops="3*b*d", scalar=_expression, example={"*b": (3,), "d": 8, "to": 1.0})
def scale_to(x: Any, *, to: float) -> Any:
    """Rows of x, scaled so that their largest magnitude is `to`."""
    return x / np.max(np.abs(x), -1, keepdims=True) * to


softsign = pointwise("softsign", lambda a: a / (1 + call("abs", a)), "a / (1 + |a|)")
OPSET = OPS | {"scale_to": scale_to, "softsign": softsign}
TEXT = """graph @main(%x: f32[4, 8], %w: weight f32[8, 8], %v: weight f32[8, 8]) {
  %a = linear(%x, %w) : f32[4, 8]
  %b = softsign(%a) : f32[4, 8]
  %c = linear(%b, %v) : f32[4, 8]
  %d = scale_to(%c) {to=2.0} : f32[4, 8]
  return %d
}
"""


def test_a_pointwise_op_becomes_an_epilogue_and_a_row_op_does_not() -> None:
    m = parse(TEXT, OPSET)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8, 8), (8, 8))]
    (before,) = run(m.graphs["main"], inputs)
    run_pipeline(m, parse_pipeline("fuse-linear", load().passes), Ctx(OPSET))
    assert [n.op.name for n in m.graphs["main"].nodes] == ["linear_map", "linear", "scale_to"]
    (after,) = run(m.graphs["main"], inputs)
    np.testing.assert_allclose(after, before, rtol=1e-5)
