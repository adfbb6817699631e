"""A kernel of another package: an op, the kernel that docs/kernels.md prints, and a build that uses it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.harness import Case, compile_cases, run_case

from llmc.codegen.select import Select
from llmc.codegen.tuning_records import Tuning, record
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.example import example_graph
from llmc.ir.graph import Graph, Module
from llmc.ir.opdef import op
from llmc.ir.ops import OPS
from llmc.passes.base import Ctx

DOC = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


@op("(x: f[*s]) -> x[*s]")
def double_it(x: Any) -> Any:
    """x * 2"""
    return x * 2


def documented() -> Any:
    """The kernel that the page defines."""
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)
    scope: dict[str, Any] = {"__name__": "mine"}
    exec(compile(code, str(DOC), "exec"), scope)
    return scope["SCALE"]


def module(dtype: str = "bf16") -> Module:
    return example_graph(double_it, [np.random.default_rng(0).standard_normal((7, 33)).astype(np.float32)], {}, dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_documented_kernel_is_right(dtype: str, tmp_path: Path) -> None:
    scale, m = documented(), module(dtype)
    x = np.random.default_rng(1).standard_normal((7, 33)).astype(np.float32)
    case = Case("scale", m.graphs["main"], scale, {}, [x])
    run_case(case, *compile_cases([case], load().target("cpu:native"), tmp_path)["scale"])


def test_select_finds_it_by_its_op() -> None:
    ops = {**OPS, "double_it": double_it}
    m, kernels = module(), {**load().kernels, "mine/scale": documented()}
    Select().run(m, Ctx(ops, load().target("cpu:native"), kernels))
    assert [n.choice for n in m.graphs["main"].nodes] == [{"kernel": "mine/scale"}]
    with pytest.raises(Diagnostic, match="double_it"):
        Select().run(module(), Ctx(ops, load().target("cpu:native"), load().kernels))


def test_measurements_decide(tmp_path: Path) -> None:
    """cpu/elements is predicted to be slower than cpu/rows; a measurement to the contrary takes precedence."""
    g = Graph("main")
    m = Module({"main": g})
    x = example_graph(OPS["exp"], [np.zeros((3, 5), np.float32)], {})
    g = m.graphs["main"] = x.graphs["main"]
    (node,) = g.nodes
    target = load().target("cpu:portable")
    path = tmp_path / "tuning.jsonl"
    lines = [record(node, "cpu/rows", {}, target, 9.0), record(node, "cpu/elements", {}, target, 1.0)]
    path.write_text("".join(f"{r.line()}\n" for r in lines))
    Select(tuning=str(path)).run(m, Ctx(OPS, target, load().kernels))
    assert node.choice == {"kernel": "cpu/elements"}
    node.choice = {}
    Select().run(m, Ctx(OPS, target, load().kernels))
    assert node.choice == {"kernel": "cpu/rows"}
    assert Tuning.load(path).lookup(node, "cpu/rows", [{}], load().target("cpu:x86-64-v3")) == [None], (
        "of another machine"
    )
    for bad in ("not json", json.dumps({"us": 1})):
        path.write_text(bad)
        with pytest.raises(Diagnostic, match="line 1"):
            Tuning.load(path)
    with pytest.raises(Diagnostic, match="E432"):
        Tuning.load(tmp_path / "none")
