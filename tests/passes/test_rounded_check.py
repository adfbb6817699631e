"""`llmc opt --rounded`: changes of rounding that float64 does not show."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from llmc.check.compare_modules import compare
from llmc.check.compare_outputs import unit_of
from llmc.cli import main
from llmc.diagnostics import Diagnostic
from llmc.ir.ops import OPS
from llmc.ir.text import parse

HEAD = "sym T in [1, 64]\ngraph @main(%x: bf16[T, 64], %y: bf16[T, 64]) {\n"
WIDE = (
    HEAD
    + """  %a = cast(%x) {dtype="f32"} : f32[T, 64]
  %b = cast(%y) {dtype="f32"} : f32[T, 64]
  %c = mul(%a, %b) : f32[T, 64]
  %d = exp(%c) : f32[T, 64]
  return %d
}
"""
)
NARROW = (
    HEAD
    + """  %a = mul(%x, %y) : bf16[T, 64]
  %b = cast(%a) {dtype="f32"} : f32[T, 64]
  %d = exp(%b) : f32[T, 64]
  return %d
}
"""
)


def test_float64_does_not_show_a_product_that_is_rounded() -> None:
    (compared,) = compare(parse(WIDE, OPS), parse(NARROW, OPS))
    assert compared.worst == 0 and compared.rounding is None


def test_a_rounding_error_that_grows_is_refused() -> None:
    with pytest.raises(Diagnostic, match=r"E425.*rounding error of output 0 \(f32\)"):
        compare(parse(WIDE, OPS), parse(NARROW, OPS), rounded=True)


def test_a_smaller_rounding_error_is_reported() -> None:
    (compared,) = compare(parse(NARROW, OPS), parse(WIDE, OPS), rounded=True)
    rounding = compared.rounding
    assert rounding is not None and 1e-4 < rounding.before < 0.1 and rounding.after < 1e-6
    assert rounding.changed > 0.5 and "rounded: error" in str(compared)
    (same,) = compare(parse(WIDE, OPS), parse(WIDE, OPS), rounded=True)
    assert same.rounding is not None and same.rounding.changed == 0 and same.rounding.before == same.rounding.after


def test_the_unit_is_that_of_the_coarsest_dtype() -> None:
    assert unit_of(parse(WIDE, OPS).graphs["main"]) == 2.0**-23
    assert unit_of(parse(NARROW, OPS).graphs["main"]) == 2.0**-7


def test_the_command_compares_both_ways(tmp_path: Path) -> None:
    file, out = tmp_path / "a.llir", io.StringIO()
    file.write_text(NARROW)
    assert main(["opt", str(file), "-p", "canonicalize", "--rounded"], out) == 0
    (line,) = [x for x in out.getvalue().splitlines() if x.startswith("// check")]
    assert "largest difference is 0.0e+00; rounded: error" in line and "0.0% of the elements changed" in line


def test_the_serving_step_is_compared_with_the_prompt_graph_in_both_ways(tmp_path: Path) -> None:
    """@main becomes @step and @decode; their results are log-probabilities in f32 of a model in bfloat16."""
    model = Path(__file__).resolve().parents[2] / "examples" / "demo-model-small"
    from llmc.frontend.trace_model import trace
    from llmc.ir.text import show

    file, out = tmp_path / "a.llir", io.StringIO()
    file.write_text(show(trace(model, layers=1).module))
    assert main(["opt", str(file), "-p", "canonicalize, fuse-norm, fuse-rope, page-attention", "--rounded"], out) == 0
    lines = [x for x in out.getvalue().splitlines() if x.startswith("// check")]
    assert lines and all("2 outputs agree" in x and "rounded: error" in x for x in lines)


LIFTED = """sym T in [1, 64]
graph @main(%x: f32[T, 64], %gain: weight f32[64], %w.swapped: weight bf16[64, 32]) {
  %a = mul(%x, %gain) : f32[T, 64]
  %b = cast(%w.swapped) {dtype="f32"} : f32[64, 32]
  %c = matmul(%a, %b) : f32[T, 32]
  return %c
}
graph @weights(%gain: weight f32[64], %w: weight bf16[32, 64]) {
  %w.swapped = transpose(%w) {perm=[1, 0]} : bf16[64, 32]
  return %gain, %w.swapped
}
"""


def test_stages_with_a_graph_of_weights_are_compared() -> None:
    """Both versions read what @weights computes: a change there shows in @main."""
    (same,) = compare(parse(LIFTED, OPS), parse(LIFTED, OPS), rounded=True)
    assert same.graph == "main" and same.worst == 0
    assert same.rounding is not None and same.rounding.before < 1e-5
    doubled = LIFTED.replace(
        "%w.swapped = transpose(%w)",
        "%two = add(%w, %w) : bf16[32, 64]\n  %w.swapped = transpose(%two)",
    )
    with pytest.raises(Diagnostic, match=r"E425.*@main: output 0"):
        compare(parse(LIFTED, OPS), parse(doubled, OPS))


def test_a_stored_stage_after_packing_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`llmc opt --check` runs a pass on a stage that has @weights."""
    stage = tmp_path / "16-lift-weights.llir"
    stage.write_text(LIFTED)
    assert main(["opt", str(stage), "-p", "canonicalize, dce", "--check", "--rounded"]) == 0
    assert "@main: 1 output agrees" in capsys.readouterr().out
