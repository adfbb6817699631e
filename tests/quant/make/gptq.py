"""Fixtures written by gptqmodel, GPTQ and AWQ: `python gptq.py [NAME...]`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # minutes a model, for nothing

import torch
from common import keep, logits, oracle, packages, run, samples, save_base, tensors
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear import AWQuantLinear, GPTQQuantLinear


@dataclass(frozen=True)
class Fixture:
    """A checkpoint: its base model and the arguments of gptqmodel's QuantizeConfig."""

    base: str
    config: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def gptq(base: str, bits: int = 4, note: str = "", **kw: Any) -> Fixture:
    return Fixture(base, {"bits": bits, "group_size": 32, "desc_act": False, "act_group_aware": False} | kw, note)


def awq(base: str, note: str = "", **kw: Any) -> Fixture:
    return Fixture(base, {"bits": 4, "group_size": 32, "quant_method": "awq", "format": "gemm"} | kw, note)


MIXED = {
    r"+:model\.layers\.0\.mlp\.down_proj": {"bits": 8, "group_size": 32},
    r"-:model\.layers\.1\.self_attn\.o_proj": {},
    r"+:model\.layers\.1\.mlp\.(gate|up)_proj": {"bits": 4, "group_size": 64, "sym": False},
}
FIXTURES = {
    "gptq-2bit": gptq("qwen2", 2),
    "gptq-3bit": gptq("qwen2", 3),
    "gptq-3bit-asym": gptq("qwen2", 3, sym=False),
    "gptq-4bit": gptq("llama", group_size=128, note="a ragged last group"),
    "gptq-4bit-asym": gptq("llama", sym=False),
    "gptq-4bit-asym-v2": gptq("qwen2", sym=False, format="gptq_v2"),
    "gptq-4bit-v2": gptq("qwen2", format="gptq_v2"),
    "gptq-4bit-desc-act": gptq("llama", desc_act=True),
    "gptq-4bit-desc-act-asym": gptq("qwen2", desc_act=True, sym=False),
    "gptq-4bit-channel": gptq("qwen2", group_size=-1),
    "gptq-4bit-dynamic": gptq("llama", dynamic=MIXED),
    "gptq-8bit": gptq("qwen2", 8),
    "gptq-8bit-asym": gptq("qwen2", 8, sym=False),
    "gptq-4bit-moe": gptq("mixtral"),
    "awq-gptqmodel": awq("llama256", note="it asks for rows in multiples of 64"),
}


def dequantised(layer: Any) -> torch.Tensor:
    """A layer's weight [N, K] by gptqmodel's own dequantisation, its scales made float32 first."""
    layer.scales = layer.scales.float()
    w = layer.dequantize_weight() if hasattr(layer, "dequantize_weight") else layer(torch.eye(layer.in_features))
    return w.float().T.contiguous()


def make(name: str) -> None:
    f = FIXTURES[name]
    model = GPTQModel.load(str(save_base(f.base)), QuantizeConfig(device="cpu", **f.config))
    ones = torch.ones(samples().shape[1], dtype=torch.int64)
    model.quantize([{"input_ids": row, "attention_mask": ones} for row in samples()], batch_size=1)
    with tempfile.TemporaryDirectory() as at:
        model.save(at)
        folder = keep(Path(at), name)
        backend = BACKEND.TORCH if f.config.get("quant_method") != "awq" else BACKEND.TORCH_AWQ
        stored = next(v.dtype for k, v in sorted(tensors(folder).items()) if k.endswith(".scales"))
        loaded = GPTQModel.load(at, device="cpu", backend=backend, dtype=stored)  # another dtype rounds the scales
    own = logits(loaded.model)
    weights = {
        n: dequantised(m) for n, m in loaded.model.named_modules() if isinstance(m, GPTQQuantLinear | AWQuantLinear)
    }
    how = "gptqmodel's torch backend with its scales as float32"
    oracle(folder, weights, how, packages("gptqmodel"), f.note, producer_logits=own)


if __name__ == "__main__":
    run(make, FIXTURES)
