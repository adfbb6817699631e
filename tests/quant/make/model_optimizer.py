"""Fixtures written by NVIDIA's Model Optimizer: `python model_optimizer.py [NAME...]`."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
import transformers
from common import keep, oracle, packages, run, samples, save_base, tensors
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor

# Name -> base model, configuration, and whether the KV cache is quantised. Two are made to be tried, and are not kept.
FIXTURES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "mo-fp8-kv": ("llama_short", mtq.FP8_DEFAULT_CFG, True),
    "mo-fp8-rows": ("llama_short", mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, False),
    "mo-fp8-tiles": ("llama_tiles", mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, False),
    "mo-mxfp8": ("llama_short", mtq.MXFP8_DEFAULT_CFG, False),
    "mo-nvfp4": ("llama_short", mtq.NVFP4_DEFAULT_CFG, False),
    "mo-nvfp4-moe": ("qwen3_moe", mtq.NVFP4_DEFAULT_CFG, False),
}


def dequantised(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """A weight [N, K] in float32, of 4-bit floats and MXFP8 by ModelOpt's own dequantisation."""
    w, scale = parts["weight"], parts["weight_scale"]
    if "weight_scale_2" in parts:
        shape = torch.Size((w.shape[0], 2 * w.shape[1]))
        whole = parts["weight_scale_2"].float()
        q = NVFP4QTensor(shape, torch.float32, w)
        return q.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
    if scale.dtype == torch.uint8:
        return MXFP8QTensor(w.shape, torch.float32, w).dequantize(torch.float32, scale=scale)
    if scale.ndim == 4:
        scale = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)[: w.shape[0], : w.shape[1]]
    return w.float() * (scale[:, None] if scale.ndim == 1 and scale.numel() > 1 else scale)


def make(name: str) -> None:
    source, config, kv = FIXTURES[name]
    config = copy.deepcopy(config)
    if kv:
        config = mtq.update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])
    model = transformers.AutoModelForCausalLM.from_pretrained(save_base(source), dtype=torch.bfloat16).eval()

    def calibrate(model: Any) -> None:
        with torch.no_grad():
            model(samples())

    mtq.quantize(model, config, calibrate)
    with tempfile.TemporaryDirectory() as at, torch.inference_mode():
        export_hf_checkpoint(model, export_dir=at)
        folder = keep(Path(at), name)
    stored = tensors(folder)
    modules = sorted(k.removesuffix(".weight_scale") for k in stored if k.endswith(".weight_scale"))
    found = {m: {k.rpartition(".")[2]: v for k, v in stored.items() if k.rpartition(".")[0] == m} for m in modules}
    weights = {m: dequantised(parts).float().contiguous() for m, parts in found.items()}
    oracle(folder, weights, "modelopt's QTensor.dequantize in float32; FP8 times scale", packages("nvidia-modelopt"))


if __name__ == "__main__":
    run(make, FIXTURES)
