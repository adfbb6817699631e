"""`llmc quantize --kv-cache-dtype fp8` and `llmc compile --calibrate`: scales of the KV cache from texts."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from models.kit import fails
from quant.make.common import base, tokenizer
from quant.test_calibrate import words
from quant.test_decode import opened
from safetensors.torch import load_file
from transformers import DynamicCache

from llmc.console import Quiet
from llmc.options import Options
from llmc.quant.make.kv_ranges import KvRanges
from llmc.quant.make.plan import Settings
from llmc.quant.make.quantize_model import quantize_model
from llmc.quant.make.recipes import NONE, RECIPES
from llmc.quant.make.texts import windows
from llmc.quantized_compile import quantised_first

pytestmark = pytest.mark.drawn
LARGE = 400.0  # keys of one head times this


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two KV heads, the second of which has large keys; and a text with it."""
    folder = tmp_path_factory.mktemp("kv") / "model"
    saved = base("llama_tiles")
    size = saved.config.head_dim
    assert saved.config.num_key_value_heads == 2
    for layer in saved.model.layers:
        layer.self_attn.k_proj.weight.data[size:] *= LARGE
        queries = layer.self_attn.q_proj.weight.data
        queries[len(queries) // 2 :] /= LARGE
    saved.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    words(folder.parent)
    return folder


def made(model: Path, out: Path, scheme: str, **more: Any) -> Path:
    given = {"calibrate": model.parent / "words.txt", "samples": 4, "length": 32, "kv_cache_dtype": "fp8", **more}
    if scheme in RECIPES and RECIPES[scheme].bits == 4:
        given["group_size"] = 32
    quantize_model(model, out, Settings(scheme, **given), Quiet())
    return out


def cached(folder: Path, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the keys and values that transformers caches by layer, [samples, KV heads, T, size]."""
    import transformers

    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache = DynamicCache()
    with torch.no_grad():
        plain(tokens, past_key_values=cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


def test_known_keys_and_values_have_known_scales() -> None:
    ranges = KvRanges()
    assert ranges.scales("layers.0", "head") == {}
    keys, values = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    keys[0, 0, 1, 2], keys[0, 1, 2, 3] = -896, 44.8
    values[0, 0, 0, 0] = 224
    assert all(x is y for x, y in zip(ranges.update(keys, values, 0), (keys, values), strict=True))
    ranges.update(keys / 2, values * 2, 0)
    by_head, by_layer = ranges.scales("layers.0", "head"), ranges.scales("layers.0", "layer")
    assert torch.allclose(by_head["k_scale"], torch.tensor([2.0, 0.1])[:, None, None])
    assert by_head["v_scale"].flatten().tolist() == [1, 1]  # the second is always zero
    assert by_layer["k_scale"].tolist() == [2] and by_layer["v_scale"].tolist() == [1]


def test_keys_that_are_not_finite_are_refused() -> None:
    ranges = KvRanges()
    ranges.update(torch.full((1, 1, 1, 2), torch.nan), torch.ones(1, 1, 1, 2), 0)
    fails("E355", "keys of layers.3", do=lambda: ranges.scales("layers.3", "layer"))


@pytest.mark.parametrize("kind", ["layer", "head"])
def test_scales_are_those_of_the_keys_that_transformers_stores(kind: str, model: Path, tmp_path: Path) -> None:
    out = made(model, tmp_path / "out", NONE, kv_scales=kind)
    tokens = windows([(model.parent / "words.txt").read_text()], model, 4, 32, 0)
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(after[k], x) for k, x in before.items())
    with opened(out) as checkpoint:
        read = dict(checkpoint.kv_scales)
        assert before.keys() <= set(checkpoint.names) and not any("scale" in name for name in checkpoint.names)
    want = cached(model, tokens)
    assert read.keys() == set(range(len(want)))
    for layer, pair in enumerate(want):
        for name, x, scale in zip("kv", pair, read[layer], strict=True):
            top = x.abs().amax((0, 2, 3)) / 448
            assert np.allclose(scale, top if kind == "head" else top.max(), rtol=1e-4)
            stored = after[f"model.layers.{layer}.self_attn.{name}_scale"]
            assert stored.shape == ((2, 1, 1) if kind == "head" else (1,))
            assert np.array_equal(stored.flatten(), scale.flatten())
    scheme = json.loads((out / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"]) == (8, "float")
    assert scheme["strategy"] == {"layer": "tensor", "head": "attn_head"}[kind]


@pytest.mark.parametrize("scheme", RECIPES)
def test_every_recipe_takes_scales_of_the_cache(
    scheme: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.quant.make.sign_rounding.STEPS", 4)
    with opened(made(model, tmp_path / "out", scheme)) as checkpoint:
        scales = dict(checkpoint.kv_scales)
        assert all(np.isfinite(checkpoint.read(name)).all() for name in checkpoint.names)
    assert all(0 < x.item() != 1 for pair in scales.values() for x in pair) and len(scales) > 0


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_scales_do_not_change_weights_that_are_rounded(scheme: str, model: Path, tmp_path: Path) -> None:
    with_scales = load_file(made(model, tmp_path / "a", scheme) / "model.safetensors")
    plain = made(model, tmp_path / "b", scheme, calibrate=None, kv_cache_dtype="auto") / "model.safetensors"
    assert all(torch.equal(with_scales[k], x) for k, x in load_file(plain).items())


def rounded(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return keys or values as a cache of 8-bit floats stores them; large values saturate."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def test_calibrated_scales_keep_large_keys(model: Path, tmp_path: Path) -> None:
    """The second head's keys exceed 448: with a scale of 1 they saturate."""
    text = " ".join(f"w{(7 * i * i + 3) % 80}" for i in range(64))
    tokens = windows([text], model, 1, 64, 0)
    with opened(made(model, tmp_path / "out", NONE, kv_scales="head")) as checkpoint:
        scales = dict(checkpoint.kv_scales)
    errors = {"one": 0.0, "calibrated": 0.0}
    for layer, (keys, _) in enumerate(cached(model, tokens)):
        assert keys[:, 1].abs().max() > 2 * 448
        found = torch.from_numpy(scales[layer][0])[:, None, None]
        for name, scale in (("one", 1.0), ("calibrated", found)):
            off = rounded(keys, scale) - keys
            errors[name] += float((off.square().sum((0, 2, 3)) / keys.square().sum((0, 2, 3))).sqrt().max())
    assert errors["calibrated"] < 0.1 * errors["one"]


@pytest.mark.parametrize("quant", [NONE, "int4", "gptq"])
def test_compile_calibrates_by_head(quant: str, model: Path, tmp_path: Path) -> None:
    texts = model.parent / "words.txt"
    o = Options(quant=quant, kv_cache_dtype="fp8", calibrate=texts, group_size=None if quant == NONE else 32)
    with quantised_first(model, tmp_path / "model.llmc", o, Quiet()) as folder, opened(Path(folder)) as checkpoint:
        shapes = {x.shape for pair in checkpoint.kv_scales.values() for x in pair}
    assert shapes == {(2,)} and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("scheme", "given", "words"),
    [
        (NONE, {"kv_cache_dtype": "auto"}, "none leaves the weights"),
        (NONE, {"ignore": ("lm_head",)}, "none leaves the weights"),
        ("int8", {"calibrate": None}, "need texts"),
        ("int8", {"kv_cache_dtype": "auto"}, "uses no texts"),
        ("int8", {"kv_cache_dtype": "auto", "kv_scales": "head", "calibrate": None}, "--kv-scales head"),
        ("int8", {"length": 1}, "--length 1"),
    ],
)
def test_options_that_do_not_fit(scheme: str, given: MappingProxyType[str, Any], words: str) -> None:
    settings = Settings(scheme, **{"calibrate": Path("x"), "kv_cache_dtype": "fp8", **given})
    fails("E351", words, do=settings.recipe)


def test_layers_with_another_name_of_the_cache(tmp_path: Path) -> None:
    """GPT-NeoX's layers call it layer_past."""
    folder = tmp_path / "model"
    base("gpt_neox").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    words(tmp_path)
    out = made(folder, tmp_path / "out", "int8")
    assert sum(name.endswith(("k_scale", "v_scale")) for name in load_file(out / "model.safetensors")) == 2
