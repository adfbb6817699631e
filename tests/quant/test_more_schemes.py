"""Layouts of torchao, HQQ, BitNet and Quark that no fixture has, and damaged checkpoints of these schemes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.kit import fails
from quant.handmade import AWQ_SHIFTS, E2M1, Encode, fp8, int8, rounded, write
from quant.test_decode import FILE, FIXTURES, Q, Tensors, changed, opened, put
from safetensors import safe_open
from safetensors.torch import load_file, save_file

PROJ = "_proj"
F32, BF16 = torch.float32, torch.bfloat16


def eights(x: torch.Tensor, shifts: list[int]) -> torch.Tensor:
    """Eight numbers of 4 bits along the last axis in a word."""
    parts = (x.to(torch.int64) & 15).unflatten(-1, (-1, 8))
    words = sum(parts[..., i] << 4 * shift for i, shift in enumerate(shifts))
    return (words - ((words >> 31) << 32)).to(torch.int32)


def quark_int4(size: int, signed: bool = True, reorder: bool = True) -> Encode:
    """4-bit integers of Quark: per_group, or per_channel if size is -1. Unsigned ones have zero points."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        code, scale, zero, value = rounded(w, 4, size, sym=signed, dtype=F32)
        code, zero = (x - 8 if signed else x for x in (code, zero))
        scale, zero = (scale, zero) if size > 0 else (scale[:, 0], zero[:, 0])
        if size > 0:
            code, scale, zero = code.T, scale.T.contiguous(), zero.T
        shifts = AWQ_SHIFTS if reorder else list(range(8))
        parts = {"weight": eights(code, shifts), "weight_scale": scale, "weight_zero_point": eights(zero, shifts)}
        return parts, value

    return encode


def quark_mxfp4(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """4-bit floats of Quark with a power of two for each 32 columns, as bytes."""
    power = torch.log2(w.float().unflatten(1, (-1, 32)).abs().amax(-1).clamp(min=1e-9) / 6).ceil()
    spread = torch.exp2(power).repeat_interleave(32, 1)
    code = ((w.float() / spread)[..., None] - E2M1).abs().argmin(-1)
    packed = (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8)
    return {"weight": packed, "weight_scale": (power + 127).to(torch.uint8)}, E2M1[code] * spread


def quark_int8(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """8-bit integers of Quark with a scale for each row [n], and zero points of zeros."""
    parts, value = int8()(w)
    return {**parts, "weight_scale": parts["weight_scale"].flatten(), "weight_zero_point": zeros(len(w))}, value


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


def ternary(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """BitNet's class autobitlinear, whose scale is a multiplier."""
    scale = w.float().abs().mean().to(BF16)
    code = (w.float() / scale.float()).round().clamp(-1, 1)
    fields = (code + 1).to(torch.uint8).chunk(4)
    packed = fields[0] | fields[1] << 2 | fields[2] << 4 | fields[3] << 6
    return {"weight": packed, "weight_scale": scale.reshape(1)}, code * scale.float()


def plain_ternary(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The same with codes as numbers in the dtype of the model."""
    parts, value = ternary(w)
    codes = (value / parts["weight_scale"].float()).round().to(BF16)
    return {**parts, "weight": codes}, value


def spec(dtype: str, qscheme: str, axis: int | None, **more: Any) -> dict[str, Any]:
    return {"weight": {"dtype": dtype, "qscheme": qscheme, "ch_axis": axis, **more}, "input_tensors": None}


def quark(rest: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": rest, "exclude": ["lm_head"], **more}


GROUPS = spec("int4", "per_group", -1, group_size=32)
FP8_ROWS = spec("fp8_e4m3", "per_channel", 0) | {"input_tensors": {"dtype": "fp8_e4m3"}}
Rules = Mapping[str, Encode]
CASES: Mapping[str, tuple[Rules, Mapping[str, Any]]] = {
    "quark-int4": ({PROJ: quark_int4(32)}, quark(GROUPS)),
    "quark-int4-in-order": (
        {PROJ: quark_int4(32, reorder=False)}, quark(GROUPS, export={"pack_method": "order"})
    ),
    "quark-uint4-rows": ({PROJ: quark_int4(-1, signed=False)}, quark(spec("uint4", "per_channel", 0))),
    "quark-mxfp4": (
        {PROJ: quark_mxfp4}, quark(spec("fp4", "per_group", -1, group_size=32, scale_format="e8m0"))
    ),
    "quark-mixed": (
        {"self_attn": fp8("tensor", "weight_scale"), "down": quark_int8, PROJ: fp8("channel", "weight_scale")},
        quark(
            FP8_ROWS, layer_type_quant_config={},
            layer_quant_config={
                "*self_attn*": spec("fp8_e4m3", "per_tensor", None), "*.down_proj": spec("int8", "per_channel", 0),
            },
        ),
    ),
    "bitnet-auto": ({PROJ: ternary}, {"quant_method": "bitnet", "linear_class": "autobitlinear"}),
    "bitnet-numbers": ({PROJ: plain_ternary}, {"quant_method": "bitnet", "linear_class": "autobitlinear"}),
}  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("name", CASES)
def test_weights_are_read_exactly(name: str, tmp_path: Path) -> None:
    rules, config = CASES[name]

    def encode(module: str) -> Encode | None:
        return next((how for part, how in rules.items() if part in module), None)

    made = write(tmp_path, encode, config)
    with opened(tmp_path) as checkpoint:
        for key, p in made.model.named_parameters():
            np.testing.assert_array_equal(checkpoint.read(key), p.detach().numpy(), err_msg=key)
        assert len(checkpoint.formats) == {"quark-mxfp4": 14, "bitnet-numbers": 0}.get(name, 14)


def refused(folder: Path, code: str, *words: str) -> None:
    """The checkpoint cannot be opened: its error has this code and these words."""

    def do() -> None:
        with opened(folder):
            pass

    fails(code, *words, do=do)


def described(folder: Path, source: str, parts: Mapping[str, Any], kind: str, facts: Mapping[str, Any]) -> None:
    """Copy a fixture of torchao, and give the weight of Q other parts and another description."""
    changed(source, folder, lambda tensors: None)
    with safe_open(FIXTURES / source / FILE, "pt") as f:
        texts = dict(f.metadata())
    tensors = {k: v for k, v in load_file(folder / FILE).items() if not k.startswith(f"{Q}._weight_")}
    tensors |= {f"{Q}._weight_{part}": value for part, value in parts.items()}
    texts[f"{Q}.weight"] = json.dumps({"_type": kind, "_data": facts, "_tensor_data_names": list(parts)})
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / FILE, texts)


def tiles128(scale: torch.Tensor) -> torch.Tensor:
    """Scales [n, k] in tiles of 128 x 4, each of which is stored as 32 x 16; the padding is NaN."""
    n, k = scale.shape
    whole = torch.full((-(-n // 128) * 128, -(-k // 4) * 4), 255, dtype=torch.uint8)
    whole[:n, :k] = scale
    tiles = whole.view(-1, 4, 32, whole.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1, 16).reshape(len(whole) // 4, -1)


SIZE = [64, 128]  # of the weight of Q


@pytest.mark.drawn
@pytest.mark.parametrize("swizzled", [False, True])
def test_mxfp4_of_torchao(swizzled: bool, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(5)
    code, power = (torch.randint(0, top, size, generator=draw) for top, size in ((16, (64, 128)), (7, (64, 4))))
    packed = (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8)
    scale = (power + 120).to(torch.uint8)
    stored = (tiles128(scale) if swizzled else scale).view(torch.float8_e8m0fnu)
    facts = {"block_size": 32, "is_swizzled_scales": swizzled, "act_quant_kwargs": None}
    described(tmp_path, "ao-fp8", {"qdata": packed, "scale": stored}, "MXTensor", facts)
    with opened(tmp_path) as checkpoint:
        got = checkpoint.read(f"{Q}.weight")
    np.testing.assert_array_equal(got, (E2M1[code] * torch.exp2(power - 7.0).repeat_interleave(32, 1)).numpy())


@pytest.mark.drawn
@pytest.mark.parametrize("swizzled", [False, True])
def test_scales_of_mxfp4_of_torchao_that_are_nan(swizzled: bool, tmp_path: Path) -> None:
    """The padding of scales in tiles may be NaN, those of the weight may not."""
    scale = torch.full((64, 4), 120, dtype=torch.uint8)
    scale[33, 2] = 255
    parts = {"qdata": torch.zeros(64, 64, dtype=torch.uint8), "scale": tiles128(scale) if swizzled else scale}
    facts = {"block_size": 32, "is_swizzled_scales": swizzled, "act_quant_kwargs": None}
    described(tmp_path, "ao-fp8", parts, "MXTensor", facts)
    refused(tmp_path, "E342", f"{Q}._weight_scale", "nan", "[33, 2]")


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("at", "value", "words"), [((1, 3, 0), 0.0, ("scale 0.0", "[1, 3]")), ((1, 3, 1), float("inf"), ("inf", "[1, 3]"))]
)
def test_numbers_of_tensor_core_tiles(
    at: tuple[int, ...], value: float, words: tuple[str, ...], tmp_path: Path
) -> None:  # fmt: skip
    folder, key = FIXTURES / "ao-int4-tiles", f"{Q}._weight_scale_and_zero"
    changed(folder.name, tmp_path, lambda tensors: None)
    with safe_open(folder / FILE, "pt") as f:
        texts = dict(f.metadata())
    tensors = load_file(tmp_path / FILE)
    tensors[key][at] = value
    save_file(tensors, tmp_path / FILE, texts)
    refused(tmp_path, "E342", key, *words)


@pytest.mark.drawn
def test_int4_of_torchao_has_float_zero_points(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(6)
    code = torch.randint(-8, 8, (64, 128), generator=draw)
    scale, zero = (torch.rand((4, 64), generator=draw).to(BF16) + 0.1 for _ in range(2))
    packed = ((code[:, ::2] & 15) | (code[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    parts = {"qdata": packed, "scale": scale, "zero_point": zero}
    described(tmp_path, "ao-fp8", parts, "Int4Tensor", {"block_size": [1, 32], "shape": SIZE})
    with opened(tmp_path) as checkpoint:
        got = checkpoint.read(f"{Q}.weight")
    scale, zero = (x.float().T.repeat_interleave(32, 1) for x in (scale, zero))
    np.testing.assert_array_equal(got, (code * scale + zero).numpy())


PLAIN = {"qdata": torch.ones(64, 128, dtype=torch.int8), "scale": torch.ones(64, 1)}
ROWS = {"block_size": [1, 128]}


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("parts", "kind", "facts", "code", "words"),
    [
        (PLAIN, "Int4OpaqueTensor", ROWS, "E307", (Q, "Int4OpaqueTensor", "Int8Tensor")),
        (PLAIN, "Int8Tensor", {"block_size": [1, "all"]}, "E340", (Q, "block_size")),
        (PLAIN, "Int8Tensor", {"block_size": [1, 32]}, "E341", (Q, "[64, 4]")),
        (PLAIN, "Int4Tensor", ROWS, "E340", (Q, "lacks zero_point")),
        (PLAIN | {"scale": torch.zeros(64, 1)}, "Int8Tensor", ROWS, "E342", (f"{Q}._weight_scale", "0.0")),
        (PLAIN | {"act_pre_scale": torch.ones(128)}, "Int8Tensor", ROWS, "E307", (f"{Q}._weight_act_pre_scale",)),
        ({"qdata": PLAIN["qdata"]}, "Int8Tensor", ROWS, "E340", (Q, "lacks scale")),
        (PLAIN, "Float8Tensor", ROWS, "E341", (f"{Q}._weight_qdata", "f8e4m3")),
        (PLAIN, "NVFP4Tensor", {"block_size": 32}, "E341", (f"{Q}._weight_scale",)),
        (PLAIN, 7, ROWS, "E340", (Q, "description")),
    ],
)  # fmt: skip
def test_descriptions_of_torchao(
    parts: Mapping[str, Any], kind: Any, facts: Mapping[str, Any], code: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    described(tmp_path, "ao-fp8", parts, kind, facts)
    refused(tmp_path, code, *words)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("source", "change", "config", "code", "words"),
    [
        ("ao-fp8", lambda t: None, {}, "E340", ("_proj.weight has", "does not describe")),  # texts are lost
        ("hqq-3bit", put(f"{Q}.scale", float("nan")), {}, "E342", (f"{Q}.scale", "nan")),
        ("hqq-3bit", put(f"{Q}.zero", float("inf")), {}, "E342", (f"{Q}.zero",)),
        ("hqq-3bit", put(f"{Q}.packing", 0), {}, "E307", (Q, "packing", "4bit_u8")),
        ("hqq-3bit", put(f"{Q}.shape", 7), {}, "E341", (Q,)),
        ("hqq-3bit", lambda t: t[f"{Q}.group_size"].fill_(48), {}, "E341", (Q, "groups of 48")),
        ("hqq-3bit", lambda t: t[f"{Q}.axis"].fill_(2), {}, "E341", (Q, "axis 2")),
        ("hqq-3bit", lambda t: t[f"{Q}.quant_zero"].fill_(1), {}, "E307", (Q, "quant_zero")),
        ("hqq-3bit", lambda t: t.pop(f"{Q}.zero"), {}, "E340", (Q, "lacks zero")),
        ("hqq-3bit", lambda t: t.update({f"{Q}.weight": torch.ones(64, 128)}), {}, "E340", (Q, "unquantised")),
        ("bitnet", put(f"{Q}.weight_scale", 0), {}, "E342", (f"{Q}.weight_scale", "0.0")),
        ("bitnet", put(f"{Q}.weight", 255), {}, "E342", (f"{Q}.weight", "codes of 3")),
        ("bitnet", lambda t: t.pop(f"{Q}.weight_scale"), {}, "E340", (Q, "lacks weight_scale")),
        ("bitnet", lambda t: None, {"use_rms_norm": True}, "E307", ("use_rms_norm",)),
        ("bitnet", lambda t: None, {"quantization_mode": "online"}, "E307", ("online", "offline")),
        ("bitnet", lambda t: None, {"linear_class": "linear"}, "E307", ("linear_class", "autobitlinear")),
        ("bitnet", lambda t: None, {"modules_to_not_convert": [Q]}, "E340", (Q, "leaves it out")),
    ],
)  # fmt: skip
def test_damaged_checkpoints(
    source: str, change: Callable[[Tensors], Any], config: dict[str, Any], code: str, words: tuple[str, ...],
    tmp_path: Path,
) -> None:  # fmt: skip
    fails(code, *words, do=changed(source, tmp_path, change, **config))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        (quark(spec("int3", "per_group", -1, group_size=32)), "E307", ("dtype", "int3", "int4")),
        (quark(spec("int4", "per_block", -1)), "E307", ("qscheme", "per_block")),
        (quark(spec("int4", "per_group", 0, group_size=32)), "E307", ("ch_axis",)),
        (quark(spec("int4", "per_group", -1, group_size=48)), "E307", ("group_size", "48")),
        (quark(spec("int4", "per_group", -1)), "E340", ("group_size",)),
        (quark(spec("int4", "per_group", -1, group_size=64)), "E341", (f"{Q}.weight_scale",)),
        (quark({"weight": None}), "E340", (Q, "weight = 'None'")),
        (quark({"weight": [{}, {}]}), "E307", (Q, "scales of scales")),
        (quark(GROUPS, export={"pack_method": "tiles"}), "E307", ("pack_method", "tiles")),
        ({"quant_method": "quark"}, "E340", (Q, "no settings")),
        (quark(GROUPS, layer_quant_config=[]) | {"layer_type_quant_config": [1]}, "E340", ("layer_type",)),
    ],
)  # fmt: skip
def test_configurations_of_quark(config: Mapping[str, Any], code: str, words: tuple[str, ...], tmp_path: Path) -> None:
    write(tmp_path, lambda module: quark_int4(32) if module == Q else None, config)
    refused(tmp_path, code, *words)
