"""`llmc quantize` with texts: GPTQ, AWQ, AutoRound and SmoothQuant, a layer at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.kit import fails
from quant.reference import decode as reference
from quant.test_decode import float_model, opened
from safetensors.torch import load_file

from llmc.console import Quiet
from llmc.frontend.model_folder import open_source
from llmc.quant.make import sign_rounding
from llmc.quant.make.channel_scales import awq_scales, smooth_scales
from llmc.quant.make.clipping import round_clipped
from llmc.quant.make.gptq_codes import gptq
from llmc.quant.make.layer_runs import Inputs, LayerRuns
from llmc.quant.make.model_source import ModelSource
from llmc.quant.make.plan import Settings
from llmc.quant.make.quantize_model import quantize_model
from llmc.quant.make.recipes import RECIPES
from llmc.quant.make.rounding import round_to_nearest
from llmc.quant.make.texts import read_texts, windows

pytestmark = pytest.mark.drawn
MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo-model-small"
DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT, HELD = DOCS / "running.md", DOCS / "serving.md"
BF16 = torch.bfloat16


def made(out: Path, scheme: str, **more: Any) -> Path:
    more = {"calibrate": TEXT, "samples": 8, "length": 64, **more}
    quantize_model(MODEL, out, Settings(scheme, **more), Quiet())
    return out


def correlated(n: int, k: int) -> tuple[torch.Tensor, Inputs]:
    """A weight, and inputs whose columns are correlated and of very different sizes."""
    draw = torch.Generator().manual_seed(5)
    w = torch.randn(n, k, generator=draw)
    x = torch.randn(400, 24, generator=draw) @ torch.randn(24, k, generator=draw) + 0.3 * torch.randn(
        400, k, generator=draw
    )
    x = x * torch.exp(torch.randn(k, generator=draw))
    group = Inputs(["m"], "", torch.zeros(k, k), torch.zeros(k), torch.zeros(k))
    group.add(x)
    return w, group


def output_error(w: torch.Tensor, values: torch.Tensor, gram: torch.Tensor) -> float:
    d = values - w
    return float(((d @ gram) * d).sum())


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_gptq_is_far_nearer_to_the_products_than_rounding(name: str) -> None:
    recipe = RECIPES[name].grouped(32)  # awq's has zero points
    w, group = correlated(48, 160)
    rounded = round_to_nearest(w, recipe, BF16)
    found = gptq(w, group.gram, recipe, BF16, "m")
    assert torch.equal(found.grid.scale, rounded.grid.scale)
    assert found.codes.min() >= -8 and found.codes.max() <= 7
    assert output_error(w, found.values(), group.gram) < 0.4 * output_error(w, rounded.values(), group.gram)


def test_gptq_rounds_to_nearest_where_inputs_are_independent() -> None:
    w = torch.randn(16, 256, generator=torch.Generator().manual_seed(2))
    found = gptq(w, torch.eye(256) * 7, RECIPES["gptq"], BF16, "m")
    assert torch.equal(found.codes, round_to_nearest(w, RECIPES["gptq"], BF16).codes)


def test_gptq_refuses_inputs_that_say_nothing() -> None:
    for gram in (torch.zeros(128, 128), torch.full((128, 128), float("nan"))):
        fails("E355", "layer.3", do=lambda g=gram: gptq(torch.ones(4, 128), g, RECIPES["gptq"], BF16, "layer.3"))


def test_awq_scales_reduce_the_error_of_products() -> None:
    w, group = correlated(48, 160)
    recipe = RECIPES["awq"].grouped(32)
    scale = awq_scales(group, [w], recipe)
    scaled = round_to_nearest(w * scale, recipe, BF16).values() / scale
    plain = round_to_nearest(w, recipe, BF16).values()
    assert output_error(w, scaled, group.gram) < 0.8 * output_error(w, plain, group.gram)


@pytest.mark.parametrize(("name", "size"), [("awq", 32), ("awq", 64), ("int4", 32), ("awq", 0)])
def test_clipping_reduces_the_error_of_each_block(name: str, size: int) -> None:
    """Outliers in columns with small inputs are clipped; the last of 160 columns' groups of 64 has 32."""
    w, group = correlated(48, 160)
    w[:, ::16] *= torch.where(group.total[::16] < group.total.median(), 4.0, 1.0)
    recipe = RECIPES[name].grouped(size)
    clipped, plain = round_clipped(w, group.gram, recipe, BF16), round_to_nearest(w, recipe, BF16)
    assert clipped.grid.scale.shape == plain.grid.scale.shape
    spans = clipped.grid.scale.float() / plain.grid.scale.float()
    assert spans.max() <= 1 and spans.min() < 0.9
    for at in range(0, 160, size or 160):
        columns = slice(at, at + (size or 160))
        sums = group.gram[columns, columns]
        for row in range(48):
            errors = [output_error(w[row, columns], q.values()[row, columns], sums) for q in (clipped, plain)]
            assert errors[0] <= errors[1] * 1.0001


def test_smoothing_shares_outliers_between_inputs_and_weights() -> None:
    w, group = correlated(48, 160)
    scale = smooth_scales(group, [w])
    assert torch.allclose(group.largest / scale, (w * scale).abs().amax(0), rtol=1e-5)


def test_layers_that_run_one_by_one_compute_what_the_model_does(tmp_path: Path) -> None:
    tokens = torch.arange(3, 43).reshape(2, 20)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda m, args: last.append(args[0]))
    with torch.no_grad():
        model(tokens)
    with ModelSource(open_source(MODEL)) as source:
        runs = LayerRuns(source, tokens, tmp_path / "spill", True, 0)
        for i in range(len(runs.layers)):
            layer = runs.load(i)
            held = [any(not p.is_meta for p in m.parameters()) for m in runs.layers]
            assert held == [j == i for j in range(len(held))]  # one layer's weights are in memory
            layer.advance_reference()
            layer.advance()
            runs.drop(i)
        assert runs.reference is not None and (runs.reference == runs.hidden).all()
        assert torch.allclose(torch.from_numpy(runs.hidden), last[0], atol=1e-4, rtol=1e-4)


def test_modules_that_read_one_tensor_share_their_inputs(tmp_path: Path) -> None:
    with ModelSource(open_source(MODEL)) as source:
        runs = LayerRuns(source, torch.arange(3, 43).reshape(2, 20), tmp_path / "spill", False, 0)
        layer = runs.load(0)
        linears = {n: m for n, m in layer.module.named_modules() if isinstance(m, torch.nn.Linear)}
        groups = {tuple(g.linears): (g.producer, g.tokens) for g in layer.observe(linears)}
    assert groups == {
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): ("input_layernorm", 40),
        ("self_attn.o_proj",): ("", 40),
        ("mlp.gate_proj", "mlp.up_proj"): ("post_attention_layernorm", 40),
        ("mlp.down_proj",): ("", 40),
    }


def logits(model: Any) -> torch.Tensor:
    ids = windows([HELD.read_text()], MODEL, 1, 200, 0)
    with torch.no_grad():
        return model(input_ids=ids).logits[0].float()


def distance(folder: Path) -> float:
    """The KL divergence of a quantised model from the original one."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    a, b = (logits(m).log_softmax(-1) for m in (plain, float_model(folder)))
    return float((a.exp() * (a - b)).sum(-1).mean())


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The distance of the model whose weights are rounded to nearest, in 4 bits."""
    out = tmp_path_factory.mktemp("int4") / "out"
    return distance(made(out, "int4", calibrate=None, group_size=64))


@pytest.mark.parametrize("scheme", ["gptq", "awq", "autoround"])
def test_a_calibrated_checkpoint_is_whole_and_better(
    scheme: str, rounded: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_rounding, "STEPS", 30)
    out = made(tmp_path / "out", scheme, group_size=64, samples=64, length=128)
    before, after = load_file(MODEL / "model.safetensors"), load_file(out / "model.safetensors")
    plain = reference(out)
    with opened(out) as checkpoint:
        for module, w in plain.items():
            assert torch.equal(torch.from_numpy(checkpoint.read(f"{module}.weight")), w), module
    kept = {k for k in before if k.removesuffix(".weight") not in plain}
    assert kept <= after.keys() and all(after[k].dtype == before[k].dtype for k in kept)
    moved = {k for k in kept if not torch.equal(before[k], after[k])}
    assert all("layernorm" in k for k in moved) and bool(moved) == (scheme == "awq")
    assert sorted(p.name for p in out.iterdir()) == sorted(
        {p.name for p in MODEL.iterdir()} - {"README.md", ".gitattributes"}
    )
    assert distance(out) < 0.9 * rounded


def test_folds_keep_the_model(tmp_path: Path) -> None:
    """8-bit weights on smoothed channels: the model is the original one, nearly."""
    out = made(tmp_path / "out", "w8a8")
    after = load_file(out / "model.safetensors")
    before = load_file(MODEL / "model.safetensors")
    norms = [k for k in before if "layernorm" in k]
    assert norms and all(not torch.equal(before[k], after[k]) for k in norms)
    assert distance(out) < 0.01


def test_the_seed_decides_the_outcome(tmp_path: Path) -> None:
    codes = []
    for i, seed in enumerate((1, 1)):
        found = load_file(made(tmp_path / str(i), "gptq", group_size=64, samples=2, seed=seed) / "model.safetensors")
        codes.append({k: v for k, v in found.items() if k.endswith("weight_packed")})
    assert all(torch.equal(v, codes[1][k]) for k, v in codes[0].items())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "contains no text"),
        ("blank.jsonl", b'{"text": "  "}\n', "contains no text"),
        ("binary.txt", b"a\x00\x01", "NUL byte at 1"),
        ("latin.txt", "caf\xe9".encode("latin-1"), "utf-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not JSON: Expecting value at column 10"),
        ("deep.jsonl", b"\n" + b"[" * 100_000, "line 2 cannot be read"),
        ("half.jsonl", b'{"text": "a\\ud800b"}', "line 1 has half of a surrogate pair"),
        ("number.jsonl", b'{"text": 1}', "line 1 has no field text"),
        ("other.jsonl", b'{"body": "x"}', "line 1 has no field text"),
        ("short.txt", b"Once upon a time", "less than one window of 64"),
    ],
)
def test_texts_that_cannot_calibrate_are_refused(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    fails("E353", words, do=lambda: made(out, "gptq", calibrate=tmp_path / name, group_size=64))
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_only_line_feeds_end_a_line_of_json(tmp_path: Path) -> None:
    """A byte order mark and carriage returns belong to no text."""
    documents = ["a\u2028b\x85c", "d\U0001f600"]
    lines = [json.dumps({"text": d}, ensure_ascii=escaped) for d, escaped in zip(documents, (False, True), strict=True)]
    (tmp_path / "x.jsonl").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    assert read_texts(tmp_path / "x.jsonl") == documents


def test_a_missing_file_of_texts_is_refused(tmp_path: Path) -> None:
    fails("E353", "not a file", do=lambda: made(tmp_path / "out", "gptq", calibrate=tmp_path / "no", group_size=64))


def words(folder: Path, count: int = 400) -> Path:
    """A text in the words of the base models' tokenizer."""
    path = folder / "words.txt"
    draw = torch.Generator().manual_seed(3)
    path.write_text(" ".join(f"w{i}" for i in torch.randint(0, 80, (count,), generator=draw).tolist()))
    return path
