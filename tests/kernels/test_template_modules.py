"""Template kernels run unchanged in Triton's interpreter: imported as modules, and launched like any Triton kernel.

This is how to step through one: put `breakpoint()` into the template and run its test here with `pytest -s`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from kernels.triton_harness import interpreting

from llmc.codegen.backends.triton.template import FOLDER, PACKAGE

NAMES = tuple(sorted(p.stem for p in FOLDER.glob("*.py") if p.stem != "__init__"))


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Template modules imported inside run on the CPU; they are forgotten afterwards."""

    def forget() -> None:
        for name in [n for n in sys.modules if n.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]

    forget()
    with interpreting():
        yield
    forget()


def module(name: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.{name}")


def output(out: torch.Tensor, m: int, N: int) -> Any:
    """The result of a product, with an epilogue without other operands: relu of the first part."""
    import triton
    import triton.language as tl

    @triton.jit
    def no_extras(operands, token, column, token_mask, column_mask):  # type: ignore[no-untyped-def]
        return ()

    @triton.jit
    def relu(sums, extras):  # type: ignore[no-untyped-def]
        return tl.maximum(sums[0], 0.0)

    relu.fn.__globals__["tl"] = tl
    fields = {"N": N, "WHOLE_M": False, "LOAD_EXTRAS": no_extras, "EPILOGUE": relu}
    record = module("product_output").Output
    return record(out, (), m, **{name: tl.constexpr(value) for name, value in fields.items()})


def only_part() -> Any:
    """An epilogue of the sums of one part: the sums themselves."""
    import triton

    @triton.jit
    def first(sums):  # type: ignore[no-untyped-def]
        return sums[0]

    return first


def product(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
    """Factors, memory for the result, and the result that is expected."""
    x, w = torch.randn(m, k), torch.randn(n, k)
    return x, w, torch.full((m, n), float("nan")), torch.relu(x @ w.T).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_every_template_can_be_imported(interpreter: None, name: str) -> None:
    assert module(name).__doc__


def test_gemm(interpreter: None) -> None:
    m, n, k = 33, 40, 70
    x, w, out, want = product(m, n, k)
    module("gemm").gemm[(3 * 2,)](
        x, w, output(out, m, n), ROW_TILES=3, K=k, PARTS=1, SPLITS=0, BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, STAGES=2,
        GROUP=8, FLOAT32_FACTORS=False, SUM=tl.float32, LATE_LAUNCH=False, DEPENDENT_LAUNCH=False,
    )  # fmt: skip
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-4)


def test_tile(interpreter: None) -> None:
    m, n, k = 5, 40, 70
    x, w, out, want = product(m, n, k)
    module("gemm_small").gemm_small[(1, 2)](
        x, w, output(out, m, n), K=k, PARTS=1, JOINED=False, BLOCK_M=16, BLOCK_N=32, BLOCK_K=64, SLICES=2, STAGES=2,
        PREFETCH_LINE=32, PREFETCH_LINES=0, EARLY_EXTRAS=True, FLOAT32_FACTORS=False, SUM=tl.float32,
        LATE_LAUNCH=False, DEPENDENT_LAUNCH=False,
    )  # fmt: skip
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-4)


def test_mapped(interpreter: None) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    m, n, k = 33, 40, 64
    x, w, out, want = product(m, n, k)
    maps = TensorDescriptor.from_tensor(x, [16, 32]), TensorDescriptor.from_tensor(w, [32, 32])
    module("gemm_tma").gemm_tma[(3 * 2,)](
        *maps, output(out, m, n), ROW_TILES=3, K=k, PARTS=1, SPLITS=0, BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, STAGES=2,
        GROUP=8, FLOAT32_FACTORS=False, SUM=tl.float32, LATE_LAUNCH=False, DEPENDENT_LAUNCH=False,
    )  # fmt: skip
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-4)


def test_stream(interpreter: None) -> None:
    m, n, k = 3, 10, 70
    x, w, out, want = product(m, n, k)
    module("gemv").gemv[(3, 2)](
        x, w, None, output(out, m, n), K=k, PARTS=1, ROWS=2, BLOCK_N=4, BLOCK_K=16, AHEAD=2, EPS=None, ONE_BLOCK=False,
        EARLY_WEIGHTS=True, JOINT_SUM=None, DEPENDENT_LAUNCH=False,
    )  # fmt: skip
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-4)


def test_combine(interpreter: None) -> None:
    partial, out = torch.randn(3, 5, 20), torch.full((5, 20), float("nan"))
    module("splitk_combine").splitk_combine[(5, 2)](
        partial, output(out, 5, 20), SPLITS=3, BLOCK=16, DEPENDENT_LAUNCH=False
    )
    np.testing.assert_allclose(out.numpy(), torch.relu(partial.sum(0)).numpy(), rtol=1e-5, atol=1e-5)


def test_matmul(interpreter: None) -> None:
    left, right, out = torch.randn(2, 9, 21), torch.randn(2, 21, 18), torch.full((2, 9, 18), float("nan"))
    tiles = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "STAGES": 2, "DEPENDENT_LAUNCH": False}
    module("matmul").matmul[(2 * 2,)](
        left, right, out, 9, 21, 18, 1, 2, HEADS=0, WHOLE_COLUMNS=False, WHOLE_DEPTH=False, FLOAT32_FACTORS=False,
        **tiles,
    )  # fmt: skip
    np.testing.assert_allclose(out.numpy(), (left @ right).numpy(), rtol=1e-4, atol=1e-4)
    x, w, out = torch.randn(9, 3, 32), torch.randn(3, 32, 48), torch.full((9, 3, 48), float("nan"))
    module("matmul").matmul[(3 * 3,)](
        x, w, out, 9, 32, 48, 1, 3, HEADS=3, WHOLE_COLUMNS=True, WHOLE_DEPTH=True, FLOAT32_FACTORS=False, **tiles
    )
    np.testing.assert_allclose(out.numpy(), torch.einsum("thk,hkn->thn", x, w).numpy(), rtol=1e-4, atol=1e-4)


def test_experts(interpreter: None) -> None:
    """Routing, then the weighted answers: every pair at its own place, whatever the order of the pairs was."""
    tokens, choices, experts, n, k = 6, 2, 5, 20, 24
    moe, pairs = module("moe"), tokens * choices
    chosen = torch.randint(experts, (tokens, choices), dtype=torch.int32)
    order, starts = torch.full((pairs,), -1, dtype=torch.int32), torch.zeros(experts + 1, dtype=torch.int32)
    moe.moe_route[(experts,)](
        chosen, order, starts, pairs, EXPERTS=experts, CHUNK=16, EAGER_LAUNCH=False, DEPENDENT_LAUNCH=False
    )
    assert starts[-1] == pairs
    x, w, scale = torch.randn(pairs, k), torch.randn(experts, n, k), torch.randn(tokens, choices)
    out = torch.full((tokens, choices, n), float("nan"))
    constants = {
        "CHOICES": 0, "EXPERTS": experts, "EXPERTS_PADDED": 8, "N": n, "K": k, "PARTS": 1, "BLOCK_M": 16, "BLOCK_N": 32,
        "BLOCK_K": 16, "STAGES": 2,
    }  # fmt: skip
    fields = {name: tl.constexpr(value) for name, value in constants.items()}
    moe.moe_product[(1, pairs)](
        moe.ExpertProduct(x, order, starts, scale, None, out, **fields), w, pairs,
        moe.Prefetch(*map(tl.constexpr, (0, 1, 0))), FLOAT32_FACTORS=False, EARLY_ROWS=True, EPILOGUE=only_part(),
        DEPENDENT_LAUNCH=False,
    )  # fmt: skip
    for row, pair in enumerate(order.tolist()):
        want = scale.reshape(-1)[pair] * (w[chosen.reshape(-1)[pair]] @ x[row])
        np.testing.assert_allclose(out.reshape(pairs, n)[pair].numpy(), want.numpy(), rtol=1e-4, atol=1e-4)
