"""Damaged quantised checkpoints of every scheme: one clear error, which names the tensor or the key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.kit import fails
from quant.test_decode import FILE, FIXTURES, Q, Tensors, changed, put
from quant.test_handmade import CASES, made, open_all
from safetensors.torch import load_file, save_file

EXPERTS = "model.layers.0.mlp.experts"
UP = f"{EXPERTS}.gate_up_proj_scale_inv"


def drop(name: str) -> Callable[[Tensors], Any]:
    """A change that removes a tensor."""
    return lambda tensors: tensors.pop(name)


def cut(name: str, rows: int) -> Callable[[Tensors], Any]:
    """A change that leaves the first rows of a tensor."""
    return lambda tensors: tensors.update({name: tensors[name][:rows]})


def first(name: str, value: Any) -> Callable[[Tensors], Any]:
    """A change of the first entry of an 8-bit float tensor, which `put` cannot write."""

    def change(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8).view(-1)[0] = value

    return change


# A weight without a part, by fixture.
MISSING = [
    ("hf-fp8-block", f"{Q}.weight_scale_inv", "lacks weight_scale_inv"),
    ("ct-fp8", f"{Q}.weight_scale", "lacks weight_scale"),
    ("ct-w8a8", f"{Q}.weight_scale", "lacks weight_scale"),
    ("ct-w4a16-gptq", f"{Q}.weight_scale", "lacks weight_scale"),
    ("ct-w4a16-gptq", f"{Q}.weight_shape", "lacks weight_shape"),
    ("ct-mxfp4", f"{Q}.weight_scale", "lacks weight_scale"),
    ("ct-nvfp4", f"{Q}.weight_scale", "lacks weight_scale"),
    ("awq-autoawq", f"{Q}.scales", "lacks scales"),
    ("awq-autoawq", f"{Q}.qzeros", "lacks qzeros"),
    ("gptq-4bit", f"{Q}.qweight", "lacks qweight"),
    ("ar-4bit", f"{Q}.scales", "lacks scales"),
    ("bnb-int8", f"{Q}.SCB", "lacks"),
    ("bnb-nf4", f"{Q}.weight.quant_map", "lacks quant_map"),
    ("gpt-oss-mxfp4", f"{EXPERTS}.down_proj_scales", "lacks scales"),
    ("gptq-4bit-moe", f"{EXPERTS}.1.up_proj.scales", "lacks scales"),
    ("gptq-4bit-desc-act", f"{Q}.g_idx", "lacks g_idx"),
    ("ct-w8a16-asym", f"{Q}.weight_zero_point", "lacks weight_zero_point"),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("source", "name", "words"), MISSING)
def test_missing_parts(source: str, name: str, words: str, tmp_path: Path) -> None:
    fails("E340", name.rpartition(".")[0].removesuffix(".weight"), words, do=changed(source, tmp_path, drop(name)))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("source", "change", "words"),
    [
        ("ct-w8a8", put(f"{Q}.weight_scale", 0), (f"{Q}.weight_scale", "0.0")),
        ("ct-fp8-block", put(f"{Q}.weight_scale", float("nan")), (f"{Q}.weight_scale", "nan")),
        ("ct-nvfp4", put(f"{Q}.weight_global_scale", 0), (f"{Q}.weight_global_scale", "0.0")),
        ("ct-nvfp4", first(f"{Q}.weight_scale", 0x7F), (f"{Q}.weight_scale", "nan")),
        ("ct-mxfp8", put(f"{Q}.weight_scale", 255), (f"{Q}.weight_scale", "nan")),
        ("hf-fp8-tensor", put(f"{Q}.weight_scale_inv", 0), (f"{Q}.weight_scale_inv", "0.0")),
        ("hf-fp8-block-ue8m0", first(f"{Q}.weight_scale_inv", 255), (f"{Q}.weight_scale_inv", "nan")),
        ("awq-autoawq", put(f"{Q}.scales", float("-inf")), (f"{Q}.scales", "inf")),
        ("ar-4bit-asym", put(f"{Q}.scales", float("nan")), (f"{Q}.scales", "nan")),
        ("bnb-int8", put(f"{Q}.SCB", float("nan")), (f"{Q}.SCB", "nan")),
        ("gpt-oss-mxfp4", put(f"{EXPERTS}.gate_up_proj_scales", 255), ("gate_up_proj_scales", "nan")),
        ("ct-moe-fp8", put(f"{EXPERTS}.2.down_proj.weight_scale", 0), (f"{EXPERTS}.2.down_proj", "0.0")),
    ],
)  # fmt: skip
def test_scales_that_are_zero_or_not_finite(
    source: str, change: Callable[[Tensors], Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    fails("E342", *words, do=changed(source, tmp_path, change))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("source", "change", "config", "code", "words"),
    [
        ("gptq-3bit", cut(f"{Q}.qweight", 5), {}, "E341", (f"{Q}.",)),
        ("gptq-4bit", lambda t: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"][:-1]}), {}, "E341", (f"{Q}.g_idx",)),
        ("ar-4bit", cut(f"{Q}.qweight", 8), {}, "E341", (f"{Q}.scales",)),
        ("awq-autoawq", cut(f"{Q}.scales", 1), {}, "E341", (f"{Q}.scales",)),
        ("awq-autoawq", lambda t: None, {"group_size": 48, "q_group_size": 48}, "E341", ("scales",)),
        ("hf-fp8-block", lambda t: None, {"weight_block_size": [96, 96]}, "E341", ("weight_scale_inv",)),
        ("ct-fp8-block", cut(f"{Q}.weight", 8), {}, "E325", (f"{Q}.weight", "[8, 128]")),
        ("ct-nvfp4", cut(f"{Q}.weight_scale", 8), {}, "E341", (f"{Q}.weight_scale",)),
        ("gpt-oss-mxfp4", cut(f"{EXPERTS}.down_proj_scales", 1), {}, "E341", ("down_proj_scales",)),
        ("ct-w4a16-gptq", lambda t: t.update({f"{Q}.weight_shape": torch.tensor([64])}), {}, "E341", ("weight_shape",)),
        ("ct-nvfp4", lambda t: t.update({f"{Q}.weight_global_scale": torch.ones(2)}), {}, "E341", ("one number",)),
        ("mo-nvfp4", lambda t: t.update({f"{Q}.weight_scale_2": torch.ones(3)}), {}, "E341", ("one number",)),
        ("ct-w4a16-gptq", lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :1]}), {}, "E341",
         (f"{Q}.weight_scale", "its shape should be")),
        ("gptq-4bit", lambda t: None, {"group_size": "all"}, "E340", ("group_size", "all")),
        ("gptq-4bit", lambda t: None, {"bits": None}, "E340", ("bits",)),
        ("ct-w8a8", lambda t: None, {"format": "sparse-24-bitmask", "config_groups": {"a": {"targets": ["Linear"]}}},
         "E307", ("sparse-24-bitmask", "int-quantized")),
        ("ct-w8a8", lambda t: None, {"sparsity_config": {"format": "sparse-bitmask"}}, "E307", ("sparsity_config",)),
        ("hf-fp8-block", lambda t: None, {"expert_dtype": "fp4"}, "E307", ("expert_dtype", "fp4")),
        ("hf-fp8-block", lambda t: None, {"quant_method": "aqlm"}, "E307", ("aqlm", "compressed-tensors")),
        ("hf-fp8-block", lambda t: None, {"quant_method": None}, "E307", ("without a name",)),
    ],
)  # fmt: skip
def test_shapes_and_configurations(
    source: str, change: Callable[[Tensors], Any], config: dict[str, Any], code: str, words: tuple[str, ...],
    tmp_path: Path,
) -> None:  # fmt: skip
    fails(code, *words, do=changed(source, tmp_path, change, **config))


def test_methods_are_found_however_they_are_spelled(tmp_path: Path) -> None:
    changed("ct-w8a8", tmp_path, lambda t: None, quant_method="Compressed_Tensors")()


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (drop(UP), "E340", ("gate_up_proj", "lacks scale_inv")),
        (cut(UP, 3), "E341", (UP, "[4, 1, 2]")),
        (put(UP, float("nan")), "E342", (UP, "nan")),
        (lambda t: t.update({UP: torch.ones(4, 3, 2)}), "E341", (UP,)),
    ],
)
def test_stacks_of_experts(change: Callable[[Tensors], Any], code: str, words: tuple[str, ...], tmp_path: Path) -> None:
    folder = made(CASES["fp8-stacks"], tmp_path / "model").folder
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / FILE)
    fails(code, *words, do=lambda: open_all(folder))


@pytest.mark.drawn
@pytest.mark.parametrize("value", [9, -1])
def test_column_groups_of_compressed_tensors(value: int, tmp_path: Path) -> None:
    """`weight_g_idx` of older files: groups in any order are read, and unknown groups refused."""
    config = json.loads((FIXTURES / "ct-w4a16-gptq" / "config.json").read_text())["quantization_config"]
    (facts,) = config["config_groups"].values()
    index = torch.arange(128, dtype=torch.int32) // facts["weights"]["group_size"]
    whole = {f"{Q}.weight_g_idx": index.flip(0).contiguous()}
    changed("ct-w4a16-gptq", tmp_path, lambda t: t.update(whole))()
    whole[f"{Q}.weight_g_idx"][5] = value
    do = changed("ct-w4a16-gptq", tmp_path, lambda t: t.update(whole))
    fails("E342", f"{Q}.weight_g_idx", f"group {value}", do=do)
