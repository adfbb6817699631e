"""The kernel in docs/writing-gpu-kernels.md: chosen by its op, right in the interpreter, a binary for every target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.harness import Case
from kernels.triton_harness import TARGETS, compile_for, run_case

from llmc.codegen.select import Select
from llmc.extension import load
from llmc.ir.example import example_graph
from llmc.ir.opdef import op
from llmc.ir.ops import OPS
from llmc.passes.base import Ctx

DOC = Path(__file__).resolve().parents[2] / "docs" / "writing-gpu-kernels.md"


@op("(x: f[*s]) -> x[*s]")
def double_it(x: Any) -> Any:
    """x * 2"""
    return x * 2


def documented() -> Any:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)
    scope: dict[str, Any] = {"__name__": "mine"}
    exec(compile(code, str(DOC), "exec"), scope)
    return scope["SCALE"]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_the_documented_kernel(dtype: str, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((7, 333)).astype(np.float32)
    m = example_graph(double_it, [x], {}, dtype)
    (node,) = m.graphs["main"].nodes
    scale = documented()
    Select().run(m, Ctx({**OPS, "double_it": double_it}, TARGETS[1], {**load().kernels, "mine/scale": scale}))
    assert node.choice["kernel"] == "mine/scale"
    case = Case("scale", m.graphs["main"], scale, {}, [x])
    run_case(case)
    for target in TARGETS if dtype == "bf16" else ():
        assert compile_for(case, target, tmp_path).binary[:4] == b"\x7fELF"
