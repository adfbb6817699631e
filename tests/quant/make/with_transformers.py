"""Fixtures in layouts that transformers itself packs or unpacks on a CPU: `python with_transformers.py [NAME...]`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from common import base, keep, oracle, packages, run
from safetensors.torch import save_file
from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear
from transformers.integrations.metal_quantization import _affine_dequantize_tensor, _affine_quantize_tensor

RULES = {r"mlp\.down_proj$": {"num_bits": 2}, "self_attn": {"num_bits": 8}}
Parts = dict[str, torch.Tensor]


def metal(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """As MetalQuantize stores a weight, 4 bits and groups of 32."""
    packed, scales, biases = _affine_quantize_tensor(weight, 32, 4)
    value = _affine_dequantize_tensor(packed, scales, biases, 32, 4)
    return {"weight": packed, "scales": scales, "qbiases": biases}, value


def fields(weight: torch.Tensor, bits: int, blocks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and the scales of each row, or of each of its blocks of columns."""
    k, top = weight.shape[1], 1 << (bits - 1)
    scale = weight.float().unflatten(1, (blocks, -1)).abs().amax(-1).clamp(min=1e-6) / max(top - 1, 1)
    code = (weight.float() / scale.repeat_interleave(k // blocks, 1)).round().clamp(-top, top - 1).to(torch.int8)
    if bits == 8:
        return code, scale
    many = 8 // bits
    parts = torch.nn.functional.pad((code + top).to(torch.uint8), (0, -k % many)).unflatten(1, (-1, many))
    return sum(parts[..., i] << bits * i for i in range(many)).to(torch.uint8), scale  # type: ignore[union-attr]


def linear(weight: torch.Tensor, bits: int) -> tuple[Parts, torch.Tensor]:
    """A linear module, and its weight as transformers unpacks it."""
    packed, scale = fields(weight, bits)
    module = QuantizedLinear(weight.shape[1], weight.shape[0], num_bits=bits)
    module.weight.data, module.weight_scale.data = packed, scale
    scales = {"input_activation_scale": torch.tensor(0.05), "output_activation_scale": torch.tensor(0.0)}
    return {"weight": packed, "weight_scale": scale, **scales}, module._dequantize_weights().detach()


def table(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """An embedding of 4 bits with two scales in a row."""
    packed, scale = fields(weight, 4, blocks=2)
    module = QuantizedEmbedding(*weight.shape, output_dtype=torch.float32, num_bits=4)
    module.embedding_quantized.data, module.embedding_scale.data = packed, scale
    return {"embedding_quantized": packed, "embedding_scale": scale}, module.weight.detach()


def stored(name: str, module: str, weight: torch.Tensor) -> tuple[Parts, torch.Tensor] | None:
    """The tensors of a module and its dequantised weight; None if it is not quantised."""
    if name == "metal":
        return metal(weight) if module.endswith("_proj") else None
    if module.endswith("embed_tokens"):
        return table(weight)
    if not module.endswith("_proj"):
        return None
    return linear(weight, 2 if "down_proj" in module else 8 if "self_attn" in module else 4)


CONFIGS: dict[str, dict[str, Any]] = {
    "metal": {"quant_method": "metal", "bits": 4, "group_size": 32, "modules_to_not_convert": ["lm_head"]},
    "gemma": {
        "quant_method": "gemma", "num_bits": 4, "quantize_embeddings": True, "module_quant_configs": RULES,
        "modules_to_not_convert": ["lm_head"],
    },
}  # fmt: skip


def make(name: str) -> None:
    model = base("llama_short")
    tensors, weights = {}, {}
    for key, p in model.named_parameters():
        module = key.removesuffix(".weight")
        if found := stored(name, module, p.data):
            weights[module] = found[1].contiguous()
            tensors |= {f"{module}.{part}": x for part, x in found[0].items()}
        else:
            tensors[key] = p.data
    with tempfile.TemporaryDirectory() as at:
        model.config.quantization_config = CONFIGS[name]
        model.config.save_pretrained(at)
        save_file({k: v.clone().contiguous() for k, v in tensors.items()}, Path(at) / "model.safetensors")
        folder = keep(Path(at), name)
    oracle(folder, weights, "transformers' functions, scales in float32", packages())


if __name__ == "__main__":
    run(make, CONFIGS)
