"""Fixtures that mlx-lm writes, on a CPU: `python apple.py [NAME...]`. It also decodes them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from common import keep, oracle, packages, run, save_base
from mlx_lm import convert

mx.set_default_device(mx.cpu)


def some_of_eight_bits(path: str, module: Any) -> bool | dict[str, Any]:
    """A mixture as mlx-lm's recipes make them: other settings for one module, and one that is not quantised."""
    if path.endswith("v_proj"):
        return {"group_size": 64, "bits": 8, "mode": "affine"}
    return not path.endswith("o_proj")


# Name -> options. Others are made to be tried, and are not kept.
FIXTURES: dict[str, dict[str, Any]] = {
    "mlx-4bit": {"q_bits": 4, "q_group_size": 32},
    "mlx-3bit": {"q_bits": 3, "q_group_size": 32, "quant_predicate": some_of_eight_bits},
    "mlx-mxfp4": {"q_mode": "mxfp4"},
    "mlx-nvfp4": {"q_mode": "nvfp4"},
    "mlx-mxfp8": {"q_mode": "mxfp8"},
    "mlx-2bit": {"q_bits": 2, "q_group_size": 128},
    "mlx-5bit": {"q_bits": 5, "q_group_size": 32},
    "mlx-6bit": {"q_bits": 6, "q_group_size": 64},
    "mlx-8bit": {"q_bits": 8, "q_group_size": 64},
}


def dequantised(folder: Path) -> dict[str, torch.Tensor]:
    """MLX's own dequantisation, with scales and biases in float32."""
    config = json.loads((folder / "config.json").read_text())["quantization"]
    tensors = mx.load(str(folder / "model.safetensors"))
    found = {}
    for module in (name.removesuffix(".scales") for name in tensors if name.endswith(".scales")):
        own = config.get(module, config)
        scales, biases = tensors[f"{module}.scales"], tensors.get(f"{module}.biases")
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        settings = {key: own[key] for key in ("group_size", "bits", "mode")}
        value = mx.dequantize(tensors[f"{module}.weight"], scales, biases, **settings)
        found[module] = torch.from_numpy(np.array(value.astype(mx.float32)))
    return found


def make(name: str) -> None:
    source = save_base("llama_short")
    with tempfile.TemporaryDirectory() as at:
        convert(str(source), f"{at}/model", quantize=True, **FIXTURES[name])
        (Path(at) / "model" / "model.safetensors.index.json").unlink()  # of one file
        folder = keep(Path(at) / "model", name)
    oracle(folder, dequantised(folder), "mx.dequantize, scales in float32", packages("mlx", "mlx-lm"))


if __name__ == "__main__":
    run(make, FIXTURES)
