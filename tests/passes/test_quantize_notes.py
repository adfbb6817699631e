"""Weights whose columns are not whole groups stay as they are, and the compile says so."""

from __future__ import annotations

from llmc.extension import load
from llmc.ir.text import parse
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline

GRAPH = """
sym T in [1, 64]
graph @main(%x: f32[T, 192], %w: weight f32[192, 192], %v: weight f32[128, 192], %h: weight f32[96, 128]) {
  %a = linear(%x, %w) : f32[T, 192]
  %b = linear(%a, %w) : f32[T, 192]
  %c = linear(%b, %v) : f32[T, 128]
  %d = linear(%c, %h) : f32[T, 96]
  return %d
}
"""


def notes(pipeline: str) -> list[str]:
    registry = load()
    context = Ctx(registry.opset(), registry.target("cpu:native"), registry.kernels)
    run_pipeline(parse(GRAPH, registry.opset()), parse_pipeline(pipeline, registry.passes), context)
    return [note for note in context.notes if "quantised" in note]


def test_weights_that_are_not_whole_groups_are_counted_once_with_the_remedy() -> None:
    (note,) = notes("quantize{weights=int4, head=int8}")
    assert note.startswith("2 weights are not quantised: 192 columns are not groups of 128") and "--group-size" in note


def test_whole_groups_are_no_note() -> None:
    assert notes("quantize{weights=int4, group=64}") == notes("quantize{weights=int8}") == []
