"""Which random weights are negative."""

from __future__ import annotations

from llmc.artifact.weight_signs import MAX_BYTES, negative_weights
from llmc.ir.graph import Builder, Graph
from llmc.ir.ops import OPS
from llmc.ir.types import tensor


def test_rates_of_decay_are_negative_and_nothing_else_is() -> None:
    g = Graph("weights")
    b = Builder(g, OPS)
    rate, matrix = g.input("A_log", tensor("f32", 5)), g.input("A_log_of_channels", tensor("bf16", 5, 3))
    norm, large = g.input("norm", tensor("bf16", 7)), g.input("w", tensor("f32", MAX_BYTES // 4, 2))
    g.outputs = [b.neg(b.exp(rate)), b.neg(b.exp(matrix)), b.exp(norm), b.neg(large), norm]
    for v, name in zip(g.outputs, ("rate", "rates", "gain", "large", "norm"), strict=True):
        v.name = name
    assert negative_weights(g) == ("rate", "rates")
