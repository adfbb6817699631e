"""Fixtures written by auto-round in its own and other layouts: `python autoround.py [NAME...]`."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from common import keep, logits, oracle, packages, run, samples, save_base, tensors, tokenizer
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize


@dataclass(frozen=True)
class Fixture:
    """A checkpoint: its base model, auto-round's format and scheme, and overrides by layer."""

    base: str
    format: str = "auto_round"
    scheme: Any = "W4A16"
    args: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Any] = field(default_factory=dict)


def ints(base: str, format: str = "auto_round", **args: Any) -> Fixture:
    layers = args.pop("layers", {})
    return Fixture(base, format, args=args | {"group_size": args.get("group_size", 32)}, layers=layers)


MIXED = {
    "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32},
    "model.layers.1.self_attn.o_proj": {"bits": 16},
    "model.layers.1.mlp.up_proj": {"bits": 4, "group_size": 32, "sym": False},
}
FIXTURES = {
    "ar-4bit": ints("llama"),
    "ar-4bit-asym": ints("qwen2", sym=False),
    "ar-4bit-asym-gptq": ints("qwen2", "auto_round:auto_gptq", sym=False),
    "ar-2bit": ints("qwen2", bits=2),
    "ar-3bit": ints("qwen2", bits=3),
    "ar-8bit": ints("qwen2", bits=8),
    "ar-mixed": ints("llama", layers=MIXED),
    "ar-moe": ints("qwen3_moe"),
    "ar-to-gptq": ints("qwen2", "auto_gptq"),
    "ar-to-gptq-mixed": ints("llama", "auto_gptq", layers=MIXED),
    "ar-to-gptq-asym": ints("qwen2", "auto_gptq", sym=False),
    "ar-to-awq": ints("qwen2", "auto_awq", sym=False),
    "ar-to-awq-sym": ints("qwen2", "auto_awq"),
    "ar-fp8-static": Fixture("qwen2", scheme="FP8_STATIC"),
    "ar-fp8-block": Fixture("llama_tiles", scheme="FP8_BLOCK"),
    "ar-nvfp4": Fixture("qwen2", scheme="NVFP4"),
    "ar-mxfp4": Fixture("qwen2", scheme="MXFP4"),
    "ar-to-ct-w4a16": Fixture("qwen2", "llm_compressor", args={"group_size": 32}),
    "ar-to-ct-nvfp4": Fixture("qwen2", "llm_compressor", scheme="NVFP4"),
}


def words(t: Mapping[str, torch.Tensor], bits: int, size: int, awq: bool) -> torch.Tensor:
    """A module in the packing of GPTQ or AWQ, [N, K], by the layers of auto-round, the scales as float32."""
    scales = t["scales"].float()
    if awq:
        return dequantize_gemm(t["qweight"], t["qzeros"], scales, bits, size).T.contiguous()
    k, n = t["qweight"].shape[0] * 32 // bits, t["qweight"].shape[1]
    kind = importlib.import_module("auto_round_extension.torch.qlinear_torch_zp").QuantLinear
    if "g_idx" in t and not torch.equal(t["g_idx"].long(), torch.arange(k) // size):
        raise ValueError("auto-round wrote a g_idx that is not in order")  # its layer misreads one where N > K
    layer = kind(bits, size, k, n, bias=False)
    layer.qweight, layer.qzeros, layer.scales = t["qweight"], t["qzeros"], scales
    return layer(torch.eye(k)).T.contiguous()


def scaled(t: dict[str, torch.Tensor], preset: str, **weights: Any) -> torch.Tensor:
    """A module in a layout of compressed-tensors, [N, K]."""
    made = preset_name_to_scheme(preset, ["Linear"])
    for key, value in weights.items():
        setattr(made.weights, key, value)
    kind = {"NVFP4": "nvfp4-pack-quantized", "MXFP4": "mxfp4-pack-quantized", "W4A16": "pack-quantized"}
    if preset == "NVFP4":
        n, k = t["weight_packed"].shape
        codes = unpack_fp4_from_uint8(t["weight_packed"], n, 2 * k, dtype=torch.float32)
        factor = t["weight_global_scale"]
        return dequantize(codes, t["weight_scale"].float(), args=made.weights, dtype=torch.float32, global_scale=factor)
    values = t if preset == "MXFP4" else t | {"weight_scale": t["weight_scale"].float()}
    compressor = BaseCompressor.get_value_from_registry(kind.get(preset, "float-quantized"))
    return compressor.decompress(values, made)["weight"].float()


def dequantised(t: dict[str, torch.Tensor], f: Fixture, own: Mapping[str, Any], awq: bool) -> torch.Tensor:
    if "qweight" in t:
        return words(t, own.get("bits", 4), own.get("group_size", 32), awq)
    if "weight_packed" in t:
        more = {"group_size": 32} if f.scheme == "W4A16" else {}
        return scaled(t, f.scheme, **more)
    if "weight_scale_inv" in t:
        return scaled(t | {"weight_scale": t["weight_scale_inv"]}, "FP8_BLOCK")
    return scaled(t | {"weight_scale": t["weight_scale"].reshape(-1, 1)}, "FP8_DYNAMIC")


def make(name: str) -> None:
    f = FIXTURES[name]
    source = save_base(f.base)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    data = [row[None] for row in samples()]
    rounder = AutoRound(
        model, tokenizer(), scheme=f.scheme, dataset=data, iters=2, seqlen=64, nsamples=32, device_map="cpu",
        layer_config=dict(f.layers), enable_torch_compile=False, **f.args,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as at:
        rounder.quantize_and_save(at, format=f.format)
        (written,) = {p.parent for p in Path(at).rglob("config.json")}
        folder = keep(written, name)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    awq = config["quant_method"] == "awq" or config.get("packing_format", "").endswith("awq")
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors(folder).items():
        modules.setdefault(key.rpartition(".")[0], {})[key.rpartition(".")[2]] = value
    weights = {
        n: dequantised(t, f, f.args | f.layers.get(n, {}), awq)
        for n, t in modules.items()
        if t.keys() & {"qweight", "weight_packed", "weight_scale", "weight_scale_inv"}
    }
    note, own = "", None
    try:
        own = logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    except Exception as e:
        note = f"transformers does not run it here: {type(e).__name__}: {str(e).splitlines()[0]}"
        print(note)
    how = "the layers of auto_round_extension, or compressed_tensors, with the scales as float32"
    oracle(folder, weights, how, packages("auto-round", "compressed-tensors"), note, producer_logits=own)


if __name__ == "__main__":
    run(make, FIXTURES)
