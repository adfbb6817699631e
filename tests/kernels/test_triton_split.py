"""Products in parts of their depth, and the sum with its epilogue, interpreted and compared with references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels.harness import Case
from kernels.test_triton_linear import draw
from kernels.triton_harness import run_case

from llmc.codegen.backends.triton.gemm_small import GEMM_SPLITK, SPLITK_COMBINE
from llmc.codegen.backends.triton.gemm_tma import GEMM_TMA_SPLITK
from llmc.ir.graph import Graph
from llmc.ir.ops import OPS
from llmc.ir.types import tensor
from llmc.targets.gpu_targets import sm_90

# dtype, weight rows, columns, parts, tokens, which schedule
PRODUCTS = (
    ("bf16", 37, 132, 2, 5, 0),
    ("bf16", 130, 256, 4, 131, 1),
    ("f16", 65, 96, 3, 33, 3),
    ("bf16", 64, 512, 8, 129, -1),
    ("f32", 40, 90, 2, 17, 0),
)
SILU = "mul(mul(a0, sigmoid(a0)), a1)"
# parts, columns, tokens, dtype of the result, epilogue, extras
SUMS: tuple[tuple[Any, ...], ...] = (
    (2, 37, 5, "bf16", "add(a1, a0)", (("bf16", ("T", 37)),)),
    (4, 1100, 3, "f32", "a0", ()),
    (8, 16, 33, "f16", "add(mul(a0, a1), a2)", (("f32", (16,)), ("f16", ("T", 1)))),
    (1, 2050, 2, "bf16", SILU, (("bf16", ("T", 2050)),)),
)


@pytest.mark.parametrize("which", range(len(PRODUCTS)))
def test_parts_agree_with_the_reference(which: int) -> None:
    dtype, n, k, splits, rows, at = PRODUCTS[which]
    g = Graph("test")
    x, w = g.input("x", tensor(dtype, "T", k)), g.input("w", tensor(dtype, n, k), weight=True)
    g.outputs = [g.add(OPS["linear_split"], [x, w], {"splits": splits}).result]
    (node,) = g.nodes
    atol = 2e-5 if dtype == "f32" else 2e-3
    name, plan = f"parts {PRODUCTS[which]}", GEMM_SPLITK.schedules(node, sm_90())[at]
    run_case(Case(name, g, GEMM_SPLITK, plan, draw(g, rows), atol=atol, sizes={"T": rows}))


@pytest.mark.parametrize(
    ("dtype", "n", "k", "splits", "rows", "at"),
    [("bf16", 37, 128, 2, 5, 1), ("f16", 65, 384, 3, 130, 0), ("bf16", 130, 256, 2, 70, 4)],
)
def test_parts_by_tensor_maps_agree_with_the_reference(
    dtype: str, n: int, k: int, splits: int, rows: int, at: int
) -> None:
    g = Graph("test")
    x, w = g.input("x", tensor(dtype, "T", k)), g.input("w", tensor(dtype, n, k), weight=True)
    g.outputs = [g.add(OPS["linear_split"], [x, w], {"splits": splits}).result]
    (node,) = g.nodes
    plan = GEMM_TMA_SPLITK.schedules(node, sm_90())[at]
    run_case(
        Case(f"mapped parts {dtype} {n} {k}", g, GEMM_TMA_SPLITK, plan, draw(g, rows), atol=2e-3, sizes={"T": rows})
    )


def test_parts_that_tensor_maps_cannot_hold() -> None:
    g = Graph("test")
    x, w = g.input("x", tensor("bf16", "T", 128)), g.input("w", tensor("bf16", 64, 128), weight=True)
    odd = g.add(OPS["linear_split"], [x, w], {"splits": 4})
    assert "not a multiple of 64" in str(GEMM_TMA_SPLITK.reject(odd, sm_90()))


@pytest.mark.parametrize("which", range(len(SUMS)))
def test_sums_agree_with_the_reference(which: int) -> None:
    splits, n, rows, dtype, body, extras = SUMS[which]
    g = Graph("test")
    g.input("partial", tensor("f32", splits, "T", n))
    for i, (kind, dims) in enumerate(extras):
        g.input(f"e{i}", tensor(kind, *dims))
    g.outputs = [g.add(OPS["linear_combine"], g.inputs, {"dtype": dtype, "body": body}).result]
    (node,) = g.nodes
    rng = generator()
    arrays = [
        rng.standard_normal([int(d.subs({"T": rows})) for d in v.type.shape]).astype(np.float32) for v in g.inputs
    ]
    for plan in SPLITK_COMBINE.schedules(node, sm_90()):
        run_case(Case(f"sum {SUMS[which]}", g, SPLITK_COMBINE, plan, arrays, atol=2e-5, sizes={"T": rows}))
