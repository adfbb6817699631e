"""Experts that are stored one by one under the names of modules, as tools write them that quantise Linear layers only.

The models hold them as stacks: with rows of gate and up one after the other, transposed, or alternating.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.cases import FURTHER, LISTED, SMALL, UNLISTED, Case
from models.kit import eager_logits, fails, ir_logits, prompts, relative_error, save
from quant.handmade import fp8, packed
from quant.test_decode import decoder
from quant.test_handmade import PASSES
from safetensors.torch import load_file, save_file

from llmc.extension import load
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.trace_model import trace
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.quant.typed_weights import use_codes

GEMMA4 = SMALL | {
    "head_dim": 16, "global_head_dim": 16, "sliding_window": 8, "enable_moe_block": True, "num_experts": 4,
    "top_k_experts": 2, "moe_intermediate_size": 24, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
}  # fmt: skip
CASES = {
    "gemma4": Case("gemma4-experts", "gemma4_text", GEMMA4),
    **{c.name: c for c in (*LISTED, *UNLISTED, *FURTHER) if c.name in ("gpt_oss", "granitemoe", "llama4_text")},
}
# The place of the experts of a layer in the names, of the model and of the checkpoint.
PLACES = {"gemma4": ("experts.",) * 2, "llama4_text": ("feed_forward.experts.",) * 2, "gpt_oss": ("mlp.experts.",) * 2}
NESTED = {"gpt_oss": ("mlp.experts.", "mlp.experts.experts.")}  # as older tools write them
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 8}
CONFIG = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}  # fmt: skip


def marks(name: str) -> Any:
    """Return the marks of a case: one case runs always."""
    return () if name == "llama4_text" else pytest.mark.drawn


def separate(stored: Mapping[str, torch.Tensor], name: str, place: tuple[str, str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint with its stacks of experts as a weight, and a bias, for each expert."""
    out = {}
    for key, x in stored.items():
        prefix, inside, stack = key.partition(place[0])
        if not inside or "proj" not in stack or "shared" in prefix:
            out[key] = x
            continue
        kind = "bias" if stack.endswith("_bias") else "weight"
        names = ("gate_proj", "up_proj") if stack.startswith("gate_up") else ("down_proj",)
        for e, w in enumerate(x if kind == "bias" or name == "gemma4" else x.transpose(1, 2)):
            pieces = [w[i :: len(names)] for i in range(len(names))] if name == "gpt_oss" else w.chunk(len(names))
            for part, piece in zip(names, pieces, strict=True):
                out[f"{prefix}{place[1]}{e}.{part}.{kind}"] = piece.contiguous().clone()
    assert len(out) > len(stored)
    return out


def write(name: str, folder: Path, place: tuple[str, str]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Write a float checkpoint; return transformers' model and the stored tensors."""
    model = save(CASES[name], folder)
    tensors = separate(load_file(folder / "model.safetensors"), name, place)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model, tensors


def quantize(folder: Path, config: Mapping[str, Any]) -> None:
    """Add a quantization_config to config.json."""
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"quantization_config": config}))


def computed(checkpoint: Checkpoint, name: str) -> np.ndarray:
    tokens, positions = prompts(CASES[name].lengths, 320)
    traced = checkpoint.traced
    return ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(len(tokens)))


@pytest.mark.parametrize(
    ("name", "place"), [pytest.param(*x, marks=marks(x[0])) for x in (*PLACES.items(), *NESTED.items())]
)
def test_float_experts(name: str, place: tuple[str, str], tmp_path: Path) -> None:
    model, _ = write(name, tmp_path, place)
    tokens, _ = prompts(CASES[name].lengths, 320)
    want = eager_logits(model, tokens, CASES[name].lengths)
    with Checkpoint(trace(tmp_path, **CASES[name].trace)) as checkpoint:
        assert relative_error(computed(checkpoint, name), want) <= 1e-4


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in PLACES])
def test_quantised_experts(name: str, tmp_path: Path) -> None:
    """Products read the codes of all experts, and the logits are those of the dequantised weights."""
    _, tensors = write(name, tmp_path, PLACES[name])
    stored, values, count, encode = {}, {}, 0, packed(4, 8, sym=False)
    for key, x in tensors.items():
        if ".experts." not in key or key.endswith("bias"):
            stored[key] = values[key] = x
            continue
        parts, values[key] = encode(x)
        stored |= {key.removesuffix("weight") + part: t.contiguous() for part, t in parts.items()}
        count += 1
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint(trace(tmp_path, dtype="f32", **CASES[name].trace)) as checkpoint:
        want = computed(checkpoint, name)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    quantize(tmp_path, CONFIG)
    traced = trace(tmp_path, dtype="f32", **CASES[name].trace)
    with Checkpoint(traced, decoder=decoder(tmp_path)) as checkpoint:
        assert relative_error(computed(checkpoint, name), want) <= 1e-5
        assert use_codes(traced.module, checkpoint, load().opset()) == count
        run_pipeline(traced.module, parse_pipeline(PASSES, load().passes), Ctx(load().opset()))
        assert relative_error(computed(checkpoint, name), want) <= 1e-5


def test_a_list_for_each_stack(tmp_path: Path) -> None:
    """As Unsloth writes gpt-oss: rows of gate and up alternate as in the stack, and the router is a module."""
    model = save(CASES["gpt_oss"], tmp_path)
    out = {}
    for key, x in load_file(tmp_path / "model.safetensors").items():
        if ".experts." not in key:
            out[key.replace(".router.", ".router.linear.")] = x
            continue
        kind = "bias" if key.endswith("_bias") else "weight"
        for e, w in enumerate(x if kind == "bias" else x.transpose(1, 2)):
            out[f"{key.removesuffix('_bias')}s.{e}.{kind}"] = w.contiguous().clone()
    save_file(out, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens, _ = prompts(CASES["gpt_oss"].lengths, 320)
    want = eager_logits(model, tokens, CASES["gpt_oss"].lengths)
    with Checkpoint(trace(tmp_path)) as checkpoint:
        assert relative_error(computed(checkpoint, "gpt_oss"), want) <= 1e-4


@pytest.mark.drawn
def test_a_stack_with_a_scale_for_each_row(tmp_path: Path) -> None:
    """As GraniteMoE is quantised by compressed-tensors."""
    save(CASES["granitemoe"], tmp_path)
    stored, values, encode = {}, {}, fp8("channel", "weight_scale", torch.bfloat16)
    for key, x in load_file(tmp_path / "model.safetensors").items():
        stored[key] = values[key] = x
        if x.ndim == 3:
            parts, values[key] = encode(x)
            stored |= {key.removesuffix("weight") + part: t for part, t in parts.items()}
    assert len(stored) == len(values) + 4
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint(trace(tmp_path, dtype="f32")) as checkpoint:
        want = computed(checkpoint, "granitemoe")
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    quantize(tmp_path, CONFIG | {"format": "float-quantized", "config_groups": groups})
    traced = trace(tmp_path, dtype="f32")
    with Checkpoint(traced, decoder=decoder(tmp_path)) as checkpoint:
        assert relative_error(computed(checkpoint, "granitemoe"), want) <= 1e-5
        assert use_codes(traced.module, checkpoint, load().opset()) == 4


def test_a_stack_with_scales_beside_it_is_refused(tmp_path: Path) -> None:
    """As ModelOpt writes Llama 4, whose layout no file at hand shows."""
    save(CASES["llama4_text"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stack = next(key for key in stored if key.endswith("experts.gate_up_proj"))
    stored |= {stack: stored[stack].to(torch.float8_e4m3fn), f"{stack}_weight_scale": torch.tensor(0.5)}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    quantize(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"})
    traced = trace(tmp_path)
    fails("E307", stack, "experts.0.", do=lambda: Checkpoint(traced, decoder=decoder(tmp_path)))


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    _, tensors = write("llama4_text", tmp_path, PLACES["llama4_text"])
    kept = {key: x for key, x in tensors.items() if ".up_proj" not in key}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    traced = trace(tmp_path)
    fails("E323", "feed_forward.experts.gate_up_proj", "up_proj.weight is missing", do=lambda: Checkpoint(traced))
