"""Fixtures written by bitsandbytes through transformers: `python bnb.py [NAME...]`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import bitsandbytes as bnb
import torch
import transformers
from common import keep, logits, oracle, packages, run, save_base, tensors

COMMON = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
FIXTURES = {
    "bnb-nf4": COMMON | {"bnb_4bit_quant_type": "nf4"},
    "bnb-fp4": COMMON | {"bnb_4bit_quant_type": "fp4"},
    "bnb-nf4-double": COMMON | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "bnb-int8": {"load_in_8bit": True},
}


def dequantised(layer: torch.nn.Module) -> torch.Tensor:
    """A layer's weight [N, K] in float32 by bitsandbytes' own dequantisation."""
    p = layer.weight
    if isinstance(p, bnb.nn.Params4bit):
        p.quant_state.dtype = torch.float32
        return bnb.functional.dequantize_4bit(p.data, p.quant_state).reshape(p.quant_state.shape)
    return bnb.functional.int8_vectorwise_dequant(p.data, p.SCB.float())


def make(name: str) -> None:
    quantisation = transformers.BitsAndBytesConfig(**FIXTURES[name])
    source = save_base("qwen2_even")
    load = transformers.AutoModelForCausalLM.from_pretrained
    with tempfile.TemporaryDirectory() as at:
        load(source, quantization_config=quantisation, dtype=torch.bfloat16, device_map="cpu").save_pretrained(at)
        folder = keep(Path(at), name)  # saved before any forward pass, which would rearrange absmax
    model = load(folder, dtype=torch.float32, device_map="cpu").eval()
    kinds = bnb.nn.Linear4bit | bnb.nn.Linear8bitLt
    weights = {n: dequantised(m).float().contiguous() for n, m in model.named_modules() if isinstance(m, kinds)}
    stored = {k.partition(".weight")[0] for k in tensors(folder) if k.endswith(("weight.absmax", "SCB"))}
    own = logits(load(folder, dtype=torch.float32, device_map="cpu").eval())
    weights = {k: v for k, v in weights.items() if k in {s.removesuffix(".SCB") for s in stored}}
    how = "bitsandbytes.functional.dequantize_4bit or int8_vectorwise_dequant in float32"
    oracle(folder, weights, how, packages("bitsandbytes"), producer_logits=own)


if __name__ == "__main__":
    run(make, FIXTURES)
