"""Fixtures written by llmcompressor in the layouts of compressed-tensors: `python compressed.py [NAME...]`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from common import keep, logits, oracle, packages, run, samples, save_base, tensors, tokenizer
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier

torch.Tensor.pin_memory = lambda self, *_, **__: self  # AWQModifier pins memory, which needs an accelerator


def scheme(preset: str, *targets: str, weights: Mapping[str, Any] | None = None, **acts: Any) -> QuantizationScheme:
    """A preset with other arguments of its weights and input activations."""
    made = preset_name_to_scheme(preset, list(targets or ("Linear",))).model_dump()
    made["weights"] |= weights or {}
    if acts:
        made["input_activations"] = (made["input_activations"] or {}) | acts
    return QuantizationScheme(**made)


@dataclass(frozen=True)
class Fixture:
    """A checkpoint: its base model, and llmcompressor's modifier with its arguments."""

    base: str
    schemes: Callable[[], tuple[QuantizationScheme, ...]]
    modifier: type = QuantizationModifier
    ignore: tuple[str, ...] = ("lm_head",)
    more: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def rtn(base: str, preset: str, weights: Mapping[str, Any] | None = None, **kw: Any) -> Fixture:
    acts = kw.pop("acts", {})
    return Fixture(base, lambda: (scheme(preset, weights=weights, **acts),), **kw)


def mixed() -> tuple[QuantizationScheme, ...]:
    return (
        scheme("FP8_DYNAMIC", "re:.*self_attn.*"),
        scheme("W4A16", "re:.*gate_proj", "re:.*up_proj", weights={"group_size": 32}),
        scheme("W8A16", "re:.*down_proj", weights={"strategy": "group", "group_size": 32}),
    )


G32 = {"group_size": 32}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
FIXTURES = {
    "ct-w4a16-gptq": rtn("llama", "W4A16", G32 | {"actorder": "static"}, modifier=GPTQModifier),
    "ct-w4a16-g128": rtn("llama256", "W4A16", ignore=("lm_head", "re:.*o_proj"), note="o_proj is not quantised"),
    "ct-w4a16-channel": rtn("qwen2", "W4A16", {"strategy": "channel", "group_size": None}),
    "ct-w4a16-asym": rtn("qwen2", "W4A16_ASYM", G32),
    "ct-w4a16-awq": rtn("llama", "W4A16_ASYM", G32, modifier=AWQModifier),
    "ct-w2a16": rtn("qwen2", "W2A16", G32),
    "ct-w3a16": rtn("qwen2", "W3A16", G32),
    "ct-w5a16": rtn("qwen2", "W5A16", G32),
    "ct-w8a16-head": rtn("llama_short", "W8A16", {"strategy": "channel", "group_size": None}, ignore=()),
    "ct-w8a16-asym": rtn("qwen2", "W8A16", G32 | {"symmetric": False}),
    "ct-w8a8": rtn("qwen2", "W8A8"),
    "ct-w8a8-static": rtn("qwen2", "W8A8", acts={"strategy": "tensor", "dynamic": False, "observer": "minmax"}),
    "ct-w8a8-static-asym": rtn(
        "qwen2",
        "W8A8",
        {"strategy": "tensor"},
        acts={"strategy": "tensor", "dynamic": False, "symmetric": False, "observer": "minmax"},
    ),
    "ct-w4afp8": rtn("qwen2", "W4AFP8", G32),
    "ct-fp8": rtn("qwen2", "FP8"),
    "ct-fp8-dynamic": rtn("qwen2", "FP8_DYNAMIC"),
    "ct-fp8-block": rtn("llama256", "FP8_BLOCK"),
    "ct-fp8-block-ragged": rtn("qwen2", "FP8_BLOCK"),
    "ct-fp8-kv": rtn("qwen2", "FP8", more={"kv_cache_scheme": KV}),
    "ct-kv-only": Fixture("qwen2", tuple, more={"kv_cache_scheme": KV}, note="the weights are not quantised"),
    "ct-nvfp4": rtn("llama", "NVFP4"),
    "ct-nvfp4a16": rtn("qwen2", "NVFP4A16"),
    "ct-mxfp4": rtn("qwen2", "MXFP4A16"),
    "ct-mxfp8": rtn("qwen2", "MXFP8A16"),
    "ct-mixed": Fixture("llama", mixed, note="a format for each config group"),
    "ct-moe-w4a16": rtn("qwen3_moe", "W4A16", G32, ignore=("lm_head", "re:.*mlp.gate$")),
    "ct-moe-fp8": rtn("qwen3_moe", "FP8_DYNAMIC", ignore=("lm_head", "re:.*mlp.gate$")),
}


def dequantised(values: dict[str, torch.Tensor], made: QuantizationScheme) -> torch.Tensor:
    """A module's weight in float32 by the producer's decompressor, its scale made float32 first."""
    if made.format == "nvfp4-pack-quantized":  # its decompress answers bfloat16: the same two calls in float32
        codes = unpack_fp4_from_uint8(values["weight_packed"], *scale_shape(values), dtype=torch.float32)
        scale, factor = values["weight_scale"].float(), values["weight_global_scale"]
        return dequantize(codes, scale, args=made.weights, dtype=torch.float32, global_scale=factor)
    if values["weight_scale"].dtype != torch.uint8:
        values = values | {"weight_scale": values["weight_scale"].float()}
    w = BaseCompressor.get_value_from_registry(made.format).decompress(values, made)["weight"]
    return w.float()


def scale_shape(values: dict[str, torch.Tensor]) -> tuple[int, int]:
    n, k = values["weight_packed"].shape
    return n, 2 * k


def producer_logits(folder: Path) -> tuple[torch.Tensor | None, str]:
    """The logits of transformers' loader in float32, or in bfloat16 where its kernels know no other; a note."""
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        try:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
            return logits(loaded), "" if dtype == torch.float32 else "; producer_logits in bfloat16"
        except (RuntimeError, ValueError, TypeError, AttributeError) as e:
            errors.append(str(e))
    return None, f"; transformers does not run it: {errors[0].splitlines()[0]}"


def make(name: str) -> None:
    f = FIXTURES[name]
    ids = samples()
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    model = transformers.AutoModelForCausalLM.from_pretrained(save_base(f.base), dtype=torch.bfloat16)
    groups = {f"group_{i}": s for i, s in enumerate(f.schemes())}
    recipe = f.modifier(config_groups=groups, ignore=list(f.ignore), **f.more)
    oneshot(
        model=model,
        processor=tokenizer(),
        dataset=data,
        recipe=recipe,
        num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1],
    )
    with tempfile.TemporaryDirectory() as at:
        model.save_pretrained(at, save_compressed=True)
        folder = keep(Path(at), name)
    schemes = {n: m.quantization_scheme for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}
    stored = tensors(folder)
    weights = {}
    for n, s in schemes.items():
        local = {k.removeprefix(n + "."): v for k, v in stored.items() if k.rpartition(".")[0] == n}
        if "weight_scale" in local:
            weights[n] = dequantised(local, s)
    own, note = producer_logits(folder)
    how = "compressed_tensors: BaseCompressor.decompress with weight_scale as float32"
    oracle(
        folder,
        weights,
        how,
        packages("llmcompressor", "compressed-tensors"),
        (f.note + note).removeprefix("; "),
        producer_logits=own,
    )


if __name__ == "__main__":
    logging.disable(logging.INFO)
    run(make, FIXTURES)
