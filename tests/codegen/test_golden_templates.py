"""Texts of template kernels at the sizes of real models, kept as files: attention, rotary embedding, rows, sampling,
products with scales of tiles. A change of a template or of its arguments shows up as a diff.

After an intended change: LLMC_GOLDEN=write python -m pytest tests/codegen/test_golden_templates.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kernels.real_sizes import REAL

from llmc.codegen.kernel_table import TRITON
from llmc.extension import resolve
from llmc.targets.gpu_targets import sm_90

GOLDEN = Path(__file__).parent / "golden"
NAMES = (
    "decode_attention", "attention_combine", "attention_parts", "join_parts",
    "single_token_attention", "prefill_attention", "mixed_attention", "packed_attention",
    "latent_decode", "latent_prefill",
    "rope_append", "rope", "kv_append", "rope_tables", "row_spans",
    "row_begin", "row_ids", "row_slots", "row_last", "row_commit", "row_accept", "row_propose", "row_rewind",
    "row_extend", "row_first", "row_reach", "row_mean", "row_advance", "row_penalize", "row_mask",
    "row_block_max",
    "row_sample_blocks", "row_sample", "row_finish", "row_logprobs", "round_groups", "scaled_gemm", "scaled_gemm_small",
    "scaled_gemm_tma", "all_reduce", "all_reduce_norm", "all_gather",
    "row_conv", "chunk_factors", "row_recurrence", "row_log",
)  # fmt: skip


def sources(name: str) -> dict[str, str]:
    """Op -> the kernel's text for the first of its nodes in REAL that has this op, on its first schedule."""
    kernel, target = resolve(TRITON[f"triton/{name}"]), sm_90()
    out: dict[str, str] = {}
    for text in REAL[f"triton/{name}"]:
        (node,) = text.graph().nodes
        out.setdefault(node.op.name, kernel.emit(node, kernel.schedules(node, target)[0], target).text)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_text(name: str) -> None:
    for op, text in sources(name).items():
        path = GOLDEN / f"{name}-{op}.triton"
        if os.environ.get("LLMC_GOLDEN") == "write":
            path.write_text(text)
        assert text == path.read_text(), f"{path.name} changed; to accept it: LLMC_GOLDEN=write, and read git diff"
