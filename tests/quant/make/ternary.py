"""The fixture of BitNet's layout, packed by transformers: `python ternary.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from common import base, keep, oracle, packages, run
from safetensors.torch import save_file
from transformers.integrations.bitnet import pack_weights, unpack_weights


def make(name: str) -> None:
    model = base("llama_short")
    tensors, weights = {}, {}
    for key, p in model.named_parameters():
        module = key.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[key] = p.data
            continue
        scale = (1 / p.data.float().abs().mean()).to(torch.bfloat16)
        packed = pack_weights((p.data.float() * scale.float()).round().clamp(-1, 1))
        weights[module] = unpack_weights(packed, torch.float32) / scale.float()
        tensors |= {key: packed, f"{module}.weight_scale": scale.reshape(1)}
    with tempfile.TemporaryDirectory() as at:
        model.config.quantization_config = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
        model.config.save_pretrained(at)
        copies = {k: v.clone().contiguous() for k, v in tensors.items()}
        save_file(copies, Path(at) / "model.safetensors", {"format": "pt"})
        folder = keep(Path(at), name)
    oracle(folder, weights, "transformers' unpack_weights over the scale", packages())


if __name__ == "__main__":
    run(make, ("bitnet",))
