"""Mistakes of an extension's author: each is an error that names the extension's part, the cause and the remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from llmc.cli import _report
from llmc.codegen.kernel import Kernel
from llmc.codegen.launch_plan import emit_graph
from llmc.diagnostics import Diagnostic
from llmc.extension import Extension, combine, extension_at_fault, load
from llmc.ir.graph import Graph, Module
from llmc.ir.interp import run
from llmc.ir.opdef import op
from llmc.ir.text import parse
from llmc.passes.base import Ctx, Pass
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.passes.rewrite import Pat, Rewrite, Simplify, apply, const
from llmc.targets import cpu_targets
from llmc.targets.target import Target

THERE = f"{__name__}:"
TEXT = """sym T in [1, 8]
graph @main(%x: bf16[T, 64], %w: weight bf16[64]) {
  %n = rms_norm(%x, %w) {eps=1e-05} : bf16[T, 64]  // model.norm
  return %n
}
"""
p = Pat()
PATTERN = p.rms_norm(p.x, p.w, eps=p.eps)


@dataclass(frozen=True)
class Outside(Pass):
    """Apply the rewrite that a test sets, or return what it sets."""

    name: ClassVar[str] = "outside"
    made: ClassVar[Callable[[Graph, Ctx], Any]]

    def run(self, m: Module, ctx: Ctx) -> int:
        return type(self).made(m.graphs["main"], ctx)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Misnamed(Pass):
    """A pass that is offered under another name."""

    name: ClassVar[str] = "other"


def not_an_op() -> None:
    """A function that is offered as an op, a pass and a kernel."""


@op("(x: f[n]) -> x[n]")
def wrong_shape(x: Any) -> Any:
    """A reference whose result has another shape than the type rule infers."""
    return x[:-1]


def no_target() -> Any:
    """A target's function that returns something else."""
    return "cpu:mine"


@dataclass(frozen=True)
class Bad(Kernel):
    """A kernel whose methods do what a test sets."""

    does: Any = None

    def reject(self, node: Any, target: Target) -> str | None:
        return self.does.get("reject") if self.does else None

    def schedules(self, node: Any, target: Target) -> list[dict[str, Any]]:
        return self.does.get("schedules", [{}])  # type: ignore[no-any-return]

    def cost_us(self, *args: Any) -> float:
        return self.does.get("cost_us", 0.0)  # type: ignore[no-any-return]

    def emit(self, *args: Any) -> Any:
        return self.does["emit"]()


KERNEL = Bad("other/name", ("rms_norm",))


def of_run(made: Callable[[Graph, Ctx], Any], monkeypatch: pytest.MonkeyPatch) -> Diagnostic:
    """The error of a pipeline with the pass `outside`, which does `made`."""
    monkeypatch.setattr(Outside, "made", staticmethod(made), raising=False)
    registry = combine([*load().extensions, Extension("mine", passes={"outside": THERE + "Outside"})])
    m = parse(TEXT, registry.opset())
    with pytest.raises(Diagnostic) as e:
        run_pipeline(m, parse_pipeline("outside", registry.passes), Ctx(registry.opset()))
    return e.value


def of_rewrite(build: Callable[[Any, Any], Any], **more: Any) -> Callable[[Graph, Ctx], int]:
    return lambda g, ctx: apply(g, [Rewrite("mine", PATTERN, build, **more)], ctx)


@pytest.mark.parametrize(
    "made, words",
    [
        (lambda g, ctx: None, "run returned None, not the number of changes"),
        (of_rewrite(lambda b, m: b.cast(m["x"], dtype="f32")), "bf16[T, 64] would become f32[T, 64]"),
        (of_rewrite(lambda b, m: m["w"]), "bf16[T, 64] would become bf16[64]"),
        (of_rewrite(lambda b, m: b.rms_nrom(m["x"])), "there is no op 'rms_nrom'"),
        (of_rewrite(lambda b, m: m["y"]), "the pattern binds no 'y'; it binds eps, w, x"),
        (of_rewrite(lambda b, m: None), "the new value is None, not a Value"),
        (of_rewrite(lambda b, m: b.rms_norm(m["x"])), "rms_norm"),
        (of_rewrite(lambda b, m: m["x"], when=lambda m: True), "when returned True, not None"),
        (lambda g, ctx: 1 // 0, "ZeroDivisionError"),
    ],
    ids=["none", "dtype", "rank", "builder", "unbound", "no value", "operands", "when", "exception"],
)  # fmt: skip
def test_a_mistake_in_a_pass_names_pass_and_rewrite(made: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = of_run(made, monkeypatch)
    assert error.code == "E427"
    assert words in error.cause
    assert "pass 'outside'" in error.cause and __name__ in error.cause
    if made.__qualname__.startswith("of_rewrite"):
        assert "rewrite 'mine'" in error.cause and "model.norm" in error.cause
    assert "correct the extension" in error.remedy


def test_a_mistake_in_our_own_pass_stays_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outside, "__module__", "llmc.passes.mine")
    monkeypatch.setattr(Outside, "made", staticmethod(lambda g, ctx: None), raising=False)
    with pytest.raises(TypeError):
        run_pipeline(parse(TEXT, load().opset()), [Outside()], Ctx(load().opset()))


@pytest.mark.parametrize(
    "kind, text, words",
    [
        ("passes", "Misnamed", "pass 'it' has the name 'other'; "),
        ("kernels", "KERNEL", "kernel 'it' has the name 'other/name'"),
        ("ops", "wrong_shape", "op 'it' has the name 'wrong_shape'"),
        ("passes", "not_an_op", "not a subclass of llmc.passes.base.Pass"),
        ("kernels", "not_an_op", "not an instance of llmc.codegen.kernel.Kernel"),
        ("ops", "not_an_op", "not an instance of llmc.ir.opdef.OpDef"),
        ("schemes", "TEXT", "not a function"),
    ],
)
def test_objects_of_another_kind_or_name_are_refused(kind: str, text: str, words: str) -> None:
    mine: Any = {kind: {"it": THERE + text}}
    contributions = getattr(combine([Extension("mine", **mine)]), kind)
    with pytest.raises(Diagnostic, match="E423") as e:
        contributions["it"]
    assert words.rstrip("; ") in e.value.cause


TARGETS: dict[str, Any] = {
    "no_target": (lambda: "cpu:mine", "not a Target"),
    "misnamed": (lambda: replace(cpu_targets.portable(), name="cpu:other"), "has the name 'cpu:other'"),
    "family": (lambda: replace(cpu_targets.portable(), name="tpu:v9", family="tpu"), "one of cpu, cuda, hip"),
    "two families": (lambda: replace(cpu_targets.portable(), name="cuda:mine"), "begins with its family"),
    "bandwidth": (lambda: replace(cpu_targets.portable(), name="cpu:mine", bandwidth=0), "bandwidth=0"),
    "peaks": (lambda: replace(cpu_targets.portable(), name="cpu:mine", peaks={}), "one of them of f32"),
    "pages": (lambda: replace(cpu_targets.portable(), name="cpu:mine", page_size=-1), "page_size=-1"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_a_target_that_cannot_be(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, words = TARGETS[case]
    monkeypatch.setattr(sys.modules[__name__], "no_target", make)
    name = {"family": "tpu:v9", "two families": "cuda:mine"}.get(case, "cpu:mine")
    registry = combine([Extension("mine", targets={name: THERE + "no_target"})])
    with pytest.raises(Diagnostic, match="E427") as e:
        registry.target(name)
    assert f"target {name!r}" in e.value.cause and words in e.value.cause


def test_our_own_targets_are_valid() -> None:
    for name in load().targets:
        load().target(name)


@pytest.mark.parametrize(
    "does, words",
    [
        ({"reject": True}, "reject returned True"),
        ({"schedules": []}, "returned no schedule"),
        ({"schedules": None}, "returned no schedule"),
        ({"cost_us": float("nan")}, "cost_us returned nan"),
        ({"cost_us": None}, "TypeError"),
        ({"emit": lambda: "text"}, "emit returned 'text', not a Source"),
        ({"emit": lambda: {}["key"]}, "KeyError"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_mistake_in_a_kernel_names_it_and_the_node(does: Any, words: str) -> None:
    kernel = replace(KERNEL, name="mine/norm", does=does)
    kernels = MappingProxyType({"mine/norm": kernel})
    target = cpu_targets.portable()
    m = parse(TEXT, load().opset())
    (select,) = parse_pipeline('select{prefer=["mine/norm"]}', load().passes)
    with pytest.raises(Diagnostic, match="E427") as e:
        run_pipeline(m, [select], Ctx(load().opset(), target, kernels))
        emit_graph(m.graphs["main"], m.symbols, kernels, target, {})
    assert "kernel 'mine/norm'" in e.value.cause and "rms_norm at model.norm" in e.value.cause
    assert words in e.value.cause


def test_a_reference_of_another_shape_names_the_op() -> None:
    m = parse(
        "graph @main(%x: f32[4]) {\n  %y = wrong_shape(%x) : f32[4]\n  return %y\n}\n", {"wrong_shape": wrong_shape}
    )
    with pytest.raises(Diagnostic, match="E427") as e:
        run(m.graphs["main"], [[1.0, 2.0, 3.0, 4.0]])
    assert "reference of the op 'wrong_shape'" in e.value.cause and "returned shape (3,)" in e.value.cause


def test_any_other_error_with_an_extensions_code_on_the_stack_is_its(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = combine([*load().extensions, Extension("mine", schemes={"mine": THERE + "not_an_op"})])
    monkeypatch.setattr("llmc.extension.load", lambda: registry)
    try:
        raise ValueError("deep inside")
    except ValueError as e:
        found = extension_at_fault(e)
        assert _report(e, False) == 1
    assert found is not None and found.code == "E427"
    assert "the extension 'mine'" in found.cause and "test_outside_mistakes.py" in found.cause
    assert "LLMC-E427" in capsys.readouterr().err


def small(pattern: Any) -> Callable[[], object]:
    return lambda: Rewrite("mine", pattern, lambda b, m: m["x"])


@pytest.mark.parametrize(
    "make, words",
    [
        (small(p.rms_norm(p.x)), "rms_norm takes 2 operands, the pattern has 1"),
        (small(p.add(p.x, p.y, p.z)), "add takes 2 operands, the pattern has 3"),
        (small(p.rms_norm(p.x, p.w, epsilon=p.eps)), "rms_norm has no attribute 'epsilon' (its attributes: eps"),
        (small(p.silu(p.mean(p.x, axis="last", keepdim=True))), "axis='last'"),
        (small(p.mul(const("c"), p.cast(p.x, dtype=3))), "dtype=3"),
        (small(p.x), "the pattern is not an op"),
    ],
)
def test_a_pattern_that_cannot_match_is_refused_when_it_is_made(make: Callable[[], object], words: str) -> None:
    with pytest.raises(Diagnostic, match="E424") as e:
        make()
    assert words in str(e.value) and "rewrite mine" in str(e.value)


@pytest.mark.parametrize(
    "rule, words",
    [
        (Rewrite("mine", p.add(p.rms_nrom(p.x, p.w), p.y), lambda b, m: m["x"]), "did you mean 'rms_norm'?"),
        (Rewrite("mine", p.wrong_shape(p.x, p.y), lambda b, m: m["x"]), "wrong_shape takes 1 operands"),
        (Simplify("mine", ("rms_nrom",), lambda n: None), "unknown op rms_nrom"),
    ],
)
def test_ops_of_extensions_are_checked_when_rules_are_applied(rule: Any, words: str) -> None:
    ops = {**load().opset(), "wrong_shape": wrong_shape}
    with pytest.raises(Diagnostic, match="E424") as e:
        apply(parse(TEXT, ops).graphs["main"], [rule], Ctx(ops))
    assert words in str(e.value)
