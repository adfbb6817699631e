"""Runs the Triton kernel of decode attention on the CPU, and compares it with the op's reference.

python examples/attention/decode.py
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from llmc.extend import OPS
from llmc.extend.triton import Template
from llmc.testing import interpreting, op_example, template_function

# Small operands, with a window, a soft cap and attention sinks. attrs: {"scale": ..., "window": ..., "softcap": ...}
op = OPS["paged_attention"]
operands, attrs = op_example(op, np.random.default_rng(0))
expected = op.ref(*operands, **attrs)

query, kv, page_table, rows, starts, positions, sinks = map(torch.from_numpy, operands)
tokens, heads, head_dim = query.shape
_, _, kv_heads, page, _ = kv.shape
out = torch.full_like(query, torch.nan)

with interpreting():  # modules of kernels that are imported here run in the interpreter
    paged_decode = template_function(Template("decode_attention", "paged_decode"))
    attention = template_function(Template("paged_kv", "PagedAttention"))(
        query, kv, page_table, rows, starts, positions, None, sinks, len(rows), page_table.shape[1],
        HEADS=tl.constexpr(heads), KV_HEADS=tl.constexpr(kv_heads), HEAD_DIM=tl.constexpr(head_dim),
        HEAD_DIM_PADDED=tl.constexpr(16), PAGE=tl.constexpr(page), SCALE=tl.constexpr(attrs["scale"]),
        WINDOW=tl.constexpr(attrs["window"]), SOFTCAP=tl.constexpr(attrs["softcap"]),
        DOT_DTYPE=tl.constexpr(tl.float32), INTERPRET=tl.constexpr(True),
    )  # fmt: skip
    paged_decode[(tokens, kv_heads, 1)](
        attention, out, None, SPLITS=0, QUERY_ROWS=16, KEYS_PER_TILE=16, TABLES_SETTLED=False, DEPENDENT_LAUNCH=False
    )

np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)
print(f"paged_decode agrees with {op.name}: {tokens} tokens, {heads} heads")
