"""Unusual quantised checkpoints, made by hand: each computes with its dequantised weights, or is refused with an error
that names the cause."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.kit import eager_logits, fails, ir_logits, prompts, relative_error
from quant.handmade import Encode, Handmade, actorder, awq, fp4, fp8, gptq, int8, packed, transposed, with_parts, write
from quant.test_compiled import compiled, expected, scored
from quant.test_decode import opened

from llmc.extension import load
from llmc.frontend.checkpoint import Checkpoint
from llmc.passes.base import Ctx
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.quant.typed_weights import use_codes

BF16, F32 = torch.bfloat16, torch.float32
EXPERT, STACK, OTHERS = r"experts\.\d+\.\w+$", r"experts\.(gate_up|down)_proj$", r"self_attn|mlp\.(gate|up|down)_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}
FP8_WHOLE = FP8 | {"weight_block_size": None}
ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
}  # fmt: skip


def groups(layout: str, *found: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors."""
    config = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"]}
    return {**config, "config_groups": {f"group_{i}": g for i, g in enumerate(found)}, **more}


def group(target: str, bits: int, size: int = 0, layout: str = "", act: str = "", **weights: Any) -> dict[str, Any]:
    """One of its groups."""
    args = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if size else "channel"}
    acts = {"num_bits": 8, "type": act, "strategy": "token", "dynamic": True} if act else None
    own = {"targets": [target], "weights": {**args, "group_size": size or None, **weights}, "input_activations": acts}
    return own | ({"format": layout} if layout else {})


@dataclass(frozen=True)
class Case:
    """A checkpoint. rules: (pattern, encoding), the first of which is found in a module's name decides. more: other
    arguments of `write`. codes: how many stored weights keep their codes."""

    rules: tuple[tuple[str, Encode | None], ...]
    config: Mapping[str, Any]
    codes: int
    more: Mapping[str, Any] = field(default_factory=dict)


PROJ = r"_proj$"
INT4, INT8W = group("Linear", 4, 32), group("Linear", 8, layout="int-quantized", act="int")
MOE = {"source": "qwen3_moe"}
COMPRESSED = {
    "ct-mixed": Case(
        (("self_attn", packed(4, 32)), (r"layers\.1\.mlp\.down", packed(8, -1)), ("mlp", int8())),
        groups(
            "mixed-precision", INT8W, group("re:.*self_attn.*", 4, 32, "pack-quantized"),
            group("model.layers.1.mlp.down_proj", 8, layout="pack-quantized"), ignore=["re:.*lm_head"],
        ), 14,
    ),
    "ct-head": Case(
        (("lm_head", packed(8, -1)), (PROJ, packed(4, 32, sym=False))),
        groups("pack-quantized", group("lm_head", 8), group("Linear", 4, 32, symmetric=False), ignore=[]), 15,
    ),
    "ct-embedding": Case(
        (("embed_tokens", packed(8, -1)), (PROJ, packed(4, 32))),
        groups("pack-quantized", group("Embedding", 8), INT4), 14,
    ),
    "ct-embedding-tied": Case(
        (("embed_tokens", packed(8, -1)), (PROJ, packed(4, 32))),
        groups("pack-quantized", group("Embedding", 8), INT4), 7, {"source": "qwen2"},
    ),
    "ct-order-of-targets": Case(  # the name of a module, then patterns in alphabetical order
        ((r"0\.mlp\.down_proj", packed(4, 16)), ("down_proj", packed(4, 32)), (PROJ, packed(4, -1))),
        groups(
            "pack-quantized", group("re:.*proj", 4), group("re:.*down_proj", 4, 32),
            group("model.layers.0.mlp.down_proj", 4, 16),
        ), 14,
    ),
    "ct-old-names": Case(  # compression_config without a method, tiles as text
        ((PROJ, fp8((64, 64), "weight_scale", BF16)),),
        {
            "format": "float-quantized",
            "config_groups": {"all": group("Linear", 8, type="float", strategy="block", block_structure="64x64")},
        }, 14, {"key": "compression_config"},
    ),
    "ct-mixture": Case(
        ((EXPERT, packed(4, 32)), (OTHERS, int8())),
        groups(
            "mixed-precision", group("re:.*experts.*", 4, 32, "pack-quantized"), INT8W,
            ignore=["re:.*mlp.gate$", "lm_head"],
        ), 23, MOE,
    ),
    "ct-some-experts": Case(((r"experts\.[12]\.", packed(4, 32)),), groups("pack-quantized", INT4), 0, MOE),
    "ct-any-columns": Case(
        ((PROJ, actorder(4, 32, words=True, sym=False)),),
        groups("pack-quantized", group("Linear", 4, 32, symmetric=False, actorder="group")), 14,
    ),
    "ct-any-columns-of-int8": Case(
        ((PROJ, actorder(8, 32, words=False)),), groups("int-quantized", group("Linear", 8, 32, actorder="group")), 14,
    ),
    "ct-any-columns-of-int4": Case(
        ((PROJ, actorder(4, 16, words=False, sym=False)),),
        groups("int-quantized", group("Linear", 4, 16, symmetric=False, actorder=True)), 14,
    ),
    "ct-sorted-columns": Case(
        ((PROJ, packed(4, 32)),), groups("pack-quantized", group("Linear", 4, 32, actorder="weight")), 14,
    ),
    "ct-7-bit": Case(
        ((r"layers\.0", None), (PROJ, packed(7, 16, sym=False))),
        groups("pack-quantized", group("Linear", 7, 16, symmetric=False), ignore=["lm_head", r"re:.*layers\.0\..*"]), 7,
    ),
    "ct-fp4-and-fp8": Case(
        (("mlp", fp4), (PROJ, fp8("channel", "weight_scale", BF16))),
        groups(
            "mixed-precision", group("re:.*mlp.*", 4, 16, "nvfp4-pack-quantized", type="float"),
            group("re:.*self_attn.*", 8, 0, "float-quantized", "float", type="float"),
        ), 8,
    ),
    "ct-odd-tiles": Case(
        ((PROJ, fp8((48, 80), "weight_scale", BF16)),),
        groups("float-quantized", group("Linear", 8, type="float", strategy="block", block_structure=[48, 80])), 14,
    ),
    "ct-router": Case(
        ((EXPERT, packed(4, 32)), (r"mlp\.gate$", packed(8, 32))),
        groups("pack-quantized", INT4, group("re:.*mlp.gate$", 8, 32)), 13, MOE,
    ),
}  # fmt: skip
WORDS = {
    "gptq-head": Case(((r"_proj|lm_head", gptq()),), GPTQ | {"lm_head": True}, 15),
    "gptq-some-modules": Case(
        (("self_attn", gptq()),), GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["self_attn.o_proj"]]},
        8,
    ),
    "gptq-dynamic": Case(
        ((r"0\.mlp\.down", None), (r"0\.mlp", gptq(8, 64)), (PROJ, gptq())),
        GPTQ | {
            "dynamic": {
                r"-:model\.layers\.0\.mlp\.down": {}, r"+:model\.layers\.0\.mlp\.": {"bits": 8, "group_size": 64},
                r"model\.no_such": {"bits": 2},
            }
        }, 13,
    ),
    "gptq-8-bit-rows": Case(
        ((PROJ, gptq(8, -1, order="runs", dtype=F32)),), GPTQ | {"bits": 8, "group_size": -1}, 14,
    ),
    "gptq-v2-bf16": Case(
        ((PROJ, gptq(8, 32, sym=False, v1=False, dtype=BF16)),),
        GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2", "sym": False}, 14,
    ),
    "gptq-48-columns": Case(((PROJ, gptq(4, 48, order="shuffled")),), GPTQ | {"group_size": 48, "desc_act": True}, 14),
    "gptq-2-bit-v2": Case(
        ((PROJ, gptq(2, 16, sym=False, v1=False)),),
        GPTQ | {"bits": 2, "group_size": 16, "checkpoint_format": "gptq_v2", "sym": False}, 14,
    ),
    "gptq-dynamic-order": Case(
        (("q_proj", None), ("mlp", gptq(8, 32, order="shuffled")), (PROJ, gptq())),
        GPTQ | {"dynamic": {r"-:.*q_proj$": {}, r"+:^(?!.*self_attn).*mlp": {"bits": 8, "desc_act": True}}}, 12,
    ),
    "gptq-8-bit-head": Case(
        (("lm_head", gptq(8)), (PROJ, gptq())), GPTQ | {"lm_head": True, "dynamic": {"lm_head": {"bits": 8}}}, 15,
    ),
    "gptq-3-bit": Case(((PROJ, gptq(3, 32, sym=False)),), GPTQ | {"bits": 3, "sym": False}, 14),
    "gptq-static-groups": Case(
        ((PROJ, gptq(4, 128, order="shuffled")),),
        GPTQ | {"group_size": 128, "desc_act": True, "static_groups": True}, 14,
    ),
    "gptq-shards": Case(((PROJ, gptq()),), GPTQ, 14, {"shards": 5}),
    "gptq-v2-in-the-side-file": Case(
        ((PROJ, gptq(v1=False)),), GPTQ, 14,
        {"beside": {"quantize_config.json": GPTQ | {"checkpoint_format": "gptq_v2"}}},
    ),
    "gptq-side-file-alone": Case(((PROJ, gptq()),), {}, 14, {"beside": {"quantize_config.json": GPTQ}}),
    "gptq-mixture": Case(
        ((EXPERT, gptq(order="runs")), ("self_attn", gptq(order="shuffled"))), GPTQ | {"desc_act": True}, 20, MOE,
    ),
    "gptq-ordered-experts": Case(
        ((EXPERT, gptq(4, 16, order="shuffled")),), GPTQ | {"group_size": 16, "desc_act": True}, 0, MOE,
    ),
    "gptq-conv1d": Case(((r"c_attn|c_proj|c_fc", transposed(gptq())),), GPTQ, 8, {"source": "gpt2"}),
    "gptq-joined": Case(((PROJ, gptq()),), GPTQ, 8, {"source": "phi3"}),
    "awq-plain-modules": Case(
        ((r"0\.self_attn", None), (PROJ, awq())),
        AWQ | {"modules_to_not_convert": ["model.layers.0.self_attn", "lm_head"]}, 10,
    ),
    "awq-48-columns": Case(((PROJ, awq(48)),), AWQ | {"group_size": 48, "zero_point": False}, 14),
    "awq-rows": Case(((r"_proj|lm_head", awq(-1, BF16)),), AWQ | {"group_size": -1}, 15),
    "ar-extra": Case(
        ((r"0\.self_attn\.q", gptq(8, -1)), ("k_proj", None), (r"1\.mlp\.up", gptq(4, 16, sym=False)), (PROJ, gptq())),
        ROUND | {
            "extra_config": {
                "model.layers.0.self_attn.q_proj": {"bits": 8, "group_size": -1},
                "k_proj": {"bits": 16, "data_type": "fp"}, r".*1\.mlp\.up.*": {"group_size": 16, "sym": False},
            }
        }, 12,
    ),
    "ar-patterns": Case(
        ((r"0\.self_attn\.[qk]", gptq(8, -1)), (r"1\.mlp", gptq(2, 16)), (r"0\.mlp\.up", gptq(3)), (PROJ, gptq())),
        ROUND | {
            "extra_config": {
                r"model\.layers\.0\.self_attn\.(q|k)_proj": {"bits": 8, "group_size": -1},
                r"1\.mlp\..*": {"bits": 2, "group_size": 16}, "model.layers.0.mlp.up_proj": {"bits": 3},
            }
        }, 14,
    ),
    "ar-order-of-patterns": Case(  # a name, then the first pattern in the order of the file
        ((r"0\.mlp\.up", gptq(3)), ("mlp", gptq(8, -1)), (PROJ, gptq())),
        ROUND | {
            "extra_config": {
                "up_proj": {}, r".*\.mlp\..*": {"bits": 8, "group_size": -1}, "down_proj": {"bits": 2},
                "model.layers.0.mlp.up_proj": {"bits": 3},
            }
        }, 14,
    ),
    "ar-awq": Case(
        ((r"1\.mlp", None), (PROJ, awq())),
        ROUND | {
            "packing_format": "auto_round:auto_awq", "sym": False, "extra_config": {r"layers\.1\.mlp": {"bits": 16}},
        }, 11,
    ),
    "ar-layer-config": Case(
        ((r"0\.self_attn\.q", gptq(8, -1)), (PROJ, gptq())),
        ROUND | {"layer_config": {"model.layers.0.self_attn.q_proj": {"bits": 8, "group_size": -1}}}, 14,
    ),
    "ar-some-blocks": Case(((r"1\..*_proj", gptq()),), ROUND | {"block_name_to_quantize": ["model.layers.1"]}, 7),
    "ar-second-version": Case(
        ((PROJ, gptq(sym=False, v1=False)),), ROUND | {"packing_format": "auto_round", "sym": False}, 14,
    ),
}  # fmt: skip
FLOATS = {
    "fp8-plain-modules": Case(
        ((r"q_proj|0\.mlp", None), (PROJ, fp8((64, 64)))),
        FP8 | {"modules_to_not_convert": ["lm_head", "q_proj", "model.layers.0.mlp"]}, 9,
    ),
    "fp8-odd-tiles": Case(((PROJ, fp8((40, 56), dtype=BF16)),), FP8 | {"weight_block_size": [40, 56]}, 14),
    "fp8-ignored-layers": Case(
        ((r"0\.mlp", None), (PROJ, fp8("channel", "weight_scale", BF16))),
        FP8_WHOLE | {"ignored_layers": ["lm_head", "model.layers.0.mlp"]}, 11,
    ),
    "fbgemm": Case(
        ((r"0\.mlp", None), (PROJ, with_parts(fp8("channel", "weight_scale"), input_scale_ub=torch.tensor(1200.0)))),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}, 11,
    ),
    "fp8-embedding": Case(
        (("embed", fp8("tensor", "weight_scale")), (r"_proj|lm_head", fp8((64, 64)))),
        FP8 | {"modules_to_convert": ["embed_tokens"]}, 15,
    ),
    "fp8-experts": Case(
        ((EXPERT, fp8((32, 32))), (OTHERS, fp8((32, 32)))), FP8 | {"weight_block_size": [32, 32]}, 23, MOE,
    ),
    "fp8-stacks": Case(((STACK, fp8((64, 64), "scale_inv")), (OTHERS, fp8((64, 64)))), FP8, 13, MOE),
    "fp8-stacks-of-halves": Case(  # one scale for gate, up and down of an expert, also of activations
        (
            (r"gate_up_proj$", with_parts(fp8((32, 128), "scale_inv"), activation_scale=torch.ones(4))),
            (r"experts\.down_proj$", fp8("tensor", "scale_inv")),
        ), FP8_WHOLE | {"activation_scheme": "static"}, 2, MOE,
    ),
}  # fmt: skip
CASES = {**COMPRESSED, **WORDS, **FLOATS}
QUICK = ("ct-mixed", "gptq-dynamic", "fp8-stacks")  # in every run
DRAWN = [pytest.param(name, marks=() if name in QUICK else pytest.mark.drawn) for name in CASES]
PASSES = "canonicalize, fuse-linear, split-moe{quantized=true}, lower-quantized{fallback=false}"


def made(case: Case, folder: Path, **config: Any) -> Handmade:
    def encode(module: str) -> Encode | None:
        return next((how for pattern, how in case.rules if re.search(pattern, module)), None)

    return write(folder, encode, {**case.config, **config} if case.config else {}, **case.more)


def computed(checkpoint: Checkpoint, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    traced = checkpoint.traced
    return ir_logits(traced.module, traced, checkpoint, tokens, positions, np.arange(len(tokens)))


@pytest.mark.parametrize("name", DRAWN)
def test_logits_are_those_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    check_logits(CASES[name], tmp_path)


def check_logits(case: Case, folder: Path) -> None:
    """With weights as numbers, and as codes that products read."""
    (tokens, positions), found = prompts((9,), 64), made(case, folder / "model")
    want = eager_logits(found.model, tokens, (9,))
    with opened(found.folder) as checkpoint:
        assert relative_error(computed(checkpoint, tokens, positions), want) <= 1e-5
        assert use_codes(checkpoint.traced.module, checkpoint, load().opset()) == case.codes
        run_pipeline(checkpoint.traced.module, parse_pipeline(PASSES, load().passes), Ctx(load().opset()))
        assert relative_error(computed(checkpoint, tokens, positions), want) <= 1e-5


@pytest.mark.drawn(seconds=12)
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, tmp_path: Path) -> None:
    """A few activations are rounded to another code than by the reference interpreter, hence the mean."""
    tokens, positions = prompts((37,), 64)
    found = made(CASES[name], tmp_path / "model")
    got = scored(compiled(found.folder, tmp_path / "model.llmc"), tokens)
    want = expected(found.folder, tokens, positions, target="cpu:native")
    assert np.abs(got - want).mean() < 0.02
    logits = eager_logits(found.model, tokens, (37,)).astype(np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    exact = np.take_along_axis(logits[:-1], tokens[1:, None].astype(np.int64), 1)[:, 0]
    assert np.abs(got - exact).mean() < 0.3  # what rounding the activations of these models costs


REFUSED: Mapping[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "ignored": ("ct-mixed", {"ignore": ["re:.*q_proj"]}, "E340", ("self_attn.q_proj", "leaves it out", "re:.*q_proj")),
    "pattern": ("ct-mixed", {"ignore": ["re:("]}, "E340", ("ignore", "re:(")),
    "type": (
        "ct-head", groups("pack-quantized", group("Linear", 4, 32, type="float")) | {"ignore": []}, "E340",
        ("lm_head", "type float", "pack-quantized"),
    ),
    "preset": ("ct-head", {"config_groups": {"W4A16": ["Linear"]}}, "E307", ("preset", "W4A16")),
    "no-target": ("ct-embedding", groups("pack-quantized", INT4), "E340", ("embed_tokens", "no target")),
    "dynamic-format": ("gptq-dynamic", {"dynamic": {"+:.*": {"format": "marlin"}}}, "E307", ("marlin", "gptq_v2")),
    "lost-columns": (
        "ct-sorted-columns", groups("pack-quantized", group("Linear", 4, 32, actorder="group")), "E340",
        ("lacks weight_g_idx",),
    ),
    "lost-order": ("gptq-8-bit-head", {"desc_act": True}, "E340", ("lacks g_idx",)),
    "lost-zeros": (
        "ct-any-columns-of-int8", groups("int-quantized", group("Linear", 8, 32, symmetric=False)), "E340",
        ("lacks weight_zero_point",),
    ),
    "dynamic-list": ("gptq-dynamic", {"dynamic": ["a"]}, "E340", ("dynamic", "not a table")),
    "groups-list": ("ct-head", {"config_groups": ["a"]}, "E340", ("config_groups", "not a table")),
    "extra-list": ("ar-some-blocks", {"extra_config": ["a"]}, "E340", ("extra_config", "not a table")),
    "adapter": ("gptq-head", {"adapter": {"name": "lora"}}, "E307", ("adapter", "lora")),
    "awq-plain": ("awq-rows", {"modules_to_not_convert": ["lm_head"]}, "E340", ("lm_head", "modules_to_not_convert")),
    "plain-text": ("awq-rows", {"modules_to_not_convert": "lm_head"}, "E340", ("modules_to_not_convert", "not a list")),
    "plain-table": ("fp8-ignored-layers", {"ignored_layers": {"lm_head": 1}}, "E340", ("ignored_layers", "not a list")),
    "plain-numbers": ("awq-rows", {"modules_to_not_convert": [0]}, "E340", ("modules_to_not_convert", "not a list")),
    "awq-no-columns": ("awq-rows", {"group_size": 0}, "E340", ("group_size = 0", "-1")),
    "awq-negative": ("awq-rows", {"group_size": -2}, "E340", ("group_size = -2", "-1")),
    "gptq-no-columns": ("gptq-head", {"group_size": 0}, "E340", ("group_size = 0", "-1")),
    "ar-no-columns": ("ar-some-blocks", {"group_size": 0}, "E340", ("group_size = 0", "-1")),
    "fp8-plain": ("fp8-ignored-layers", {"ignored_layers": ["model.layers.1.mlp.up_proj"]}, "E340", ("up_proj",)),
    "rotated": ("ar-some-blocks", {"rotation_config": {"algorithm": "hadamard"}}, "E307", ("rotation_config",)),
    "numbers": ("ar-some-blocks", {"data_type": "nf"}, "E307", ("data_type", "model.layers.1", "nf", "int")),
    "tied-head": ("gptq-head", {}, "E327", ("lm_head.weight", "tie_word_embeddings")),
}  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    source, config, code, words = REFUSED[name]
    folder = made(CASES[source], tmp_path / "model", **config).folder
    if name == "tied-head":
        edit(folder, lambda c: c.update(tie_word_embeddings=True))
    fails(code, *words, do=lambda: open_all(folder))


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    facts = json.loads((folder / "config.json").read_text())
    change(facts)
    (folder / "config.json").write_text(json.dumps(facts))


def open_all(folder: Path) -> None:
    with opened(folder):
        pass
