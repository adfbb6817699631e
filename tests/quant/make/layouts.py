"""Fixtures of layouts that no producer writes on a CPU, written as published: `python layouts.py [NAME...]`.

FP8 as DeepSeek and transformers lay it out, MXFP4 experts as openai/gpt-oss does. The oracle is transformers' loader
where it reads the layout (it spreads tiles evenly over a ragged edge, so it cannot judge one); elsewhere the note says
which formula was used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from common import base, keep, logits, oracle, packages, run, save_base
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

E4M3 = torch.float8_e4m3fn
Parts = dict[str, torch.Tensor]


def tiles(w: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each tile, [ceil(N / bn), ceil(K / bk)]; edge tiles are partial."""
    return torch.stack(
        [torch.stack([t.abs().amax() for t in rows.split(block[1], 1)]) for rows in w.split(block[0], 0)]
    )


def spread(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """The scale of each weight, as the masked tiles of DeepSeek's published kernel have it."""
    rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
    return scale[rows][:, columns]


def to_fp8(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (w / scale).clamp(-448, 448).to(E4M3)


def block_fp8(block: tuple[int, int], e8m0: bool = False) -> Callable[[torch.Tensor], Parts]:
    def parts(w: torch.Tensor) -> Parts:
        scale = tiles(w, block).clamp(min=1e-8) / 448
        if e8m0:
            scale = scale.log2().ceil().exp2()
        stored = scale.to(torch.float8_e8m0fnu) if e8m0 else scale
        return {"weight": to_fp8(w, spread(scale, block, w.shape)), "weight_scale_inv": stored}

    return parts


def tensor_fp8(scale_name: str, input_name: str, shape: tuple[int, ...] = ()) -> Callable[[torch.Tensor], Parts]:
    def parts(w: torch.Tensor) -> Parts:
        scale = w.abs().amax() / 448
        out = {"weight": to_fp8(w, scale), scale_name: scale.reshape(shape)}
        return out | {input_name: torch.full(shape, 0.03125 + w.shape[1] / 8192)}

    return parts


def channel_fp8(shape: tuple[int, ...]) -> Callable[[torch.Tensor], Parts]:
    def parts(w: torch.Tensor) -> Parts:
        scale = w.abs().amax(1, keepdim=True) / 448
        return {"weight": to_fp8(w, scale), "weight_scale": scale.reshape(shape)}

    return parts


@dataclass(frozen=True)
class Fixture:
    """A checkpoint: its base model, what a Linear's weight becomes, and the quantization_config."""

    base: str
    parts: Callable[[torch.Tensor], Parts]
    config: Mapping[str, Any] = field(default_factory=dict)
    block: tuple[int, int] = (0, 0)
    transformers: bool = True
    note: str = ""


DYNAMIC = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
STATIC = DYNAMIC | {"activation_scheme": "static"}


def blocks(base: str, size: int, e8m0: bool = False, **kw: Any) -> Fixture:
    config = DYNAMIC | {"weight_block_size": [size, size]} | ({"scale_fmt": "ue8m0"} if e8m0 else {})
    return Fixture(base, block_fp8((size, size), e8m0), config, (size, size), **kw)


FORMULA = "transformers does not read this layout: weight * scale in float32"
FIXTURES = {
    "hf-fp8-block": blocks("llama256", 128),
    "hf-fp8-block-ragged": blocks("qwen2", 128, transformers=False, note="partial edge tiles; " + FORMULA),
    "hf-fp8-block-ue8m0": blocks("qwen2", 32, e8m0=True),
    "hf-fp8-moe": blocks("qwen3_moe", 32),
    "hf-fp8-tensor": Fixture("qwen2", tensor_fp8("weight_scale_inv", "activation_scale"), STATIC),
    "hf-fp8-tensor-names": Fixture(
        "qwen2", tensor_fp8("weight_scale", "input_scale", (1,)), STATIC, transformers=False, note=FORMULA
    ),
    "hf-fp8-channel": Fixture("qwen2", channel_fp8((-1, 1)), DYNAMIC, transformers=False, note=FORMULA),
    "hf-fp8-channel-flat": Fixture(
        "qwen2",
        channel_fp8((-1,)),
        {"activation_scheme": "dynamic", "quant_method": "fp8", "ignored_layers": ["lm_head"]},
        transformers=False,
        note=FORMULA,
    ),
}


def dequantised(t: Parts, f: Fixture) -> torch.Tensor:
    scale = t.get("weight_scale_inv", t.get("weight_scale"))
    if f.transformers:
        return Fp8Dequantize(None)._dequantize_one(t["weight"], scale, output_dtype=torch.float32)
    if f.block[0]:
        scale = spread(scale, f.block, t["weight"].shape)
    return t["weight"].float() * (scale.reshape(-1, 1) if scale.ndim == 1 else scale).float()


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def make(name: str) -> None:
    f = FIXTURES[name]
    source = save_base(f.base)
    out, weights = {}, {}
    for key, value in load_file(source / "model.safetensors").items():
        if not is_linear(key):
            out[key] = value
            continue
        module, made = key.removesuffix(".weight"), f.parts(value.float())
        out |= {f"{module}.{k}": v.contiguous() for k, v in made.items()}
        weights[module] = dequantised(made, f).contiguous()
    write(source, out, f.config)
    folder, own = keep(source, name), None
    if f.transformers:
        own = logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    how = "transformers: Fp8Dequantize in float32" if f.transformers else "a formula"
    oracle(folder, weights, how, packages(), f.note, producer_logits=own)


def write(folder: Path, values: Parts, quantization: Mapping[str, Any]) -> None:
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(config))


GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, N, K] as blocks [E, N, K / 32, 16] and scales [E, N, K / 32], uint8."""
    grouped = w.unflatten(-1, (-1, 32))
    exponent = (grouped.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2).clamp(-127, 127)
    values = grouped / exponent.exp2()[..., None]
    code = (values.abs()[..., None] - GRID).abs().argmin(-1) + 8 * (values < 0)
    code = code.to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def make_gpt_oss(name: str) -> None:
    source = save_base("gpt_oss")
    model, out, weights = base("gpt_oss", torch.float32), {}, {}
    for key, value in load_file(source / "model.safetensors").items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            out[key] = value
            continue
        coded, scales = mxfp4(value.float().transpose(1, 2))
        out |= {f"{key}_blocks": coded.contiguous(), f"{key}_scales": scales}
        w = convert_moe_packed_tensors(coded, scales, dtype=torch.float32)  # [E, K, N]
        weights[key] = w.transpose(1, 2).contiguous()
    model.load_state_dict({k: v.float() for k, v in out.items() if k in model.state_dict()}, strict=False)
    for key, w in weights.items():
        model.get_parameter(key).data = w.transpose(1, 2).contiguous()
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    write(source, out, {"modules_to_not_convert": skipped, "quant_method": "mxfp4"})
    folder = keep(source, name)
    own = logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    how = "transformers: convert_moe_packed_tensors in float32, transposed to [E, N, K]"
    oracle(folder, weights, how, packages(), "experts are [E, N, K]", model=model, producer_logits=own)


if __name__ == "__main__":
    run(lambda name: make_gpt_oss(name) if name == "gpt-oss-mxfp4" else make(name), [*FIXTURES, "gpt-oss-mxfp4"])
