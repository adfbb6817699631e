"""Products in large tiles (`cuda/gemm_tiles`) on a GPU against the references of their ops, as in test_kernels.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gpu.launcher import Card
from gpu.test_cuda_kernels import SILU, check, product

from llmc.codegen.backends.cuda.gemm_tiles import GEMM_TILES
from llmc.targets.gpu_targets import sm_90

pytestmark = pytest.mark.gpu
# Tokens, columns, depth, parts, epilogue, dtype of the result. On 132 multiprocessors: quarters and halves of tiles
# alone, and after whole ones; last tokens that fill half a tile; partial tiles in every direction.
PRODUCTS = (
    (3, 264, 328, 1, "add(a0, a1)", "bf16"),
    (100, 256, 256, 1, "", "bf16"),
    (300, 1536, 1024, 2, SILU, "bf16"),
    (640, 2560, 256, 1, "add(a1, a0)", "bf16"),
    (1100, 4096, 264, 1, "add(mul(a0, a2), a1)", "f16"),
    (2100, 4104, 320, 1, "", "bf16"),
    (3000, 1928, 520, 2, "add(mul(a0, sigmoid(a1)), a2)", "bf16"),
    (4096, 2056, 520, 1, "add(a0, a1)", "bf16"),
)


@pytest.mark.parametrize("problem", PRODUCTS, ids=str)
def test_products(problem: tuple[Any, ...], card: Card) -> None:
    found = replace(product(*problem, {}), kernel=GEMM_TILES)
    assert GEMM_TILES.reject(found.node, sm_90()) is None
    schedules = GEMM_TILES.schedules(found.node, sm_90())
    check([replace(found, schedule=s, name=f"{found.name} {s}") for s in schedules], card)
