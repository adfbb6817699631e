"""Writes a checkpoint in the scheme `nibble`: python write_nibble.py FLOAT_MODEL NEW_FOLDER"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file


def quantise(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a weight [n, k], rounded to the nearest code."""
    step = (w.float().abs().amax(1).clamp_min(1e-6) / 7).to(torch.float16)
    code = (w.float() / step.float()[:, None]).round().clamp(-8, 7).to(torch.int16).numpy() + 8
    return {"codes": torch.from_numpy((code[:, ::2] | code[:, 1::2] << 4).astype(np.uint8)), "step": step}


def main(source: Path, folder: Path) -> None:
    """Quantise the layers' products; embeddings, norms and biases stay as they are."""
    shutil.copytree(source, folder)
    tensors = {}
    for name, w in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= {f"{name.removesuffix('weight')}{part}": x for part, x in quantise(w).items()}
        else:
            tensors[name] = w
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "nibble"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
