"""norm_linear in the interpreter compared with the reference: odd shapes, epilogues, one token to several."""

from __future__ import annotations

import numpy as np
import pytest
from draw import generator
from kernels.harness import Case
from kernels.triton_harness import run_case, some

from llmc.codegen.backends.triton.gemv import NORM_GEMV
from llmc.ir.graph import Graph
from llmc.ir.ops import OPS
from llmc.ir.types import tensor
from llmc.targets.gpu_targets import sm_90

SILU = "mul(mul(a0, sigmoid(a0)), a1)"
# dtype, rows of a part, columns, parts, body, dtypes of extras [rows, n], result
SHAPES = (
    ("bf16", 37, 133, 1, "a0", (), ""),
    ("bf16", 21, 64, 2, SILU, (), ""),
    ("f32", 50, 45, 1, "add(a0, a1)", ("f32",), ""),
    ("f16", 9, 700, 1, "add(a1, a0)", ("f16",), "f32"),
    ("bf16", 5, 1, 1, "a0", (), "f32"),
)


def graph(shape: tuple, rows: int | str) -> Graph:
    dtype, n, k, parts, body, extras, out = shape
    g = Graph("test")
    x, w = g.input("x", tensor(dtype, rows, k)), g.input("w", tensor(dtype, parts * n, k), weight=True)
    gain = g.input("gain", tensor(dtype, k), weight=True)
    more = [g.input(f"e{i}", tensor(e, rows, n)) for i, e in enumerate(extras)]
    attrs = {"eps": 1e-5, "parts": parts, "body": body, "dtype": out}
    g.outputs = [g.add(OPS["norm_linear"], [x, w, gain, *more], attrs).result]
    return g


@pytest.mark.parametrize("rows", (1, 2, 4, 7))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_agrees_with_the_reference(shape: tuple, rows: int) -> None:
    rng = generator()
    g = graph(shape, 1 if rows == 1 else "T")
    inputs = [
        rng.standard_normal([int(d.subs({"T": rows})) for d in v.type.shape]).astype(np.float32) for v in g.inputs
    ]
    inputs[0] *= 3.0
    inputs[1] /= np.sqrt(shape[2])
    (node,) = g.nodes
    for schedule in some(NORM_GEMV.schedules(node, sm_90())[:2]):
        atol = 2e-5 if shape[0] == "f32" else 4e-3
        run_case(Case(f"{shape} {schedule}", g, NORM_GEMV, schedule, inputs, rtol=1e-4, atol=atol, sizes={"T": rows}))
