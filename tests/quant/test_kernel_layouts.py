"""Layouts of quanto, EETQ, MLX and Gemma that no fixture has, and damaged checkpoints of these schemes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.kit import fails
from quant.handmade import E2M1, Encode, rounded, stream, write
from quant.test_decode import FIXTURES, Q, Tensors, changed, opened, put

BF16 = torch.bfloat16
TYPES = "quanto_qmap.json"
TILE = 64  # columns of a row that EETQ stores together


def eetq_order(code: torch.Tensor) -> torch.Tensor:
    """The bytes [k, n] of codes [n, k], by the steps of EETQ's own preparation for GPUs from Turing to Ada."""
    places = torch.tensor([8 * (t % 4 // 2) + t % 2 + 2 * (t // 4) for t in range(16)])
    rows = code.T.unflatten(0, (-1, 16))[:, places].flatten(0, 1).T  # [n, k]
    pairs = rows.reshape(len(rows) // 2, 2, -1, TILE).transpose(1, 2)
    quads = (pairs.reshape(-1, 4).to(torch.int16) + 128).to(torch.uint8)
    return quads[:, [0, 2, 1, 3]].reshape(code.shape[1], code.shape[0]).view(torch.int8)


def eetq(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (w.float().abs().amax(1) / 128).to(torch.float16)
    code = (w.float() / scale.float()[:, None]).round().clamp(-128, 127).to(torch.int8)
    return {"weight": eetq_order(code), "weight_scales": scale}, code.float() * scale.float()[:, None]


def quanto(bits: int, size: int, integers: bool = False) -> Encode:
    """Packed codes of quanto, with shifts that are floats, or zero points as older versions store them."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        code, scale, zero, _ = rounded(w, bits, size, sym=False, dtype=BF16)
        shift = zero if integers else (zero * scale.float()).to(BF16).float()
        wide = scale.float().repeat_interleave(size, 1)
        spread = shift.repeat_interleave(size, 1)
        value = (code - spread) * wide if integers else code * wide - spread
        planes = code.to(torch.uint8).reshape(-1, size)
        fields = 8 // bits
        planes = torch.nn.functional.pad(planes, (0, 0, 0, -len(planes) % fields)).chunk(fields)
        packed = sum(plane << bits * i for i, plane in enumerate(planes))
        kind = torch.int8 if integers else BF16
        rest = {"weight._scale": scale.reshape(-1, 1), "weight._shift": shift.to(kind).reshape(-1, 1)}
        return {"weight._data._data": packed, **rest}, value

    return encode


def quanto_float(dtype: torch.dtype, tensor: bool) -> Encode:
    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        large = w.float().abs().amax() if tensor else w.float().abs().amax(1, keepdim=True)
        scale = (large / torch.finfo(dtype).max).to(BF16)
        code = (w.float() / scale.float()).to(dtype)
        return {"weight._data": code, "weight._scale": scale}, code.float() * scale.float()

    return encode


def mlx(bits: int, size: int) -> Encode:
    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        code, scale, zero, _ = rounded(w, bits, size, sym=False, dtype=BF16)
        biases = (-zero * scale.float()).to(BF16)
        value = code * scale.float().repeat_interleave(size, 1) + biases.float().repeat_interleave(size, 1)
        return {"weight": stream(code, bits, 1).view(torch.uint32), "scales": scale, "biases": biases}, value

    return encode


def mlx_floats(mode: str) -> Encode:
    """4-bit or 8-bit floats of MLX with scales in bytes."""
    bits, size = (8 if mode == "mxfp8" else 4), (16 if mode == "nvfp4" else 32)

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        large = w.float().unflatten(1, (-1, size)).abs().amax(-1).clamp(min=1e-9) / (448 if bits == 8 else 6)
        byte = (large.log2().ceil() + 127).to(torch.uint8)
        scale = torch.exp2(byte.float() - 127)
        if mode == "nvfp4":
            code8 = large.clamp(min=2**-9).to(torch.float8_e4m3fn)
            byte, scale = code8.view(torch.uint8), code8.float()
        x = w.float() / scale.repeat_interleave(size, 1)
        code = x.to(torch.float8_e4m3fn).view(torch.uint8) if bits == 8 else (x[..., None] - E2M1).abs().argmin(-1)
        value = code.view(torch.float8_e4m3fn).float() if bits == 8 else E2M1[code]
        packed = stream(code, bits, 1).view(torch.uint32)
        return {"weight": packed, "scales": byte}, value * scale.repeat_interleave(size, 1)

    return encode


def settings(bits: int, size: int, mode: str = "affine") -> dict[str, Any]:
    return {"quant_method": "mlx", "bits": bits, "group_size": size, "mode": mode}


E4M3 = torch.float8_e4m3fn
CASES: Mapping[str, tuple[str, Encode, Mapping[str, Any]]] = {
    "quanto-int2": ("_proj", quanto(2, 32), {"quant_method": "quanto", "weights": "int2"}),
    "quanto-int4-zero-points": ("_proj", quanto(4, 16, integers=True), {"quant_method": "quanto", "weights": "int4"}),
    "quanto-float8": ("_proj", quanto_float(E4M3, True), {"quant_method": "quanto", "weights": "float8"}),
    "eetq": ("self_attn.q_proj", eetq, {"quant_method": "eetq", "weights": "int8"}),
    "mlx-2bit": ("_proj", mlx(2, 32), settings(2, 32)),
    "mlx-5bit": ("_proj", mlx(5, 32), settings(5, 32)),
    "mlx-6bit": ("_proj", mlx(6, 32), settings(6, 32)),
    "mlx-8bit": ("_proj", mlx(8, 32), settings(8, 32)),
    "mlx-nvfp4": ("_proj", mlx_floats("nvfp4"), settings(4, 16, "nvfp4")),
    "mlx-mxfp8": ("_proj", mlx_floats("mxfp8"), settings(8, 32, "mxfp8")),
}  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("name", CASES)
def test_weights_are_read_exactly(name: str, tmp_path: Path) -> None:
    part, encode, config = CASES[name]
    made = write(tmp_path, lambda module: encode if part in module else None, config)
    with opened(tmp_path) as checkpoint:
        for key, p in made.model.named_parameters():
            np.testing.assert_array_equal(checkpoint.read(key), p.detach().numpy(), err_msg=key)


@pytest.mark.drawn
def test_a_quanto_scale_of_outputs_is_no_scale_of_the_kv_cache(tmp_path: Path) -> None:
    """`k_proj.output_scale` of older checkpoints for vLLM is one; quanto's is a scale of activations."""
    with opened(FIXTURES / "quanto-int8") as checkpoint:
        assert not checkpoint.kv_scales


def copied(source: str, folder: Path, change: Callable[[Tensors], Any], **config: Any) -> Callable[[], None]:
    """As `changed`, with quanto's map of types next to config.json."""
    do = changed(source, folder, change, **config)
    if (listed := FIXTURES / source / TYPES).exists():
        shutil.copy(listed, folder)
    return do


def without(part: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(f"{Q}.{part}")


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("source", "change", "config", "code", "words"),
    [
        ("quanto-int4", without("weight._shift"), {}, "E340", (Q, "lacks _shift")),
        ("quanto-int4", put(f"{Q}.weight._shift", float("nan")), {}, "E342", (f"{Q}.weight._shift", "nan")),
        ("quanto-int8", put(f"{Q}.weight._scale", 0), {}, "E342", (f"{Q}.weight._scale", "0.0")),
        ("mlx-4bit", without("biases"), {}, "E340", (Q, "lacks biases")),
        ("mlx-4bit", put(f"{Q}.biases", float("inf")), {}, "E342", (f"{Q}.biases", "inf")),
        ("mlx-4bit", put(f"{Q}.scales", 0), {}, "E342", (f"{Q}.scales", "0.0")),
        ("mlx-4bit", lambda t: None, {"bits": 8}, "E340", ("bits", "8", "4")),
        ("mlx-mxfp4", put(f"{Q}.scales", 255), {}, "E342", (f"{Q}.scales", "nan")),
        ("metal", lambda t: None, {"group_size": 64}, "E341", ("weight", "4 bits in groups of 64")),
        ("gemma", lambda t: None, {"num_bits": 3}, "E307", ("num_bits", "3", "8")),
        ("gemma", lambda t: None, {"module_quant_configs": {"(": {}}}, "E340", ("'('",)),
        ("gemma", without("weight_scale"), {}, "E340", (Q, "lacks weight_scale")),
    ],
)  # fmt: skip
def test_damaged_checkpoints(
    source: str, change: Callable[[Tensors], Any], config: dict[str, Any], code: str, words: tuple[str, ...],
    tmp_path: Path,
) -> None:  # fmt: skip
    fails(code, *words, do=copied(source, tmp_path, change, **config))


@pytest.mark.drawn
def test_a_map_of_types_that_contradicts_the_tensors(tmp_path: Path) -> None:
    do = copied("quanto-int4", tmp_path, lambda tensors: None)
    listed = tmp_path / TYPES
    text = listed.read_text()
    listed.write_text(text.replace("qint4", "qint8"))
    fails("E340", "qint8", "_data._data", do=do)
    listed.write_text(text.replace("qint4", "qint2"))
    fails("E341", "_data._data", "qint2", do=do)
    listed.unlink()
    fails("E340", "no quantization_config", do=do)
