"""The ops that the GPU pipeline uses for checkpoints with scales of tiles, and its notes about unsupported ones."""

from __future__ import annotations

from collections import Counter

import pytest
from quant.test_decode import FIXTURES, decoder

from llmc.extension import load
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.trace_model import trace
from llmc.ir.graph import Module
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.quant.typed_weights import use_codes

pytestmark = pytest.mark.drawn


def lowered(name: str, target: str) -> tuple[Module, str]:
    """The module of a fixture after `lower-quantized`, and the notes of the pass."""
    registry = load()
    with Checkpoint(trace(FIXTURES / name, dtype="bf16"), decoder=decoder(FIXTURES / name)) as checkpoint:
        module = checkpoint.traced.module
        use_codes(module, checkpoint, registry.opset())
        ctx = Ctx(registry.opset(), registry.target(target), registry.kernels)
        run_pipeline(
            module, parse_pipeline("canonicalize, fuse-norm, fuse-linear, lower-quantized", registry.passes), ctx
        )
    return module, "\n".join(ctx.notes)


@pytest.mark.parametrize("name", ("hf-fp8-block", "ct-fp8-block", "hf-fp8-block-ue8m0"))
def test_products_multiply_codes(name: str) -> None:
    module, notes = lowered(name, "cuda:sm_90")
    ops = Counter(n.op.name for n in module.graphs["main"].nodes)
    assert ops["block_scaled_linear"] and ops["round_groups"] and not ops["dequantize"] and not notes
    for n in module.graphs["main"].nodes:
        if n.op.name == "block_scaled_linear":
            assert [v.type.dtype for v in n.operands[:4]] == ["f8e4m3", "f8e4m3", "f32", "f32"]
            assert (
                n.operands[2].node is n.operands[0].node
                and n.operands[2].type.shape[-1] == n.operands[3].type.shape[-1]
            )


def test_columns_that_do_not_divide_are_dequantised() -> None:
    module, notes = lowered("hf-fp8-block-ragged", "cuda:sm_90")
    assert "columns are not a multiple of 128" in notes
    assert any(n.op.name == "dequantize" for n in module.graphs["main"].nodes)


def test_a_gpu_without_such_instructions_dequantises() -> None:
    module, notes = lowered("hf-fp8-block", "cuda:sm_80")
    assert "triton/scaled_gemm: cuda:sm_80 has no instructions for f8e4m3" in notes
    ops = Counter(n.op.name for n in module.graphs["main"].nodes)
    assert ops["dequantize"] and not ops["block_scaled_linear"] and not ops["round_groups"]
