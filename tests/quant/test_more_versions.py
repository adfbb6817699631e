"""Checkpoints of other versions of the producers, old and new, made by hand in the layouts of their writers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models.kit import fails
from quant.handmade import E4M3, Encode, Tensors, awq, fp8, gptq, mxfp8, packed, rounded, stream
from quant.test_handmade import (
    AWQ,
    FP8,
    FP8_WHOLE,
    GPTQ,
    INT4,
    PROJ,
    ROUND,
    Case,
    check_logits,
    group,
    groups,
    made,
    open_all,
)

OLD_ROUND = {key: value for key, value in ROUND.items() if key != "packing_format"} | {
    "quant_method": "intel/auto-round", "autoround_version": "0.4.1",
}  # fmt: skip
FP8_MODEL = {"quant_method": "fp8", "method": "fp8", "bits": 8, "format": "float8_e4m3fn", "group_size": -1}
DIVISORS = FP8_MODEL | {"weight_scale_semantics": "inverse", "weight_scale_method": "row"}
ATTENTION = {
    "targets": ["LlamaAttention"], "weights": None, "output_activations": None, "format": "dense",
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False},
}  # fmt: skip


def gemv(size: int = 32) -> Encode:
    """The layout "gemv" of AutoAWQ, in which scales and zero points are padded with zeros."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        code, scale, zero, value = rounded(w, 4, size, sym=False)
        n, count = scale.shape
        width = 4 * -(-count // 32)  # a multiple of four words
        padded = torch.zeros(n, 8 * width, dtype=scale.dtype)
        points = torch.zeros(n, 8 * width)
        padded[:, :count], points[:, :count] = scale, zero
        return {"qweight": stream(code, 4, 1), "qzeros": stream(points, 4, 1), "scales": padded}, value

    return encode


def zeros_as_bytes(bits: int, size: int) -> Encode:
    """pack-quantized of old versions of compressed-tensors: zero points are signed bytes."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, value = packed(bits, size, sym=False)(w)
        zero = rounded(w, bits, size, sym=False, dtype=torch.bfloat16)[2] - (1 << (bits - 1))
        return parts | {"weight_zero_point": zero.to(torch.int8)}, value

    return encode


def divisors(block: tuple[int, int] | str) -> Encode:
    """8-bit floats of GPTQModel: `weight_scale_inv` is a divisor, of rows [n] or of tiles."""

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, _ = fp8(block)(w)
        rows, columns = (1, w.shape[1]) if isinstance(block, str) else block
        scale = 1 / parts["weight_scale_inv"]
        spread = (1 / scale).repeat_interleave(rows, 0)[: len(w)].repeat_interleave(columns, 1)[:, : w.shape[1]]
        code = (w.float() / spread).to(E4M3)
        stored = scale.flatten() if isinstance(block, str) else scale
        return {"weight": code, "weight_scale_inv": stored}, code.float() * spread

    return encode


def transforms(*locations: str) -> dict[str, Any]:
    """A `transform_config`, as SpinQuant has it."""
    applied = [{"targets": ["Linear"], "location": place, "inverse": False, "ignore": []} for place in locations]
    return {"config_groups": {"R1": {"type": "hadamard", "apply": applied, "randomize": False}}}


CASES = {
    "auto-round-0.4": Case(((PROJ, gptq(order="runs")),), OLD_ROUND | {"backend": "auto_round:gptq:exllamav2"}, 14),
    "auto-round-0.2": Case(((PROJ, gptq()),), OLD_ROUND | {"backend": "gptq:exllamav2"}, 14),
    "auto-round-0.4-asymmetric": Case(
        ((PROJ, gptq(sym=False, v1=False)),), OLD_ROUND | {"backend": "auto_round:exllamav2", "sym": False}, 14,
    ),
    "auto-round-0.4-awq": Case(((PROJ, awq()),), OLD_ROUND | {"backend": "auto_round:awq:gemm", "sym": False}, 14),
    "awq-gemv": Case(((PROJ, gemv()),), AWQ | {"version": "GEMV"}, 14),
    "awq-gemv-64": Case(((PROJ, gemv(64)),), AWQ | {"version": "gemv", "group_size": 64}, 14),
    "zeros-as-bytes": Case(
        ((PROJ, zeros_as_bytes(4, 32)),), groups("pack-quantized", group("Linear", 4, 32, symmetric=False)), 14,
    ),
    "zeros-as-bytes-of-rows": Case(
        ((PROJ, zeros_as_bytes(8, -1)),), groups("pack-quantized", group("Linear", 8, symmetric=False)), 14,
    ),
    "attention": Case(
        ((PROJ, packed(4, 32)),), groups("pack-quantized", INT4, ATTENTION, transform_config={"config_groups": {}}), 14,
    ),
    "transforms-of-weights": Case(
        ((PROJ, packed(4, 32)),),
        groups("pack-quantized", INT4, transform_config=transforms("weight_output", "weight_input")), 14,
    ),
    "fp8-divisors": Case(((PROJ, divisors("channel")),), DIVISORS, 14),
    "fp8-divisors-of-tiles": Case(
        ((PROJ, divisors((64, 64))),),
        DIVISORS | {"weight_scale_method": "block", "weight_block_size": [64, 64]}, 14,
    ),
    "mxfp8": Case(((PROJ, mxfp8),), FP8 | {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, 14),
    "mxfp8-by-default": Case(((PROJ, mxfp8),), FP8_WHOLE | {"quant_method": "mxfp8", "scale_fmt": "ue8m0"}, 14),
}  # fmt: skip
QUICK = ("auto-round-0.4", "fp8-divisors")  # in every run


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.drawn) for n in CASES])
def test_logits_are_those_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    check_logits(CASES[name], tmp_path)


def wrong(case: str, change: Callable[[Tensors], Any]) -> Case:
    """A case whose encoding of down_proj is damaged."""
    (pattern, how), *_ = CASES[case].rules
    assert how is not None

    def encode(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, value = how(w)
        change(parts)
        return parts, value

    return Case((("down_proj", encode), (pattern, how)), CASES[case].config, 0)


REFUSED: Mapping[str, tuple[Case, dict[str, Any], str, tuple[str, ...]]] = {
    "marlin": (CASES["auto-round-0.2"], {"backend": "gptq:marlin"}, "E307", ("backend", "gptq:marlin", "exllamav2")),
    "no backend": (CASES["auto-round-0.2"], {"backend": None}, "E307", ("backend", "None", "awq")),
    "rotation": (Case(((PROJ, gptq()),), GPTQ, 14), {"rotation": "hadamard"}, "E307", ("rotation", "hadamard")),
    "e5m2": (CASES["fp8-divisors"], {"format": "float8_e5m2"}, "E307", ("format", "float8_e5m2", "e4m3")),
    "semantics": (CASES["fp8-divisors"], {"weight_scale_semantics": "log"}, "E307", ("weight_scale_semantics", "log")),
    "transforms": (
        CASES["attention"], {"transform_config": transforms("weight_output", "input")}, "E307",
        ("transform_config", "'location': 'input'", "location weight_input"),
    ),
    "transforms of anything": (
        CASES["attention"], {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "E307",
        ("transform_config", "hadamard"),
    ),
    "zero point": (
        wrong("zeros-as-bytes", lambda parts: parts["weight_zero_point"].fill_(9)), {}, "E342",
        ("down_proj.weight_zero_point", "zero point 9", "-8 to 7"),
    ),
    "few zero points": (
        wrong("zeros-as-bytes", lambda parts: parts.update(weight_zero_point=parts["weight_zero_point"][:, :1])),
        {}, "E341", ("down_proj.weight_zero_point",),
    ),
    "few scales": (
        wrong("awq-gemv", lambda parts: parts.update(scales=parts["scales"][:, :8])), {}, "E341", ("down_proj.scales",),
    ),
    "a scale that is not a number": (
        wrong("awq-gemv", lambda parts: parts["scales"][1:2, :1].fill_(float("nan"))), {}, "E342",
        ("down_proj.scales", "nan", "[1, 0]"),
    ),
}  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    case, config, code, words = REFUSED[name]
    folder = made(case, tmp_path / "model", **config).folder
    fails(code, *words, do=lambda: open_all(folder))
