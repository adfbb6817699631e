"""GPTQ, AWQ and AutoRound of the experts of mixtures: each with the tokens that are routed to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quant.make.common import base, tokenizer
from quant.reference import decode as reference
from quant.test_calibrate import words
from safetensors.torch import load_file, save_file

from llmc.console import Quiet
from llmc.frontend.model_folder import open_source
from llmc.quant.make import sign_rounding
from llmc.quant.make.expert_weights import expert_inputs, expert_tokens, too_few_tokens
from llmc.quant.make.folding import fold_experts
from llmc.quant.make.layer_runs import Layer, LayerRuns
from llmc.quant.make.model_source import ModelSource
from llmc.quant.make.plan import Settings
from llmc.quant.make.quantize_model import quantize_model
from llmc.quant.make.recipes import RECIPES
from llmc.quant.make.rounding import round_to_nearest

pytestmark = pytest.mark.drawn
Weights = dict[str, torch.Tensor]


class Noted(Quiet):
    """Keeps notes."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of one layer and four experts, two of them for each token."""
    folder = tmp_path_factory.mktemp("mixtral")
    base("mixtral", torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    words(folder, 1200)
    return folder


def made(source: Path, out: Path, scheme: str, samples: int) -> tuple[Weights, list[str]]:
    """The dequantised weights of the checkpoint that a scheme writes, and its notes."""
    console = Noted()
    settings = Settings(scheme, 32, calibrate=source / "words.txt", samples=samples, length=32)
    quantize_model(source, out, settings, console)
    return reference(out), console.notes


def rounded(source: Path, scheme: str, modules: Iterator[str]) -> Weights:
    """The same weights, rounded to nearest."""
    original, recipe = load_file(source / "model.safetensors"), RECIPES[scheme].grouped(32)
    return {m: round_to_nearest(original[f"{m}.weight"], recipe, torch.float32).values() for m in modules}


def log_probabilities(source: Path, weights: Weights, folder: Path) -> torch.Tensor:
    """Those of held-out tokens by the model with other weights."""
    stored = load_file(source / "model.safetensors")
    stored |= {f"{m}.weight": w.contiguous() for m, w in weights.items()}
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(3, 80, (8, 40), generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return model(input_ids=ids).logits.log_softmax(-1)


def test_gptq_of_experts_is_nearer_to_the_model_than_rounding(source: Path, tmp_path: Path) -> None:
    found, notes = made(source, tmp_path / "out", "gptq", 36)
    experts = {m: w for m, w in found.items() if ".experts." in m}
    assert "experts: 12 weights, each calibrated with the tokens that are routed to it" in notes
    assert notes[-1].startswith("experts: 12 weights calibrated") and notes[-1].endswith(" 0 rounded to nearest")
    plain = log_probabilities(source, {}, tmp_path / "plain")
    distances = []
    for name, weights in (("gptq", experts), ("rtn", rounded(source, "gptq", iter(experts)))):
        other = log_probabilities(source, weights, tmp_path / name)
        distances.append(float((plain.exp() * (plain - other)).sum(-1).mean()))
    assert distances[0] < 0.8 * distances[1]


@pytest.mark.parametrize("scheme", ["gptq", "awq", "autoround"])
def test_experts_with_few_tokens_are_rounded(
    scheme: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_rounding, "STEPS", 4)
    monkeypatch.setattr("llmc.quant.make.expert_weights.MIN_TOKENS_PER_COLUMN", 50)
    found, notes = made(source, tmp_path / "out", scheme, 2)
    experts = [m for m in found if ".experts." in m]
    assert "0 weights calibrated" in notes[-1] and "12 rounded to nearest" in notes[-1]
    plain = rounded(source, scheme, iter(found))
    assert all(torch.equal(found[m], plain[m]) for m in experts)
    assert any(not torch.equal(found[m], plain[m]) for m in found.keys() - set(experts))


@pytest.mark.parametrize("scheme", ["awq", "autoround"])
def test_other_methods_calibrate_experts(
    scheme: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_rounding, "STEPS", 4)
    found, notes = made(source, tmp_path / "out", scheme, 36)
    plain = rounded(source, scheme, iter(found))
    changed = {m for m in found if ".experts." in m and not torch.equal(found[m], plain[m])}
    # AWQ scales nothing in front of w1, the gate, but clips it.
    assert {m.rpartition(".")[2] for m in changed} == {"w1", "w2", "w3"}
    assert "12 weights calibrated" in notes[-1] and " 0 rounded" in notes[-1]


@pytest.fixture
def layer(source: Path, tmp_path: Path) -> Iterator[Layer]:
    """The model's layer over 6 samples of 20 tokens."""
    tokens = torch.randint(3, 80, (6, 20), generator=torch.Generator().manual_seed(1))
    with ModelSource(open_source(source)) as model:
        layer = LayerRuns(model, tokens, tmp_path / "spill", False, 0).load(0)
        layer.experts = {e.stored: e for e in model.experts_of(layer.path)}
        yield layer


def test_stored_weights_are_found_in_their_stacks(source: Path, layer: Layer) -> None:
    stored = load_file(source / "model.safetensors")
    assert len(layer.experts) == 12
    for name, expert in layer.experts.items():
        assert torch.equal(expert.of(layer.module), stored[name])


def test_inputs_are_the_tokens_that_are_routed_to_an_expert(layer: Layer) -> None:
    """However many runs they are observed in."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = layer.module.mlp.experts.register_forward_pre_hook(lambda m, args: seen.append(args[:2]))
    counts = expert_tokens(layer)
    hook.remove()
    at_once, one_by_one = dict(expert_inputs(layer)), dict(expert_inputs(layer, 1))
    assert at_once.keys() == one_by_one.keys() == counts.keys() and len(counts) == 8
    for (stack, expert), inputs in at_once.items():
        other = one_by_one[stack, expert]
        assert inputs.tokens == other.tokens == counts[stack, expert] > 0 and inputs.linears == other.linears
        torch.testing.assert_close(inputs.gram, other.gram)
        if stack.endswith("gate_up_proj"):
            x = torch.cat([rows[(chosen == expert).any(-1)] for rows, chosen in seen])
            assert len(x) == inputs.tokens and len(inputs.linears) == 2
            torch.testing.assert_close(inputs.gram, x.T @ x, rtol=1e-4, atol=1e-4)


def test_a_fold_keeps_the_output_of_the_layer(layer: Layer) -> None:
    """Rows of w3, which multiply what w2 reads, not those of w1, which pass an activation first."""
    before = {name: e.of(layer.module).clone() for name, e in layer.experts.items()}
    want = layer.call(layer.state(0))
    done = fold_experts(layer, lambda inputs, weights: torch.linspace(0.5, 2.0, len(inputs.total)))
    assert done == {name for name in before if ".w1." not in name}
    changed = {n for n, e in layer.experts.items() if not torch.equal(before[n], e.of(layer.module))}
    assert changed == done
    torch.testing.assert_close(layer.call(layer.state(0)), want, rtol=1e-3, atol=1e-3)


def test_experts_with_few_tokens() -> None:
    """Fewer tokens than columns: the sums x xT are then singular."""
    assert too_few_tokens(127, torch.zeros(4, 128)) and not too_few_tokens(128, torch.zeros(4, 128))
