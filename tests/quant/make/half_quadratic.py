"""Fixtures of layers that hqq quantised: `python half_quadratic.py [NAME...]`.

The tensors are those of `HQQLinear.state_dict`, which transformers saves. transformers 5.17 quantises no model with
hqq, so the script replaces the weights of the base model's checkpoint itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from common import base, keep, oracle, packages, run
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer
from safetensors.torch import save_file

# Name -> settings, dtype of scales. Two are made to be tried, and are not kept: hqq-4bit, hqq-8bit.
FIXTURES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "hqq-2bit-axis0": ({"nbits": 2, "group_size": 16, "axis": 0}, torch.bfloat16),
    "hqq-3bit": ({"nbits": 3, "group_size": 32, "axis": 1}, torch.bfloat16),
    "hqq-4bit": ({"nbits": 4, "group_size": 32, "axis": 1}, torch.float16),
    "hqq-8bit": ({"nbits": 8, "group_size": None, "axis": 1}, torch.float16),
}


def dequantised(layer: HQQLinear) -> torch.Tensor:
    meta = layer.meta
    code = Quantizer.unpack[meta["packing"]](layer.W_q, dtype=torch.float32)
    rows = meta["scale"].shape[0] if meta["axis"] == 1 else meta["group_size"]
    return ((code[:rows] - meta["zero"].float()) * meta["scale"].float()).reshape(meta["shape"])


def make(name: str) -> None:
    settings, dtype = FIXTURES[name]
    model = base("llama_short")
    config = {"weight_quant_params": settings | {"channel_wise": True, "optimize": True, "round_zero": False}}
    tensors, weights = {}, {}
    for key, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and key != "lm_head":
            layer = HQQLinear(module, BaseQuantizeConfig(**settings), compute_dtype=dtype, device="cpu", del_orig=False)
            tensors |= {f"{key}.{k}": v.detach() for k, v in layer.state_dict().items() if v is not None}
            weights[key] = dequantised(layer).contiguous()
    tensors |= {k: p.data for k, p in model.named_parameters() if k.removesuffix(".weight") not in weights}
    facts = {"quant_config": config, "quant_method": "hqq", "skip_modules": ["lm_head"]}
    with tempfile.TemporaryDirectory() as at:
        model.config.quantization_config = facts
        transformers.PreTrainedConfig.save_pretrained(model.config, at)
        copies = {k: v.clone().contiguous() for k, v in tensors.items()}
        save_file(copies, Path(at) / "model.safetensors", {"format": "pt"})
        folder = keep(Path(at), name)
    oracle(folder, weights, "hqq's Quantizer.unpack, scales in float32", packages("hqq"))


if __name__ == "__main__":
    run(make, FIXTURES)
