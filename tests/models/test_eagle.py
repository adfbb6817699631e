"""An EAGLE-3 head makes the drafts of the published algorithm, and does not change outputs."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, LlmcError, SamplingParams
from llmc_runtime.engine.loader import check_generates, speculation_of
from llmc_runtime.exec.entry_points import EntryPoints
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.sched.speculation import Speculation
from models.cases import LISTED
from models.eagle import drafted, save_head, save_speculators, tensors
from models.kit import save
from models.recorded_drafts import record_drafts
from models.test_draft_model import accepted, find
from models.test_greedy_drafts import CASES
from models.test_speculation import DEMO, eager, quiet, requests, results  # noqa: F401

from llmc.driver import compile_model
from llmc.frontend.eagle_config import read_head
from llmc.frontend.eagle_head import EMBEDDING, FC, INPUT_NORM, HeadWeights, head_graph, trace_head
from llmc.ir.types import tensor
from llmc.options import Options
from llmc.report.inspect import inspect_artifact

LIMITS: dict[str, Any] = {"cache": CACHE, "max_num_seqs": 4, "max_num_batched_tokens": 24}
pytestmark = pytest.mark.slow


VARIANTS: dict[str, dict[str, Any]] = {  # of the architecture, as config.json selects them
    "usual": {},
    "before": {"norm_before_residual": True},
    "joint": {"norm_before_residual": True, "eagle_config": {"norm_before_fc": True}, "norm_output": True},
    "each": {"fc_norm": True},
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("variant", "ranks"),
    [("usual", 1), pytest.param("before", 1, marks=pytest.mark.drawn), ("before", 2), ("joint", 1), ("each", 1)],
)
def test_drafts_are_those_of_the_published_algorithm(
    variant: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prompts in chunks, accepted and rejected drafts, in ranks; the head has a bias or all the model's ids."""
    config, before = VARIANTS[variant], variant in ("before", "joint")
    model, w = save(LISTED[1], tmp_path / "model", SEED), tensors(200 if before else 320, seed=SEED)
    if variant == "before":
        w["fc.bias"] = w["norm.weight"] - 0.5
    if variant == "joint":
        w["input_norm.weight"] = torch.rand(3 * 64) + 0.5
    if variant == "each":
        w |= {f"fc_norm.{i}.weight": torch.rand(64) + 0.5 for i in range(3)}
    (save_speculators if variant == "joint" else save_head)(tmp_path / "head", w, **config)
    draft = f"eagle:{tmp_path / 'head'}"
    options = Options(**LIMITS, draft=draft, tensor_parallel_size=ranks)
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    seen = record_drafts(monkeypatch, chances := [])
    likely = [i for i in range(5, 320) if "t2d" not in w or w["t2d"][i]]  # ids that the head can draft
    bias = {likely[0]: 5.0, likely[4]: 5.5, 200: 5.0}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logit_bias=bias)
    prompts = [{"prompt_token_ids": [7 * i % 311 + 3 for i in range(n)]} for n in (1, 2, 40, 17, 16)]
    with LLM(tmp_path / "model.llmc", say=quiet, speculate="eagle:3", enable_prefix_caching=False) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        verified, right = accepted(llm)
    assert 0 < right < verified and len(seen) > 24
    for (known, drafts), given in Random(SEED).sample([*zip(seen, chances, strict=True)], 8):
        want, probabilities = drafted(model, w, known, len(drafts), bias, before, bool(config.get("norm_output")))
        assert want == drafts, f"after {len(known)} tokens"
        assert given == ([] if ranks > 1 else pytest.approx(probabilities, rel=1e-3)), f"after {len(known)} tokens"


@pytest.mark.usefixtures("eager")
def test_nothing_changes(tmp_path: Path) -> None:
    """Batched, with preemption, prefix cache and chunks of prompts; also with prompt lookup instead."""
    save(find("qwen3"), tmp_path / "model", SEED)
    save_head(tmp_path / "head", tensors(200, seed=SEED))
    compile_model(tmp_path / "model", tmp_path / "plain.llmc", Options(**LIMITS))
    compile_model(tmp_path / "model", tmp_path / "both.llmc", Options(**LIMITS, draft=f"eagle:{tmp_path / 'head'}"))
    prompts, params = requests()
    with LLM(tmp_path / "plain.llmc", say=quiet) as llm:
        want = results(llm, prompts, params)
    page = json.loads((tmp_path / "both.llmc" / "manifest.json").read_text())["kv"]["bytes_per_page"]
    three = {"method": "eagle3", "model": "any", "num_speculative_tokens": 3}
    for options in ({}, {"speculate": "eagle"}, {"speculate": three}, {"speculate": "ngram"}):
        with LLM(tmp_path / "both.llmc", say=quiet, **options) as llm:
            assert results(llm, prompts, params) == want, options
            assert (accepted(llm)[0] > 0) == bool(options)
            assert results(llm, prompts, params) == want, "with pages of the prefix cache"
    with LLM(tmp_path / "both.llmc", say=quiet, speculate="eagle", kv_cache_memory_bytes=12 * page) as llm:
        assert results(llm, prompts[::-1], params[::-1]) == want[::-1], "in another company, with preemption"
        assert llm.stats()["num_preemptions"] > 0 and accepted(llm)[0] > 0
        assert llm.engine.scheduler.pool.num_used == 0
    with pytest.raises(LlmcError, match="an EAGLE-3 head instead") as caught:
        LLM(tmp_path / "both.llmc", say=quiet, speculate="draft")
    assert caught.value.code == "E206" and "--draft MODEL" in caught.value.remedy


def test_steps_that_skip_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They store zeros, whatever the pages held before, and drafting goes on after them; tokens stay the same."""
    save(find("llama"), tmp_path / "model", SEED)
    save_head(tmp_path / "head", tensors(200, seed=SEED))
    compile_model(tmp_path / "model", tmp_path / "model.llmc", Options(**LIMITS, draft=f"eagle:{tmp_path / 'head'}"))
    rng = Random(SEED)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 320) for _ in range(rng.randrange(1, 40))]} for _ in range(3)]
    params = [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logit_bias={5: 5.0, 9: 5.5})] * 3
    with LLM(tmp_path / "model.llmc", say=quiet) as llm:
        want = results(llm, prompts, params)
    drafting = [True, False, *(rng.random() < 0.5 for _ in range(8))]  # of eight plans each, again and again
    wants = property(lambda self: drafting[self.plans // 8 % 10])
    monkeypatch.setattr(Speculation, "wants", wants)
    monkeypatch.setattr(Speculation, "choose", lambda self, request, room: room if self.wants else 0)
    monkeypatch.setattr(
        Speculation, "plain", lambda self, work, requests: not any(item.propose or item.drafts for item in work)
    )
    programs: list[str] = []
    ready = EntryPoints.ready

    def recorded(self: EntryPoints, columns: Any, *kind: bool) -> Any:
        bound = ready(self, columns, *kind)
        programs.append(bound.program.name)
        return bound

    monkeypatch.setattr(EntryPoints, "ready", recorded)
    with LLM(tmp_path / "model.llmc", say=quiet, speculate="eagle:2", enable_prefix_caching=False) as llm:
        states = llm.engine.executor._layout.states
        for name in ("draft.kv.hidden", "draft.kv.0"):
            states[name].host[:] = 0xFF  # NaN in every float type
        assert results(llm, prompts, params) == want
        assert [results(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)] == want
        drafted, right = accepted(llm)
        hidden = states["draft.kv.hidden"].host.view(np.float32).reshape(-1, 64)
    written = hidden[~np.isnan(hidden).any(axis=1)]
    zeros = int((written == 0).all(axis=1).sum())
    print(f"seed {SEED}: {drafted} drafts, {right} accepted, {zeros} of {len(written)} hidden states are zeros")
    assert {"decode_plain", "step_plain", "verify", "draft_first", "draft_next"} <= set(programs)
    assert 0 < drafted and 0 < zeros < len(written)


@pytest.mark.drawn(seconds=20)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "name", ("gemma2", "gpt_oss", "falcon-alibi", "deepseek_v3", "qwen3_next", "lfm2", "falcon_h1")
)
def test_models_of_other_kinds(name: str, tmp_path: Path) -> None:
    """Windows, sinks, biases by distance, latent attention, recurrent layers: nothing changes, with the cache, too."""
    last = save(CASES[name], tmp_path / "model", SEED).config.get_text_config().num_hidden_layers - 1
    save_head(tmp_path / "head", tensors(200, seed=SEED), eagle_aux_hidden_state_layer_ids=[0, min(1, last), last])
    options = Options(**LIMITS, draft=f"eagle:{tmp_path / 'head'}")
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    prompts, params = requests(10)
    with LLM(tmp_path / "model.llmc", say=quiet) as llm:
        want = results(llm, prompts, params)
    with LLM(tmp_path / "model.llmc", say=quiet, speculate="eagle") as llm:
        assert [results(llm, prompts, params) for _ in range(2)] == [want, want]
        assert accepted(llm)[0] > 0 and llm.engine.scheduler.pool.num_used == 0


def test_both_formats(tmp_path: Path) -> None:
    """The same weights by either format's names; which layers are read, by each of the keys."""
    found = tensors(200)
    save_head(tmp_path / "head", found)
    save_speculators(tmp_path / "speculators", found, norm_before_residual=True)
    heads = [read_head(tmp_path / name) for name in ("head", "speculators")]
    assert [h.norm_before_residual for h in heads] == [False, True] and heads[0].aux == heads[1].aux == (0, 1, 1)
    weights = [HeadWeights(h, 64, 320) for h in heads]
    assert weights[0]._stored.keys() == weights[1]._stored.keys() == found.keys()
    assert (weights[0]._buffers["vocabulary"] == weights[1]._buffers["vocabulary"]).all()
    index = weights[0]._buffers["vocabulary"]
    ids = found["d2t"].numpy() + np.arange(200)
    assert (index[ids] == np.arange(200)).all() and (index == 200).sum() == 120
    for w in weights:
        w.close()
    assert heads[0].aux_layers(2) == (0, 1, 1)
    key = "eagle_aux_hidden_state_layer_ids"
    nested: dict[str, Any] = {key: None, "eagle_config": {key: [1, 9, 20]}}
    save_head(tmp_path / "nested", found, **nested)
    assert read_head(tmp_path / "nested").aux_layers(24) == (2, 10, 21)
    save_head(tmp_path / "usual", found, eagle_aux_hidden_state_layer_ids=None)
    assert read_head(tmp_path / "usual").aux_layers(32) == (2, 16, 29)


def fitted(folder: Path, hidden: int = 64, vocab: int = 320) -> None:
    """Check a head against a model of two layers of these sizes, as a compile does."""
    head = read_head(folder)
    head.aux_layers(2)
    weights = HeadWeights(head, hidden, vocab)
    graph = head_graph(trace_head(head, "f32", vocab, 256, 24, 4), vocab)
    types = {v.name: v.type for v in graph.inputs if v.weight and v.name != EMBEDDING}
    if head.norm_before_fc:
        types[INPUT_NORM] = tensor("f32", 3 * hidden)
    weights.serve(types | {FC: tensor("f32", 64, 3 * hidden)}, {"rotary_emb.inv_freq": np.ones(8)})
    weights.close()


def test_refused(tmp_path: Path) -> None:
    """A head of another hidden size, vocabulary or architecture, a model, missing tensors: one error each."""
    found = tensors(200)
    save(LISTED[1], tmp_path / "model")
    save_head(tmp_path / "good", found)
    save_head(tmp_path / "hidden", tensors(200, hidden=32))
    save_head(tmp_path / "vocabulary", found | {"t2d": found["t2d"][:300]})
    save_head(tmp_path / "deep", found, num_hidden_layers=2)
    save_head(tmp_path / "layers", found, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    save_head(tmp_path / "lacking", {n: x for n, x in found.items() if "gate" not in n})
    save_head(tmp_path / "more", found | {"midlayer.self_attn.q_norm.weight": found["norm.weight"].clone()})
    save_head(tmp_path / "map", found | {"d2t": found["d2t"] * 0 + 200})
    save_head(tmp_path / "wide", found, intermediate_size=128)
    one_nan = found["fc.weight"].clone()
    one_nan[3, 5] = torch.nan
    save_head(tmp_path / "nan", found | {"fc.weight": one_nan})
    save_head(tmp_path / "narrow", found | {"fc.weight": found["fc.weight"].to(torch.float8_e4m3fn)})
    save_head(tmp_path / "fraction", found | {"d2t": found["d2t"].float()})
    save_head(tmp_path / "two", found | {"d2t": found["d2t"][None].clone()})
    save_head(tmp_path / "flat", found | {"fc.weight": found["fc.weight"].flatten()})
    save_head(tmp_path / "twice", found | {"layers.0.hidden_norm.weight": found["norm.weight"] * 2})
    save_head(tmp_path / "positions", found, max_position_embeddings="many")
    save_head(tmp_path / "groups", found, num_key_value_heads=0)
    save_head(tmp_path / "flag", found, norm_before_residual="yes")
    save_head(tmp_path / "norms", found, norm_before_fc=True, fc_norm=True)
    save_head(tmp_path / "unnormed", found, norm_before_fc=True)
    save_head(tmp_path / "single", found, eagle_config={"use_aux_hidden_state": False})
    fitted(tmp_path / "good")
    tables = {f"{at}rotary_emb.inv_freq": torch.ones(8) for at in ("", "midlayer.self_attn.")}
    save_head(tmp_path / "tables", found | tables)
    fitted(tmp_path / "tables")
    for name, text in (
        ("hidden", r"reads three hidden states by fc.weight \[64, 96\], the model needs \[64, 192\]"),
        ("vocabulary", "vocabulary of 300 tokens, the model one of 320"),
        ("deep", "2 layers of llama; one layer"),
        ("layers", r"layers \[1, 2, 3\]; 2 layers are compiled"),
        ("lacking", "no tensor midlayer.mlp.gate_proj.weight"),
        ("more", "q_norm.weight"),
        ("map", "ids in d2t that are repeated, or not of the 320 ids of the model"),
        ("nan", "1 number of fc.weight is NaN or infinite"),
        ("narrow", "stores fc.weight as f8e4m3; f16, bf16, f32, f64 are supported"),
        ("fraction", r"stores d2t as f32 \[200\]; 200 ids are needed"),
        ("two", r"stores d2t as i64 \[1, 200\]; 200 ids are needed"),
        ("flat", r"by fc.weight \[12288\], the model needs \[64, 192\]"),
        ("twice", "both below midlayer and below layers.0"),
        ("positions", "max_position_embeddings is 'many'"),
        ("groups", "num_key_value_heads is 0"),
        ("flag", "norm_before_residual is 'yes'"),
        ("norms", "both norm_before_fc and fc_norm"),
        ("unnormed", "no tensor input_norm.weight"),
        ("single", "reads one hidden state"),
        ("wide", r"mlp.gate_proj.weight is \[96, 64\], by config.json \[128, 64\]"),
        ("model", "no draft_vocab_size"),
    ):
        with pytest.raises(LlmcError, match=text) as caught:
            fitted(tmp_path / name)
        assert caught.value.code == "E360" and caught.value.remedy
    with pytest.raises(LlmcError, match="vocabulary of 320 tokens, the model one of 300"):
        fitted(tmp_path / "good", vocab=300)
    with pytest.raises(LlmcError, match="reads three hidden states") as caught:
        compile_model(tmp_path / "model", tmp_path / "wrong.llmc", Options(draft=f"eagle:{tmp_path / 'hidden'}"))
    assert caught.value.code == "E360" and not (tmp_path / "wrong.llmc").exists()
    with pytest.raises(LlmcError, match="good is an EAGLE-3 head, not a model") as caught:
        compile_model(tmp_path / "model", tmp_path / "wrong.llmc", Options(draft=str(tmp_path / "good")))
    assert caught.value.code == "E360" and f"--draft eagle:{tmp_path / 'good'}" in caught.value.remedy
    save_speculators(tmp_path / "speculators", found)
    with pytest.raises(LlmcError, match="speculators is an EAGLE-3 head, not a model") as caught:
        compile_model(tmp_path / "model", tmp_path / "wrong.llmc", Options(draft=str(tmp_path / "speculators")))
    for name in ("good", "speculators"):
        with pytest.raises(LlmcError, match=f"{name} is an EAGLE-3 head, not a model") as caught:
            compile_model(tmp_path / name, tmp_path / "wrong.llmc", Options())
        assert caught.value.code == "E303" and f"--draft eagle:{tmp_path / name}" in caught.value.remedy
    save_head(tmp_path / "pickled", found)
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(LlmcError, match="pickled weights only") as caught:
        compile_model(tmp_path / "model", tmp_path / "wrong.llmc", Options(draft=f"eagle:{tmp_path / 'pickled'}"))
    assert caught.value.code == "E320" and "torch.load('pytorch_model.bin', weights_only=True)" in caught.value.remedy


def test_another_method_than_the_artifacts() -> None:
    """The error names what the artifact has, and what to do; also for one that was compiled without --speculate."""
    for method, rows, available, text in (
        ("eagle3", 4, "draft_model", "needs an EAGLE-3 head, and the artifact has a draft model instead"),
        ("draft_model", 4, "eagle3", "needs a draft model, and the artifact has an EAGLE-3 head instead"),
        ("mtp", 4, "eagle3", "needs a multi-token-prediction layer, and the artifact has an EAGLE-3 head instead"),
        ("eagle3", 4, "mtp", "needs an EAGLE-3 head, and the artifact has a multi-token-prediction layer instead"),
        ("eagle3", 0, "", "the artifact has none"),
    ):
        with pytest.raises(LlmcError, match=text) as caught:
            speculation_of({"method": method, "num_speculative_tokens": 2}, 4, rows, available)
        assert caught.value.code == "E206"
    for method, flag in (("eagle3", "--draft eagle:PATH "), ("mtp", "--draft mtp "), ("ngram", "")):
        with pytest.raises(LlmcError, match="compiled without --speculate") as caught:
            speculation_of({"method": method, "num_speculative_tokens": 2}, 0)
        assert caught.value.code == "E204" and f"with {flag}--speculate 2" in caught.value.remedy
    with pytest.raises(LlmcError, match="generates nothing") as caught:
        check_generates({"method": "ngram", "num_speculative_tokens": 2}, Pooling("embed", "last", 8))
    assert caught.value.code == "E204" and "compile" not in caught.value.remedy


@pytest.mark.usefixtures("eager")
def test_random_weights(tmp_path: Path) -> None:
    """A head whose weights are not read drafts, all tokens with the same logit."""
    save(LISTED[1], tmp_path / "model")
    save_head(tmp_path / "head", tensors(200))
    (tmp_path / "head" / "model.safetensors").unlink()
    options = Options(**LIMITS, draft=f"eagle:{tmp_path / 'head'}", weights="random:1")
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    bias = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias={5: 50.0})
    with LLM(tmp_path / "model.llmc", say=quiet, speculate="eagle") as llm:
        (out,) = llm.generate([{"prompt_token_ids": [7, 8, 9]}], bias, use_tqdm=False)
        assert set(out.outputs[0].token_ids) == {5} and accepted(llm)[1] > 0


@pytest.mark.usefixtures("eager")
def test_the_head_of_the_demonstration_model(tmp_path: Path) -> None:
    """Greedy and sampled answers and several outputs are the same; a share of the drafts is accepted."""
    path = tmp_path / "demo.llmc"
    compile_model(DEMO, path, Options(cache=CACHE, draft=f"eagle:{DEMO.parent / 'demo-model-head'}"))
    params = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=40, n=3, seed=3, logprobs=1),
        SamplingParams(temperature=1.0, top_p=0.9, max_tokens=50, seed=4, stop=[" the"]),
    ]
    found = []
    for speculate in (None, "eagle", "eagle:2"):
        with LLM(path, say=quiet, speculate=speculate) as llm:
            outs = llm.chat([[{"role": "user", "content": "What is a river?"}]] * len(params), params, use_tqdm=False)
            found.append([(o.text, list(o.token_ids), o.finish_reason) for r in outs for o in r.outputs])
            drafts, right = accepted(llm)
            assert (right > 0.05 * drafts) if speculate else not drafts
            assert llm.engine.scheduler.pool.num_used == 0
    assert found[0] == found[1] == found[2]
    data = inspect_artifact(path)
    assert data["speculation"] == {"drafts": 4, "methods": ["ngram", "suffix", "eagle"]}
    assert data["compile"]["options"]["draft"] == "eagle:demo-model-head"
