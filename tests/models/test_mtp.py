"""A multi-token-prediction layer makes the drafts of transformers' layer, and does not change outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, LlmcError, SamplingParams
from models.cases import LISTED
from models.kit import save
from models.mtp import case_of, drafted, save_with_layer, save_with_layer_apart
from models.recorded_drafts import record_drafts
from models.recurrent_cases import RECURRENT
from models.test_draft_model import accepted
from models.test_speculation import eager, quiet, requests, results  # noqa: F401
from safetensors.torch import load_file, save_file

from llmc.driver import compile_model
from llmc.frontend.mtp_names import tensors_of
from llmc.options import Options
from llmc.report.inspect import inspect_artifact

LIMITS: dict[str, Any] = {"cache": CACHE, "max_num_seqs": 4, "max_num_batched_tokens": 24}
pytestmark = pytest.mark.slow
NAMES = ("deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.drawn), "qwen3_next", "qwen3_5_text")


def saved(name: str, folder: Path) -> tuple[Any, Any]:
    """Save a random model of a case with a random MTP layer; return both as torch modules."""
    apart = next((c for c in RECURRENT if c.name == name), None)
    return save_with_layer_apart(apart, folder, SEED) if apart else save_with_layer(case_of(name), folder, SEED)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After prompts in chunks, accepted and rejected drafts; the tokens are those without drafts."""
    model, head = saved(name, tmp_path / "model")
    compile_model(tmp_path / "model", tmp_path / "plain.llmc", Options(**LIMITS))
    compile_model(tmp_path / "model", tmp_path / "model.llmc", Options(**LIMITS, draft="mtp"))
    bias = {5: 5.0, 9: 5.5, 200: 5.0}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logit_bias=bias)
    prompts = [{"prompt_token_ids": [7 * i % 311 + 3 for i in range(n)]} for n in (1, 2, 40, 17, 16)]
    with LLM(tmp_path / "plain.llmc", say=quiet, enable_prefix_caching=False) as llm:
        want = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
    seen = record_drafts(monkeypatch)
    with LLM(tmp_path / "model.llmc", say=quiet, speculate="mtp:3", enable_prefix_caching=False) as llm:
        found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
        verified, right = accepted(llm)
    assert found == want
    assert 0 < right < verified and len(seen) > 24
    for known, drafts in Random(SEED).sample(seen, 8):
        assert drafted(model, head, known, len(drafts), bias) == drafts, f"after {len(known)} tokens"


@pytest.mark.usefixtures("eager")
def test_nothing_changes(tmp_path: Path) -> None:
    """Batched, with preemption and the prefix cache, by vLLM's name of the method."""
    save_with_layer(case_of("deepseek_v3"), tmp_path / "model", SEED)
    compile_model(tmp_path / "model", tmp_path / "model.llmc", Options(**LIMITS, draft="mtp"))
    prompts, params = requests()
    with LLM(tmp_path / "model.llmc", say=quiet) as llm:
        want = results(llm, prompts, params)
    page = json.loads((tmp_path / "model.llmc" / "manifest.json").read_text())["kv"]["bytes_per_page"]
    method = {"method": "deepseek_mtp", "num_speculative_tokens": 2}
    with LLM(tmp_path / "model.llmc", say=quiet, speculate=method, kv_cache_memory_bytes=12 * page) as llm:
        for _ in range(2):
            assert results(llm, prompts, params) == want
        assert llm.stats()["num_preemptions"] > 0 and accepted(llm)[0] > 0
        assert llm.engine.scheduler.pool.num_used == 0
    with pytest.raises(LlmcError, match="a multi-token-prediction layer instead") as caught:
        LLM(tmp_path / "model.llmc", say=quiet, speculate="draft")
    assert caught.value.code == "E206"
    data = inspect_artifact(tmp_path / "model.llmc")
    assert data["speculation"] == {"drafts": 4, "methods": ["ngram", "suffix", "mtp"]}


def test_weights_of_the_layer(tmp_path: Path) -> None:
    """Random weights need no tensors of the layer; a model is compiled without its layer, too."""
    save(case_of("glm4_moe"), tmp_path / "bare", SEED)
    compile_model(tmp_path / "bare", tmp_path / "random.llmc", Options(**LIMITS, draft="mtp", weights="random:1"))
    with LLM(tmp_path / "random.llmc", say=quiet, speculate="mtp") as llm:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=8), use_tqdm=False)
    save_with_layer(case_of("glm4_moe", layers=2), tmp_path / "both", SEED)
    compile_model(tmp_path / "both", tmp_path / "without.llmc", Options(**LIMITS))


@pytest.mark.parametrize("declared", ["x", 1e9, -1, 10**9, [1]])
def test_a_number_of_layers_that_is_absurd(declared: object) -> None:
    """The checkpoint declares it in config.json."""
    config = SimpleNamespace(num_mtp_layers=declared, num_hidden_layers=2)
    config.get_text_config = lambda: config
    with pytest.raises(LlmcError, match="num_nextn_predict_layers is") as caught:
        tensors_of(config)
    assert caught.value.code == "E302" and "0 to 64" in caught.value.remedy


def test_refused(tmp_path: Path) -> None:
    """A model without such a layer, a checkpoint that lacks it or a part of it, a part of the model: one error each."""
    save(LISTED[1], tmp_path / "none")
    save(case_of("deepseek_v3"), tmp_path / "bare")
    save_with_layer(case_of("deepseek_v3"), tmp_path / "lacks")
    path = tmp_path / "lacks" / "model.safetensors"
    save_file({n: x for n, x in load_file(path).items() if not n.endswith("eh_proj.weight")}, path, {"format": "pt"})
    save_with_layer(case_of("deepseek_v3"), tmp_path / "more")
    path = tmp_path / "more" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.2.extra.weight": tensors["lm_head.weight"].clone()}, path, {"format": "pt"})
    options = Options(**LIMITS, draft="mtp")
    for name, code, text, chosen in (
        ("none", "E360", "config.json declares no multi-token-prediction layer", options),
        ("bare", "E360", "the checkpoint stores no multi-token-prediction layer", options),
        ("lacks", "E323", "eh_proj.weight", options),
        ("more", "E324", "extra.weight", options),
        ("more", "E360", "the whole model", replace(options, layers=1)),
    ):
        with pytest.raises(LlmcError, match=text) as caught:
            compile_model(tmp_path / name, tmp_path / "wrong.llmc", chosen)
        assert caught.value.code == code and caught.value.remedy and not (tmp_path / "wrong.llmc").exists()
