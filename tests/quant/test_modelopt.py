"""Checkpoints in the layouts of NVIDIA's Model Optimizer, made by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.kit import eager_logits, fails, ir_logits, prompts, relative_error
from quant.handmade import Encode, Handmade, Tensors, fp8, fp8_tiles, int8, mxfp8, nvfp4, rounded, with_parts, write
from quant.reference import E2M1
from quant.test_compiled import compiled, expected, scored
from quant.test_decode import opened
from safetensors.torch import load_file, save_file

from llmc.extension import load
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.quant.typed_weights import use_codes

INPUT = {"input_scale": torch.tensor(0.25)}
FP8, NVFP4 = with_parts(fp8("tensor", "weight_scale"), **INPUT), with_parts(nvfp4, **INPUT)
PROJ, MOE = r"_proj$", {"source": "qwen3_moe"}
PASSES = "canonicalize, fuse-linear, split-moe{quantized=true}, lower-quantized{fallback=false}"


def mxfp4(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """4-bit floats with a power of two for each 32 columns."""
    power = torch.log2(w.float().unflatten(1, (-1, 32)).abs().amax(-1).clamp(min=1e-9) / 6).ceil()
    spread = torch.exp2(power).repeat_interleave(32, 1)
    code = ((w.float() / spread)[..., None] - E2M1).abs().argmin(-1)
    words = (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8)
    return {"weight": words, "weight_scale": (power + 127).to(torch.uint8)}, E2M1[code] * spread


def int4(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Signed integers of 4 bits, two rows in a byte."""
    code, scale, zero, value = rounded(w, 4, 32, dtype=torch.float32)
    signed = (code - zero.repeat_interleave(32, 1)).to(torch.int64) & 15
    words = (signed[::2] | signed[1::2] << 4).to(torch.uint8)
    return {"weight": words, "weight_scale": scale}, value


def smooth(how: Encode) -> Encode:
    """An encoding of a weight whose inputs are scaled."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = torch.rand(w.shape[1], generator=torch.Generator().manual_seed(w.shape[1])) + 0.5
        parts, value = how(w / scale)
        return parts | {"pre_quant_scale": scale}, value * scale

    return encode


def flat(algorithm: str, **more: Any) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    producer = {"producer": {"name": "modelopt", "version": "0.41.0"}, "ignore": ["lm_head"]}
    return {"quant_method": "modelopt", "quant_algo": algorithm, **producer, **more}


def beside(algorithm: str, **more: Any) -> dict[str, Any]:
    """hf_quant_config.json."""
    quantisation = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "*mlp.gate*"]}
    return {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": {**quantisation, **more}}


@dataclass(frozen=True)
class Case:
    """A checkpoint. rules: (pattern, encoding), of which the first that is found in a module's name decides. config:
    in config.json; more: other arguments of `write`. act: of the formats that products read as codes."""

    rules: tuple[tuple[str, Encode | None], ...]
    config: Mapping[str, Any]
    codes: int
    act: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


MIXED = flat(
    "MIXED_PRECISION",
    quantized_layers={
        **{f"model.layers.0.self_attn.{x}_proj": {"quant_algo": "FP8"} for x in "qkvo"},
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    },
)
CASES = {
    "fp8": Case(((PROJ, FP8),), flat("FP8"), 14, "f8e4m3"),
    "fp8-file": Case(((PROJ, FP8),), {}, 14, "f8e4m3", {"beside": {"hf_quant_config.json": beside("FP8")}}),
    "fp8-twice": Case(
        ((PROJ, FP8),), flat("FP8") | {"quant_method": "modelopt_fp4"}, 14, "f8e4m3",
        {"beside": {"hf_quant_config.json": beside("FP8")}},
    ),
    "fp8-nested": Case(((PROJ, FP8),), beside("FP8") | {"quant_method": "modelopt"}, 14, "f8e4m3"),
    "fp8-rows": Case(((PROJ, fp8("channel", "weight_scale")),), flat("FP8_PER_CHANNEL_PER_TOKEN"), 14, "f8e4m3"),
    "fp8-tiles": Case(((PROJ, fp8_tiles),), flat("fp8_pb_wo"), 14),
    "fp8-experts": Case(((r"experts\.\d|self_attn|1\.mlp", FP8),), flat("FP8"), 23, "f8e4m3", MOE),
    "mxfp8": Case(((PROJ, mxfp8),), flat("MXFP8", group_size=32), 14, "f8e4m3"),
    "nvfp4": Case(((r"_proj|lm_head", NVFP4),), flat("NVFP4", group_size=16, ignore=[]), 0),
    "nvfp4-experts": Case(((r"experts\.\d|self_attn", NVFP4),), flat("NVFP4", group_size=16), 12, "", MOE),
    "nvfp4-weights": Case(((PROJ, nvfp4),), flat("W4A16_NVFP4"), 0),
    "nvfp4-awq": Case(((r"o_proj|down_proj", smooth(NVFP4)), (PROJ, NVFP4)), flat("NVFP4_AWQ", group_size=16), 0),
    "w4a8-nvfp4": Case(((PROJ, NVFP4),), flat("W4A8_NVFP4_FP8", group_size=16), 0),
    "mxfp4": Case(((PROJ, mxfp4),), flat("w4a8_mxfp4_fp8", group_size=32), 0),
    "int8": Case(((PROJ, int8()),), flat("W8A16"), 14),
    "smooth": Case(((r"o_proj|down_proj", smooth(int8())), (PROJ, int8())), flat("W8A8_SQ_PER_CHANNEL"), 10, "i8"),
    "awq": Case(((r"o_proj|down_proj", smooth(int4)), (PROJ, int4)), flat("W4A16_AWQ", group_size=32), 10),
    "mixed": Case((("0.self_attn", FP8), (r"experts\.\d", NVFP4), (r"1\.(self|mlp)", nvfp4)), MIXED, 16, "", MOE),
}  # fmt: skip
DRAWN = [pytest.param(name, marks=() if name == "mixed" else pytest.mark.drawn) for name in CASES]


def made(case: Case, folder: Path, **config: Any) -> Handmade:
    def encode(module: str) -> Encode | None:
        return next((how for pattern, how in case.rules if re.search(pattern, module)), None)

    return write(folder, encode, {**case.config, **config} if case.config else {}, **case.more)


@pytest.mark.parametrize("name", DRAWN)
def test_logits_are_those_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    """With weights as numbers, and as codes that products read."""
    case, (tokens, positions) = CASES[name], prompts((9,), 64)
    found = made(case, tmp_path / "model")
    want = eager_logits(found.model, tokens, (9,))
    with opened(found.folder) as checkpoint:
        traced = checkpoint.traced
        rest = traced.module, traced, checkpoint, tokens, positions, np.arange(9)
        assert relative_error(ir_logits(*rest), want) <= 1e-5
        assert use_codes(traced.module, checkpoint, load().opset()) == case.codes
        if name != "mixed":
            assert {f.act for f in checkpoint.formats.values()} == {case.act}
        run_pipeline(traced.module, parse_pipeline(PASSES, load().passes), Ctx(load().opset()))
        assert relative_error(ir_logits(*rest), want) <= 1e-5


@pytest.mark.drawn(seconds=12)
@pytest.mark.parametrize("name", ["fp8-experts", "nvfp4-experts", "mixed"])
def test_compiled(name: str, tmp_path: Path) -> None:
    tokens, positions = prompts((37,), 64)
    found = made(CASES[name], tmp_path / "model")
    got = scored(compiled(found.folder, tmp_path / "model.llmc"), tokens)
    want = expected(found.folder, tokens, positions, target="cpu:native")
    assert abs(got - want).mean() < 0.02


@pytest.mark.drawn
def test_the_scales_of_the_cache_are_read(tmp_path: Path) -> None:
    rules = ((r"\.k_proj", with_parts(FP8, k_scale=torch.tensor(0.5))), (PROJ, FP8))
    case = Case(rules, flat("FP8", kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"}), 14)
    with opened(made(case, tmp_path / "model").folder) as checkpoint:
        scales = checkpoint.kv_scales
    assert {layer: (float(k), float(v)) for layer, (k, v) in scales.items()} == {0: (0.5, 1.0), 1: (0.5, 1.0)}


def test_only_the_cache_is_quantised(tmp_path: Path) -> None:
    """`quant_algo` is null, because no weight is quantised."""
    beside_config = beside("", quant_algo=None, kv_cache_quant_algo="FP8")
    folder = made(Case(((PROJ, None),), {}, 0), tmp_path / "model").folder
    (folder / "hf_quant_config.json").write_text(json.dumps(beside_config))
    tensors = load_file(folder / "model.safetensors")
    scale = {"model.layers.0.self_attn.v_proj.v_scale": torch.tensor(0.25)}
    save_file(tensors | scale, folder / "model.safetensors", {"format": "pt"})
    with opened(folder) as checkpoint:
        assert not checkpoint.formats
        assert {layer: (float(k), float(v)) for layer, (k, v) in checkpoint.kv_scales.items()} == {0: (1.0, 0.25)}


REFUSED: Mapping[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "awq": ("fp8", {"quant_algo": "W4A8_AWQ"}, "E307", ("quant_algo", "W4A8_AWQ", "NVFP4")),
    "none": ("fp8", {"quant_algo": None}, "E307", ("quant_algo", "None")),
    "cache": ("fp8", {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "E307", ("quant_algo", "None", "NVFP4")),
    "group": ("nvfp4", {"group_size": 32}, "E307", ("group_size", "32", "16")),
    "other": ("fp8", {"quant_algo": "NVFP4"}, "E341", ("_proj.weight", "f8e4m3")),
    "ignored": ("fp8", {"ignore": ["model.layers.0.mlp.up_proj"]}, "E340", ("up_proj", "ignore")),
    "no-layers": ("fp8", {"quant_algo": "MIXED_PRECISION"}, "E340", ("quantized_layers",)),
    "lacks": (
        "mixed", {"quantized_layers": {"model.layers.1": {"quant_algo": "NVFP4"}}}, "E340",
        ("model.layers.0", "quantized_layers"),
    ),
    "layer": ("mixed", {"quantized_layers": {"model": {"quant_algo": "INT4"}}}, "E307", ("INT4",)),
    "twice": ("fp8-nested", {"quant_algo": "NVFP4"}, "E340", ("quant_algo", "NVFP4", "FP8")),
}  # fmt: skip


def open_all(folder: Path) -> None:
    with opened(folder):
        pass


@pytest.mark.drawn
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    source, config, code, words = REFUSED[name]
    folder = made(CASES[source], tmp_path / "model", **config).folder
    fails(code, *words, do=lambda: open_all(folder))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("source", "part", "value", "code", "words"),
    [
        ("fp8", "pre_quant_scale", torch.ones(127), "E341", ("q_proj.pre_quant_scale", "[128]")),
        ("fp8", "pre_quant_scale", torch.zeros(128), "E342", ("q_proj.pre_quant_scale", "0.0")),
        ("awq", "weight_scale", torch.ones(64, 3), "E341", ("q_proj.weight_scale", "divide 128")),
        ("int8", "weight_scale", torch.ones(3), "E341", ("q_proj.weight_scale",)),
        ("mxfp4", "weight_scale", torch.full((64, 4), 255, dtype=torch.uint8), "E342", ("q_proj.weight_scale", "nan")),
        ("fp8", "weight_scale", torch.tensor(0.0), "E342", ("q_proj.weight_scale",)),
        ("fp8-tiles", "weight_scale", torch.ones(1, 1, 2, 1), "E341", ("q_proj.weight_scale", "[1, 1, 1, 1]")),
        ("nvfp4", "weight_scale_2", torch.tensor(float("nan")), "E342", ("q_proj.weight_scale_2",)),
        ("nvfp4", "weight_scale_2", torch.ones(2), "E341", ("q_proj.weight_scale_2", "one number")),
        ("nvfp4", "weight_scale_2", None, "E340", ("q_proj", "lacks weight_scale_2")),
        ("mxfp8", "weight_scale", torch.zeros(64, 3, dtype=torch.uint8), "E341", ("q_proj.weight_scale",)),
    ],
)
def test_damaged(
    source: str, part: str, value: torch.Tensor | None, code: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    folder = made(CASES[source], tmp_path / "model").folder
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name := f"model.layers.0.self_attn.q_proj.{part}", None)
    save_file(tensors | ({} if value is None else {name: value}), folder / "model.safetensors", {"format": "pt"})
    fails(code, *words, do=lambda: open_all(folder))


def test_only_a_file_beside_names_the_method(tmp_path: Path) -> None:
    folder = made(CASES["fp8-file"], tmp_path / "model").folder
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    with opened(folder) as checkpoint:
        assert len(checkpoint.formats) == 14
