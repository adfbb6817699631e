"""Mixtures whose checkpoints name 8-bit activations, compiled for a GPU and run in Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from kernels.triton_harness import INTERPRETED
from models.kit import ir_logits, prompts, relative_error
from models.test_gpu_programs import device  # noqa: F401
from models.test_kv_cache import LIMITS, scored
from quant.make.common import SMALL
from quant.test_decode import opened
from quant.test_make import made

from llmc.driver import compile_model
from llmc.extension import load
from llmc.ir.graph import Module
from llmc.options import Options
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.quant.typed_weights import use_codes
from tests.runtime.interpret_device import InterpretDevice

pytestmark = pytest.mark.drawn
SIZES: dict[str, Any] = SMALL | {
    "hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 3, "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}  # fmt: skip
# Scheme -> the dtype of the codes, their block, and how much rounding weights and activations may cost the logits.
SCHEMES = {
    "w8a8": ("i8", (1, 0), 0.06), "fp8": ("f8e4m3", (1, 0), 0.15), "fp8-block": ("f8e4m3", (128, 128), 0.15)
}  # fmt: skip


def mixture(folder: Path) -> Path:
    """A checkpoint of one layer with four experts, random."""
    torch.manual_seed(24)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3_moe", **SIZES))
    model.save_pretrained(folder)
    return folder


def reference(folder: Path, target: str, options: str, tokens: np.ndarray) -> tuple[np.ndarray, Module]:
    """The logits by the reference interpreter with the graph that the passes leave for a target, and its module."""
    registry = load()
    with opened(folder) as checkpoint:
        module = checkpoint.traced.module
        use_codes(module, checkpoint, registry.opset())
        text = f"canonicalize, fuse-linear, split-moe, lower-quantized{options}"
        ctx = Ctx(registry.opset(), registry.target(target), registry.kernels)
        run_pipeline(module, parse_pipeline(text, registry.passes), ctx)
        positions = np.arange(len(tokens), dtype=np.int32)
        return ir_logits(module, checkpoint.traced, checkpoint, tokens, positions, np.arange(len(tokens))), module


@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_of_experts_multiply_codes(
    scheme: str, tmp_path: Path, device: InterpretDevice  # noqa: F811
) -> None:  # fmt: skip
    code, block, cost = SCHEMES[scheme]
    tokens = prompts((6,), 64)[0]
    plain = reference(mixture(tmp_path / "plain"), "cuda:sm_90", "", tokens)[0]
    folder = made(tmp_path / "plain", tmp_path / "quantised", scheme)
    want, module = reference(folder, "cuda:sm_90", "", tokens)
    nodes = [n for n in module.graphs["main"].nodes if "moe_" in n.op.name]
    assert [n.op.name for n in nodes] == ["moe_route", "scaled_moe_up", "scaled_moe_down"]
    assert {v.type.dtype for n in nodes[1:] for v in (n.operands[0], n.operands[3])} == {code}
    assert {tuple(n.attrs["block"]) for n in nodes[1:]} == {block}
    options = Options(target=INTERPRETED.name, dtype="float32", **LIMITS)
    summary = compile_model(folder, tmp_path / "model.llmc", options)
    assert not any("dequantised" in note for note in summary.notes)
    got = scored(tmp_path / "model.llmc", tokens, device)
    launched = Counter(op for op, _ in device.launches)
    assert launched["scaled_moe_up"] == launched["scaled_moe_down"] > 0 == launched["quantized_moe_up"]
    np.testing.assert_allclose(relative_error(got, want[:-1]), 0, atol=2e-2)  # codes at the edge between two
    assert relative_error(want, plain) < cost


def test_the_cpu_multiplies_integers_and_leaves_activations_of_8_bit_floats(tmp_path: Path) -> None:
    """Rows are rounded to int8 with scales of 64 columns, finer than the checkpoint asks; of fp8 they are not."""
    source = mixture(tmp_path / "plain")
    for scheme, act in (("w8a8", "i8"), ("fp8", "")):
        folder = made(source, tmp_path / scheme, scheme)
        module = reference(folder, "cpu:x86-64-v4", "{act=i8, act_block=64}", prompts((5,), 64)[0])[1]
        nodes = [n for n in module.graphs["main"].nodes if n.op.name.startswith("quantized_moe")]
        assert [(n.attrs["act"], n.attrs["act_block"]) for n in nodes] == [(act, 64 if act else 0)] * 2
