"""Fixtures that optimum-quanto writes: `python optimum_quanto.py [NAME...]`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from common import base, keep, oracle, packages, run
from optimum.quanto import QuantizedModelForCausalLM
from optimum.quanto.tensor.grouped import ungroup

# Name -> base model, type of weights, type of activations. The last two are made to be tried, and are not kept.
FIXTURES: dict[str, tuple[str, str, str | None]] = {
    "quanto-int8": ("llama_short", "qint8", "qint8"),
    "quanto-int4": ("llama_short", "qint4", None),
    "quanto-int2": ("llama_short", "qint2", None),
    "quanto-float8": ("llama_short", "qfloat8", None),
    "quanto-float8-e5m2": ("qwen2", "qfloat8_e5m2", None),
}


def dequantised(weight: Any) -> torch.Tensor:
    """As quanto's dequantisers compute it, with scales in float32."""
    if not hasattr(weight, "_shift"):
        return weight._scale.float() * weight._data.float()
    value = weight._scale.float() * weight._data.unpack().float() - weight._shift.float()
    return ungroup(value, axis=weight.axis, orig_shape=weight.shape).contiguous()


def make(name: str) -> None:
    source, weights, activations = FIXTURES[name]
    model = QuantizedModelForCausalLM.quantize(base(source), weights, activations, exclude="lm_head")
    with tempfile.TemporaryDirectory() as at:
        model.save_pretrained(at)
        folder = keep(Path(at), name)
        read = QuantizedModelForCausalLM.from_pretrained(at)
    modules = {k: m for k, m in read._wrapped.named_modules() if hasattr(getattr(m, "weight", None), "_scale")}
    values = {k: dequantised(m.weight.detach()) for k, m in modules.items()}
    oracle(folder, values, "quanto's formula, scales in float32", packages("optimum-quanto"))


if __name__ == "__main__":
    run(make, FIXTURES)
