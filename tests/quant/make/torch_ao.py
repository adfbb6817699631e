"""Fixtures written by torchao through transformers: `python torch_ao.py [NAME...]`.

`ao-int4-tiles` is put together from torchao's own quantisation and tensor class, since its packing runs on a GPU alone:
`packed` below is the layout of PyTorch's `_convert_weight_to_int4pack` for NVIDIA GPUs (aten/native/cuda/int4mm.cu).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from common import keep, oracle, packages, run, save_base
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, NVFP4WeightOnlyConfig
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict, unflatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int4TilePackedTo4dTensor,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
)
from torchao.quantization.granularity import PerGroup, PerTensor
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_qparams_affine_tinygemm,
    _quantize_affine_tinygemm,
)
from transformers import TorchAoConfig

FP8 = Float8WeightOnlyConfig()
# Three are made to be tried, and are not kept: ao-8da4w, ao-int8-dynamic, ao-mxfp8.
FIXTURES: dict[str, Any] = {
    "ao-8da4w": Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)),
    "ao-fp8": FP8,
    "ao-int4-tiles": None,
    "ao-int8-dynamic": Int8DynamicActivationInt8WeightConfig(version=2),
    "ao-mixed": FqnToConfig(
        {
            "re:.*self_attn.*": Int8WeightOnlyConfig(version=2, granularity=PerGroup(32)),
            "model.layers.0.mlp.down_proj": None,
            "model.layers.0.mlp.up_proj": Int8WeightOnlyConfig(version=2, granularity=PerTensor()),
            "_default": FP8,
        }
    ),
    "ao-mxfp8": MXDynamicActivationMXWeightConfig(),
    "ao-nvfp4": NVFP4WeightOnlyConfig(),
}


def spread(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """One entry for each element of a weight."""
    return x.float().repeat_interleave(shape[0] // x.shape[0], 0).repeat_interleave(shape[1] // x.shape[1], 1)


def dequantised(w: Any) -> torch.Tensor:
    """A weight in float32; torchao's own dequantisation of integers rounds to the dtype of the model."""
    if type(w).__name__ not in ("Int8Tensor", "IntxUnpackedToInt8Tensor"):
        return w.dequantize(torch.float32)
    value = (w.qdata.float() - spread(w.zero_point, w.shape)) * spread(w.scale, w.shape)
    error = (w.dequantize().float() - value).norm() / value.norm()
    if error > 0.004:
        raise ValueError(f"torchao dequantises other numbers: {error}")
    return value


def packed(code: torch.Tensor) -> torch.Tensor:
    """int32 [n / 8, k / 128, 32, 4] of codes [n, k] of 4 bits."""
    n, k = code.shape
    out = torch.zeros(n // 8, k // 128, 32, 4, dtype=torch.int64)
    for lane in range(32):
        for word in range(4):
            for place in range(8):
                tile, half, odd = place >> 1 & 1, place & 1, place >> 2
                columns = torch.arange(0, k, 128) + word * 32 + tile * 16 + half * 8 + (lane % 4) * 2 + odd
                out[:, :, lane, word] |= code[lane // 4 :: 8, columns].long() << 4 * place
    return (out - ((out >> 31) << 32)).to(torch.int32)


def tiles(w: torch.Tensor, size: int = 64) -> tuple[Any, torch.Tensor]:
    """A weight as torchao packs it, padded to 1024 columns, and its dequantised values."""
    n, k = w.shape
    whole = torch.nn.functional.pad(w, (0, -k % 1024, 0, -n % 8))
    how = {"quant_min": 0, "quant_max": 15}
    scale, zero = _choose_qparams_affine_tinygemm(
        whole, mapping_type=MappingType.ASYMMETRIC, block_size=(1, size), target_dtype=torch.int32,
        scale_dtype=w.dtype, zero_point_dtype=w.dtype, **how,
    )  # fmt: skip
    code = _quantize_affine_tinygemm(whole, (1, size), scale, zero, torch.int32, **how)
    scale, zero = (x.reshape(whole.shape[0], -1) for x in (scale, zero))
    value = (code.float() - 8) * spread(scale, code.shape) + spread(zero, code.shape)
    pairs = torch.stack([scale, zero], -1).transpose(0, 1).contiguous()
    return Int4TilePackedTo4dTensor(packed(code), pairs, [1, size], w.shape), value[:n, :k]


def write_tiles(folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint whose attention has 4-bit integers in tensor core tiles."""
    source = save_base("llama_short")
    config = transformers.AutoConfig.from_pretrained(source)
    config.quantization_config = {"quant_method": "torchao", "quant_type": {}}
    config.save_pretrained(folder)
    state, weights = load_file(source / "model.safetensors"), {}
    for name in [n for n in state if "self_attn" in n]:
        state[name], weights[name.removesuffix(".weight")] = tiles(state[name])
    flat, metadata = flatten_tensor_state_dict(state)
    save_file({k: v.contiguous() for k, v in flat.items()}, folder / "model.safetensors", {**metadata, "format": "pt"})
    return weights


def write(config: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Quantise, save and read back."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    chosen = TorchAoConfig(config)
    model = load(save_base("llama_short"), dtype=torch.bfloat16, quantization_config=chosen, device_map="cpu")
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as f:
        found = {k: f.get_tensor(k) for k in f.keys()}
        metadata = {k: v for k, v in f.metadata().items() if k != "format"}
    state, _ = unflatten_tensor_state_dict(found, metadata)
    return {k.removesuffix(".weight"): dequantised(w) for k, w in state.items() if type(w) is not torch.Tensor}


def make(name: str) -> None:
    with tempfile.TemporaryDirectory() as at:
        weights = write(FIXTURES[name], Path(at)) if FIXTURES[name] else write_tiles(Path(at))
        folder = keep(Path(at), name)
    weights = {k: w.float().contiguous() for k, w in weights.items()}
    oracle(folder, weights, "torchao's tensors in float32", packages("torchao"))


if __name__ == "__main__":
    run(make, FIXTURES)
