"""The interfaces that authors of passes use: pipelines as text, options, extensions, fuel."""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import pytest

from llmc.cli import _parser
from llmc.diagnostics import Diagnostic
from llmc.extension import Extension, combine, load, resolve
from llmc.ir.graph import Module
from llmc.ir.ops import OPS
from llmc.ir.text import parse, show
from llmc.opt import main_opt
from llmc.passes.base import Ctx, Pass
from llmc.passes.pipeline import override, parse_pipeline, run_pipeline, spell_pass
from llmc.passes.rewrite import Pat, Rewrite, apply, either, through
from llmc.targets.gpu_targets import gfx942, sm_90

HERE = Path(__file__).parent
NORMS = HERE / "fuse_norm.llir"


@dataclass(frozen=True)
class Rename(Pass):
    """Give the first node's result another name."""

    name: ClassVar[str] = "rename"
    to: str = "renamed"
    times: int = 1

    def run(self, m: Module, ctx: Ctx) -> int:
        for g in m.graphs.values():
            next(iter(g.nodes)).results[0].name = self.to
        return len(m.graphs)


@dataclass(frozen=True)
class Break(Pass):
    """Lose an input."""

    name: ClassVar[str] = "break"

    def run(self, m: Module, ctx: Ctx) -> int:
        for g in m.graphs.values():
            g.inputs.pop()
        return 1


THERE = f"{__name__}:"
OUTSIDE = Extension("outside", passes=MappingProxyType({"rename": THERE + "Rename", "break": THERE + "Break"}))

# In no pipeline: used by name, or for several ranks.
BY_NAME = {"split-k", "shard", "gather-first", "fuse-reduce", "fuse-reduce-norm"}


def names(text: str) -> list[str]:
    registry = load()
    return [p.name for p in parse_pipeline(text, registry.passes, dict(registry.pipelines.items()))]


def test_the_default_pipeline_has_every_pass_of_ours_once() -> None:
    serve = names("serve")
    gpu = [p.name for p in parse_pipeline(sm_90().pipeline, load().passes)]
    assert len(serve) == len(set(serve)) and len(gpu) == len(set(gpu))
    amd = [p.name for p in parse_pipeline(gfx942().pipeline, load().passes)]
    assert set(serve) | set(gpu) | set(amd) | BY_NAME == set(load().passes)
    assert serve.index("page-attention") < serve.index("specialize") < serve.index("select") < serve.index("memory")


def test_a_pass_enters_behind_another_or_in_front_of_it() -> None:
    serve = names("serve")
    got = names("serve, after fuse-norm: cse, before select: dce")
    at = serve.index("fuse-norm") + 1
    assert got[at] == "cse"
    assert got[got.index("select") - 1] == "dce"
    assert len(got) == len(serve) + 2
    assert "fuse-rope" not in names("serve, without fuse-rope")


def test_options_are_fields_and_their_text_reads_back() -> None:
    registry = load()
    (p,) = parse_pipeline("page-attention{rows=8, max-len=4096, page=32}", registry.passes)
    assert (p.rows, p.max_len, p.page) == (8, 4096, 32)
    assert parse_pipeline(spell_pass(p), registry.passes) == [p]
    (changed,) = override([p], "page-attention", rows=2)
    assert changed.rows == 2 and p.rows == 8


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("fuse-nrom", "E420", "did you mean 'fuse-norm'?"),
        ("cse{fast=true}", "E421", "no option 'fast'"),
        ("page-attention{rows=many}", "E421", "rows='many' is not of type int"),
        ("page-attention{rows}", "E421", "cannot read the option"),
        ("cse, after dce: cse", "E420", "has no 'dce'"),
        ("cse dce", "E421", "is not a pass"),
    ],
)
def test_a_wrong_pipeline_says_what_is_wrong(text: str, code: str, words: str) -> None:
    with pytest.raises(Diagnostic) as e:
        names(text)
    assert e.value.code == code
    assert words in str(e.value)
    assert len(str(e.value).splitlines()) <= 5


def test_an_outside_pass_is_one_name_away() -> None:
    registry = combine([*load().extensions, OUTSIDE])
    m = parse(NORMS.read_text(), OPS)
    text = 'serve, after fuse-norm: rename{to="mine"}'
    passes = parse_pipeline(text, registry.passes, dict(registry.pipelines.items()))
    assert [p.name for p in passes][2] == "rename"
    run_pipeline(m, passes[2:3], Ctx(registry.opset()))
    assert "%mine = " in show(m)


def test_two_packages_with_one_name_are_an_error() -> None:
    theirs = Extension("theirs", passes=MappingProxyType({"cse": "elsewhere:Cse"}))
    with pytest.raises(Diagnostic, match="pass 'cse' is provided by both llmc and theirs"):
        combine([*load().extensions, theirs])
    silu = Extension("theirs", ops=MappingProxyType({"silu": "elsewhere:SILU"}))
    with pytest.raises(Diagnostic, match="op 'silu' is provided by both llmc and theirs"):
        combine([*load().extensions, silu]).opset()


def test_an_object_that_cannot_be_loaded_is_named() -> None:
    broken = Extension("broken", passes=MappingProxyType({"odd": "no_such_module:Odd"}))
    registry = combine([*load().extensions, broken])
    assert "odd" in registry.passes  # nothing is imported until it is named
    with pytest.raises(Diagnostic, match="pass 'odd': 'no_such_module:Odd' cannot be loaded"):
        _ = registry.passes["odd"]
    with pytest.raises(Diagnostic, match="E423"):
        resolve("llmc.builtin:NOTHING")


def test_a_pass_that_breaks_the_graph_is_named() -> None:
    with pytest.raises(Diagnostic, match="after break: @"):
        run_pipeline(parse(NORMS.read_text(), OPS), [Break()], Ctx(OPS))


def opt(*argv: str) -> str:
    out = io.StringIO()
    main_opt(_parser().parse_args(["opt", str(NORMS), *argv]), out)
    return out.getvalue()


def test_fuel_bisects_to_one_change() -> None:
    def norms(fuel: int) -> int:
        return opt("-p", "canonicalize, fuse-norm", "--fuel", str(fuel)).count(" = rms_norm(")

    counts = [norms(n) for n in range(40)]
    assert counts[0] == 0
    assert counts[-1] == norms(-1) == 4
    assert all(0 <= b - a <= 1 for a, b in itertools.pairwise(counts))


def test_opt_prints_stops_and_times() -> None:
    options = ("--print-after", "fuse-norm", "--stop-after", "fuse-norm", "--time")
    text = opt("-p", "canonicalize, fuse-norm, cse", *options)
    assert "// after fuse-norm: " in text
    assert "// time: fuse-norm: " in text
    assert "time: cse" not in text
    body = text[text.rindex("sym T") :]
    assert show(parse(body, OPS)) in text
    with pytest.raises(Diagnostic, match="--stop-after memory: the pipeline has no such pass"):
        opt("-p", "cse", "--stop-after", "memory")
    with pytest.raises(Diagnostic, match=r"E424.*--only model.layers.7"):
        opt("-p", "cse", "--only", "model.layers.7")


def test_a_pattern_that_names_no_op_is_an_error() -> None:
    p, ctx = Pat(), Ctx(OPS)
    g = parse("graph @main(%x: f32[2]) {\n  %y = neg(%x) : f32[2]\n  return %y\n}\n", OPS).graphs["main"]
    rule = Rewrite("wrong", p.neg(either(p.x, through(p.no_such_op(p.y)))), lambda b, m: m["x"])
    with pytest.raises(Diagnostic, match=r"E424.*rewrite wrong: unknown op no_such_op"):
        apply(g, [rule], ctx)
    with pytest.raises(TypeError, match=r"2 is not a pattern; write const\(2\)"):
        p.pow(p.x, 2)
