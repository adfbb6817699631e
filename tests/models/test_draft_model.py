"""A draft model changes only the number of tokens per step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, LlmcError, SamplingParams
from llmc_runtime.server.openai.generation_response import Usage
from models.cases import FURTHER, LISTED, Case
from models.kit import save
from models.test_speculation import DEMO, NAMES, SMALL_DEMO, eager, quiet, requests, results  # noqa: F401
from safetensors.torch import load_file, save_file

from llmc.diagnostics import Diagnostic
from llmc.driver import compile_model
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.options import Options

LIMITS: dict[str, Any] = {"cache": CACHE, "max_num_seqs": 4, "max_num_batched_tokens": 24}
pytestmark = pytest.mark.slow


def find(name: str) -> Case:
    return next(c for c in (*LISTED, *FURTHER) if c.name == name)


def other(case: Case, **config: Any) -> Case:
    """The same architecture with other sizes."""
    return replace(case, config={**case.config, **config})


def accepted(llm: LLM) -> tuple[int, int]:
    """The numbers of drafts that were verified, and accepted."""
    stats = llm.stats()
    return int(stats["spec_decode_num_draft_tokens"]), int(stats["spec_decode_num_accepted_tokens"])  # type: ignore[call-overload]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", NAMES)
def test_nothing_changes(name: str, tmp_path: Path) -> None:
    """Batched, with preemption, prefix cache and chunks of prompts; also with prompt lookup instead."""
    case = find(name)
    save(case, tmp_path / "model", SEED)
    save(LISTED[0], tmp_path / "draft", SEED + 1)
    compile_model(tmp_path / "model", tmp_path / "plain.llmc", Options(**LIMITS))
    compile_model(tmp_path / "model", tmp_path / "both.llmc", Options(**LIMITS, draft=str(tmp_path / "draft")))
    prompts, params = requests()
    with LLM(tmp_path / "plain.llmc", say=quiet) as llm:
        want = results(llm, prompts, params)
    page = json.loads((tmp_path / "both.llmc" / "manifest.json").read_text())["kv"]["bytes_per_page"]
    for options in ({}, {"speculate": "draft"}, {"speculate": "draft:2"}, {"speculate": "ngram"}):
        with LLM(tmp_path / "both.llmc", say=quiet, **options) as llm:
            assert results(llm, prompts, params) == want, options
            assert (accepted(llm)[0] > 0) == bool(options)
            assert results(llm, prompts, params) == want, "with pages of the prefix cache"
    with LLM(tmp_path / "both.llmc", say=quiet, speculate="draft", kv_cache_memory_bytes=12 * page) as llm:
        assert results(llm, prompts[::-1], params[::-1]) == want[::-1], "in another company, with preemption"
        assert llm.stats()["num_preemptions"] > 0 and accepted(llm)[0] > 0


@pytest.mark.usefixtures("eager")
def test_equal_weights(tmp_path: Path) -> None:
    """A draft model with the model's weights samples the same tokens, so that every draft is accepted."""
    save(find("qwen3"), tmp_path / "model", SEED)
    compile_model(tmp_path / "model", tmp_path / "twice.llmc", Options(**LIMITS, draft=str(tmp_path / "model")))
    prompts, params = requests()
    plain = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "ignore_eos": True}
    params = [replace(one, **plain, stop_token_ids=(), min_tokens=0) for one in params]
    with LLM(tmp_path / "twice.llmc", say=quiet, speculate="draft") as llm:
        outs = [*llm.generate(prompts, params, use_tqdm=False), *llm.generate(prompts, params, use_tqdm=False)]
        drafts, right = accepted(llm)
        assert drafts == right > 500, "also with pages of the prefix cache"
        assert sum(out.num_accepted_tokens for out in outs) == right
        usage = Usage(0)
        usage.take(0, outs[0])
        usage.take(1, outs[1])
        details = usage.as_json()["completion_tokens_details"]
        assert details == {"accepted_prediction_tokens": outs[0].num_accepted_tokens + outs[1].num_accepted_tokens}
        assert llm.stats()["num_steps"] < sum(p.max_tokens or 0 for p in params)


@pytest.fixture(scope="module")
def siblings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration model with its sibling as a draft model."""
    path = tmp_path_factory.mktemp("siblings") / "demo.llmc"
    compile_model(DEMO, path, Options(cache=CACHE, draft=str(SMALL_DEMO)))
    return path


@pytest.mark.usefixtures("eager")
def test_the_sibling_of_the_demonstration_model(siblings: Path) -> None:
    """Greedy and sampled texts, several outputs, stop strings, log-probabilities, structured outputs next to them."""
    from llmc_runtime import StructuredOutputsParams

    guide = StructuredOutputsParams(regex="(one|two|three) [0-9]{3}")
    cases = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.8, max_tokens=40, n=3, seed=3, logprobs=1),
        SamplingParams(temperature=1.0, top_p=0.9, max_tokens=50, seed=4, stop=[" the"]),
        SamplingParams(temperature=0, max_tokens=30, structured_outputs=guide),
        SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=1),
    ]
    found = []
    for speculate in (None, "draft", {"method": "draft_model", "model": "any", "num_speculative_tokens": 3}):
        with LLM(siblings, say=quiet, speculate=speculate) as llm:
            outs = llm.generate(["When the morning came, the old man"] * len(cases), cases, use_tqdm=False)
            found.append([(o.text, list(o.token_ids), o.finish_reason) for r in outs for o in r.outputs])
            drafts, right = accepted(llm)
            assert (0 < right < drafts) == bool(speculate)
    assert found[0] == found[1] == found[2]


def test_fewer_steps_with_the_cost_model(siblings: Path) -> None:
    """The cost model drafts, or not, and the output stays the same; nothing is left over."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with LLM(siblings, say=quiet) as plain, LLM(siblings, say=quiet, speculate="draft") as drafts:
        texts = [
            llm.generate("The history of the city", params, use_tqdm=False)[0].outputs[0].text
            for llm in (plain, drafts)
        ]
        assert texts[0] == texts[1] and accepted(drafts)[0] > 0
        assert drafts.engine.scheduler.pool.num_used == 0


def test_reports(siblings: Path) -> None:
    """`llmc inspect` shows the methods and the number of drafts; the reports take the model's own programs."""
    from llmc.report.inspect import inspect_artifact, render

    found = inspect_artifact(siblings)
    assert found["speculation"] == {"drafts": 4, "methods": ["ngram", "suffix", "draft"]}
    assert found["compile"]["options"]["draft"] == SMALL_DEMO.name
    assert "up to 4 per sequence, by ngram or suffix or draft" in render(found)


def test_refused(tmp_path: Path) -> None:
    """Another vocabulary or tokenizer, a shorter context, weights that are packed later, too many drafts: one error."""
    case = LISTED[0]
    save(case, tmp_path / "model")
    save(other(case, vocab_size=300), tmp_path / "vocabulary")
    save(other(case, max_position_embeddings=128), tmp_path / "context")
    for more, text in (
        ({"draft": str(tmp_path / "vocabulary")}, "vocabulary of 300"),
        ({"draft": str(tmp_path / "context")}, "allows 128 positions; 256 are compiled"),
        ({"draft": str(tmp_path / "model"), "weights": "none"}, "packed later"),
    ):
        with pytest.raises(LlmcError, match=text) as caught:
            compile_model(tmp_path / "model", tmp_path / "wrong.llmc", Options(cache=CACHE, **more))
        assert caught.value.code == "E360" and caught.value.remedy
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "manifest.json").write_text("{}")
    for draft, text in (
        ("", "--draft names no model"),
        (" ", "--draft names no model"),
        ("suffix", "the method suffix needs no draft model"),
        ("ngram:3", "the method ngram needs no draft model"),
        ("eagle:", "does not name what drafts"),
        ("eagle3:folder", "does not name what drafts"),
        ("draft:folder", "does not name what drafts"),
        ("mtp:2", "does not name what drafts"),
        ("eagle: ", "does not name what drafts"),
        ("medusa", "the method medusa is not supported: heads that draft several tokens at once"),
        (str(tmp_path / "artifact"), "is an artifact"),
    ):
        with pytest.raises(LlmcError, match=text) as caught:
            compile_model(tmp_path / "model", tmp_path / "wrong.llmc", Options(cache=CACHE, draft=draft))
        assert caught.value.code == "E360" and caught.value.remedy
    save(case, tmp_path / "lacks")
    weights = tmp_path / "lacks" / "model.safetensors"
    save_file({n: x for n, x in load_file(weights).items() if "gate_proj" not in n}, weights, {"format": "pt"})
    with pytest.raises(LlmcError, match=r"draft model: .* lacks tensors") as caught:
        compile_model(tmp_path / "model", tmp_path / "wrong.llmc", Options(cache=CACHE, draft=str(weights.parent)))
    assert caught.value.code == "E323"
    with pytest.raises(LlmcError, match="--speculate 33"):
        wrong = Options(cache=CACHE, draft=str(tmp_path / "model"), speculate=33)
        compile_model(tmp_path / "model", tmp_path / "wrong.llmc", wrong)
    for prefix, subject in (("", "draft model"), ("eagle:", "head")):
        wrong = Options(cache=CACHE, draft=f"{prefix}{tmp_path / 'none'}")
        with pytest.raises(LlmcError, match=f"{subject}: .*does not exist") as caught:
            compile_model(tmp_path / "model", tmp_path / "wrong.llmc", wrong)
    assert not (tmp_path / "wrong.llmc").exists()


def test_numbers_of_the_draft_model_that_are_not_finite(tmp_path: Path) -> None:
    """They are noted, as those of the model are."""
    for name in ("model", "draft"):
        save(LISTED[0], tmp_path / name)
    weights = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, weights, {"format": "pt"})
    options = Options(cache=CACHE, draft=str(weights.parent), max_num_seqs=4, max_num_batched_tokens=24)
    summary = compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    assert any("draft: 1 number of model.norm.weight is NaN" in note for note in summary.notes), summary.notes


def test_errors_of_a_draft_model_keep_their_place() -> None:
    text = "graph @main(%x: f32[2]) {\n  %y = add(%x, %x) : f32[2]  // layers.3\n  return %y\n}\n"
    (node,) = parse(text, OPS).graphs["main"].nodes
    error = Diagnostic("E431", "no kernel", "use another dtype", node=node).about("draft model")
    assert (error.code, error.node, error.loc) == ("E431", node, "layers.3")
    assert (error.cause, error.remedy) == ("draft model: add at layers.3: no kernel", "use another dtype")


def test_another_tokenizer(tmp_path: Path) -> None:
    """Of two models with equally many tokens, the first token that differs is named."""
    import shutil

    shutil.copytree(SMALL_DEMO, tmp_path / "draft")
    path = tmp_path / "draft" / "tokenizer.json"
    document = json.loads(path.read_text())
    vocab = document["model"]["vocab"]
    a, b = [token for token, i in sorted(vocab.items(), key=lambda x: x[1])][-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    path.write_text(json.dumps(document))
    with pytest.raises(LlmcError, match="another tokenizer") as caught:
        compile_model(DEMO, tmp_path / "wrong.llmc", Options(cache=CACHE, draft=str(tmp_path / "draft")))
    assert caught.value.code == "E360" and repr(a) in caught.value.cause
