"""Attention and rotary templates, imported and stepped through in Triton's interpreter, as a kernel developer would."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from kernels.triton_harness import interpreting

PACKAGE = "llmc.codegen.backends.triton.kernels"
HEADS, KV_HEADS, HEAD_DIM, PAGE, SCALE = 4, 2, 32, 16, 0.2


@pytest.fixture
def interpreter() -> Iterator[Any]:
    """A function that imports a template module whose kernels run in the interpreter."""
    kept = {name: m for name, m in sys.modules.items() if name.startswith(PACKAGE)}
    for name in kept:
        del sys.modules[name]

    def load(name: str) -> ModuleType:
        return importlib.import_module(f"{PACKAGE}.{name}")

    with interpreting():
        yield load
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]
    sys.modules.update(kept)


def attention(query: torch.Tensor, kv: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """One token's query [HEADS, HEAD_DIM] over the first `length` keys of `pages`."""
    keys, values = (kv[pages, i].transpose(1, 2).reshape(-1, KV_HEADS, HEAD_DIM)[:length] for i in (0, 1))
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    weights = torch.softmax(torch.einsum("hd,thd->ht", query, keys) * SCALE, 1)
    return torch.einsum("ht,thd->hd", weights, values)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool, and the page table of one row for each length."""
    width = -(-max(lengths) // PAGE)
    kv = torch.randn(len(lengths) * width + 1, 2, KV_HEADS, PAGE, HEAD_DIM)
    return kv, torch.randperm(len(kv))[: len(lengths) * width].reshape(len(lengths), width).to(torch.int32)


def arguments(interpreter: Any, table_width: int, row_count: int, **pointers: Any) -> dict[str, Any]:
    """The arguments that all kernels of paged attention share; pointers that are not given are None."""
    import triton.language as tl

    constants = {
        "HEADS": HEADS, "KV_HEADS": KV_HEADS, "HEAD_DIM": HEAD_DIM, "HEAD_DIM_PADDED": HEAD_DIM, "PAGE": PAGE,
        "SCALE": SCALE, "WINDOW": 0, "SOFTCAP": 0.0, "DOT_DTYPE": tl.float32, "INTERPRET": True,
    }  # fmt: skip
    record = interpreter("paged_kv").PagedAttention
    fields = {name: pointers.get(name) for name in record._fields if name.endswith("_ptr")}
    fields |= {name: tl.constexpr(value) for name, value in constants.items()}
    attention = record(**fields, row_count=row_count, table_width=table_width)
    return {"attention": attention, "QUERY_ROWS": 16, "KEYS_PER_TILE": 16, "DEPENDENT_LAUNCH": False}


@pytest.mark.parametrize("splits", [0, 3])
def test_decode(interpreter: Any, splits: int) -> None:
    decode, lengths = interpreter("decode_attention"), [1, 37, 70]
    kv, table = paged(lengths)
    query, out = torch.randn(3, HEADS, HEAD_DIM), torch.zeros(3, HEADS, HEAD_DIM)
    partial, lse = torch.zeros(3, HEADS, max(1, splits), HEAD_DIM), torch.zeros(3, HEADS, max(1, splits))
    shared = arguments(
        interpreter, table.shape[1], 3, query_ptr=query, kv_ptr=kv, page_table_ptr=table, rows_ptr=i32(0, 1, 2),
        starts_ptr=None if splits else i32(0, 1, 2, 3), positions_ptr=i32(*(n - 1 for n in lengths)),
    )  # fmt: skip
    decode.paged_decode[(3, KV_HEADS, max(1, splits))](
        out_ptr=partial if splits else out, lse_ptr=lse, SPLITS=splits, TABLES_SETTLED=False, **shared
    )
    if splits:
        decode.combine_splits[(3, HEADS)](
            partial, lse, None, out, HEADS=HEADS, HEAD_DIM=HEAD_DIM, HEAD_DIM_PADDED=HEAD_DIM, SPLITS=splits,
            SPLITS_PADDED=4, DEPENDENT_LAUNCH=False, EAGER_LAUNCH=False,
        )  # fmt: skip
    for i, n in enumerate(lengths):
        torch.testing.assert_close(out[i], attention(query[i], kv, table[i].long(), n), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_prefill_and_single(interpreter: Any, axis: int) -> None:
    """Rows of 1 and 20 tokens: prefill handles the longer one and leaves zeros for the other, which single handles."""
    prefill, single, news, lengths = (
        interpreter("prefill_attention"),
        interpreter("single_token_attention"),
        [1, 20],
        [33, 25],
    )
    kv, table = paged(lengths)
    positions = torch.cat([torch.arange(n - new, n) for new, n in zip(news, lengths, strict=True)]).to(torch.int32)
    query, out = torch.randn(21, HEADS, HEAD_DIM), torch.full((21, HEADS, HEAD_DIM), torch.nan)
    shared = arguments(
        interpreter, table.shape[1], 2, query_ptr=query, kv_ptr=kv, page_table_ptr=table, rows_ptr=i32(0, 1),
        starts_ptr=i32(0, 1, 21), positions_ptr=positions,
    )  # fmt: skip
    prefill.paged_prefill[(21 // 8 + 3, KV_HEADS)[:: -1 if axis else 1]](
        slopes_ptr=None, out_ptr=out, token_count=21, MIN_TOKENS=2, PART=0, TILE_AXIS=axis, **shared
    )
    assert (out[0] == 0).all()
    single.single_token_attention[(2, KV_HEADS)](
        longer_ptr=out, out_ptr=out, token_count=21, INPUTS_SETTLED=False, **shared
    )
    for i, position in enumerate(positions.tolist()):
        want = attention(query[i], kv, table[min(i, 1)].long(), position + 1)
        torch.testing.assert_close(out[i], want, rtol=1e-5, atol=1e-5)


def test_rope(interpreter: Any) -> None:
    pairs, tokens = HEAD_DIM // 2, 5
    x, angle = torch.randn(tokens, HEADS, HEAD_DIM), torch.rand(tokens, pairs)
    out = torch.zeros_like(x)
    interpreter("rope").rope[(-(-tokens * HEADS // 8),)](
        x, angle.cos(), angle.sin(), out, tokens, HEADS=HEADS, HEAD_DIM=HEAD_DIM, PAIRS=pairs, PAIRS_PADDED=pairs,
        REST_PADDED=1, INTERLEAVED=False, ROWS=8, DEPENDENT_LAUNCH=False,
    )  # fmt: skip
    turned = torch.view_as_complex(torch.stack([x[..., :pairs], x[..., pairs:]], -1)) * torch.exp(1j * angle)[:, None]
    torch.testing.assert_close(out, torch.cat([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-5)


def test_last_tokens(interpreter: Any) -> None:
    starts, out = i32(0, 3, 3, 4), torch.zeros(3, dtype=torch.int32)
    interpreter("row_state").row_last[(1,)](starts, out, 3, LANES=16, DEPENDENT_LAUNCH=False)
    np.testing.assert_array_equal(out, [2, -1, 3])
