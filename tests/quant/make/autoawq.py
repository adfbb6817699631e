"""Fixtures written by autoawq: `python autoawq.py [NAME...]`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from awq import AutoAWQForCausalLM
from awq.utils.packing_utils import dequantize_gemm
from common import keep, oracle, packages, run, samples, save_base, tensors, tokenizer

# Base model, and whether clipping is searched, which asks for rows in multiples of 64.
FIXTURES = {"awq-autoawq": ("llama256", True), "awq-autoawq-bias": ("qwen2", False)}


def make(name: str) -> None:
    base, clip = FIXTURES[name]
    config = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    source = str(save_base(base, torch.float32))  # it calibrates on the CPU in float32 alone
    model = AutoAWQForCausalLM.from_pretrained(source, device_map="cpu", torch_dtype=torch.float32)
    calibration = {"calib_data": samples().tolist(), "max_calib_seq_len": 64, "n_parallel_calib_samples": 4}
    model.quantize(tokenizer(), quant_config=config, apply_clip=clip, **calibration)
    with tempfile.TemporaryDirectory() as at:
        model.save_quantized(at)
        folder = keep(Path(at), name)
    stored = tensors(folder)
    weights = {}
    for module in {k.removesuffix(".qweight") for k in stored if k.endswith(".qweight")}:
        parts = (stored[f"{module}.{k}"] for k in ("qweight", "qzeros"))
        scales = stored[f"{module}.scales"].float()
        weights[module] = dequantize_gemm(*parts, scales, 4, 32).T.contiguous()
    oracle(folder, weights, "awq.utils.packing_utils.dequantize_gemm, scales as float32", packages("autoawq"))


if __name__ == "__main__":
    run(make, FIXTURES)
