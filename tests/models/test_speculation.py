"""Speculative decoding changes only the number of tokens per step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact import tiny
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, LlmcError, SamplingParams
from llmc_runtime.metrics import Counters
from llmc_runtime.sched.draft_costs import Choice, DraftCount
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation import PROBE_PERIOD, Speculation
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.sched.step import StepOutput, Work
from models.cases import FURTHER, LISTED
from models.kit import save

from llmc.artifact.write import write_artifact
from llmc.driver import compile_model
from llmc.options import Options
from tests.runtime.deferred_device import defer

NAMES = ("qwen3", *(pytest.param(name, marks=pytest.mark.drawn) for name in ("llama", "gemma2", "gpt2")))
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
SMALL_DEMO = DEMO.parent / "demo-model-small"


def compiled(name: str, folder: Path) -> Path:
    """A model of random weights in float32 that verifies up to 4 drafts; 4 rows, 24 tokens a step."""
    case = next(c for c in (*LISTED, *FURTHER) if c.name == name)
    save(case, folder / "model", SEED)
    options = Options(cache=CACHE, reuse=False, max_num_seqs=4, max_num_batched_tokens=24, speculate=4)
    compile_model(folder / "model", folder / "model.llmc", options)
    return folder / "model.llmc"


@pytest.fixture(params=NAMES)
def artifact(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return compiled(request.param, tmp_path)


def requests(count: int = 16) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Prompts of repeated ids, so that drafts are found; every kind of sampling, and biases that make ids likely."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    prompts, params = [], []
    for i in range(count):
        words = rng.integers(3, 320, int(rng.integers(1, 6))).tolist()
        prompts.append({"prompt_token_ids": (words * 30)[: int(rng.integers(2, 60))]})
        kind: dict[str, Any] = {
            "temperature": float(rng.choice([0.0, 0.0, 0.7, 1.3])),
            "top_k": int(rng.choice([0, 8])),
            "top_p": float(rng.choice([1.0, 0.85])),
            "min_p": float(rng.choice([0.0, 0.02])),
            "repetition_penalty": float(rng.choice([1.0, 1.0, 1.3])),
            "frequency_penalty": float(rng.choice([0.0, 0.4])),
            "presence_penalty": float(rng.choice([0.0, 0.3])),
            "min_tokens": int(rng.choice([0, 5])),
            "max_tokens": int(rng.integers(6, 60)),
            "logprobs": rng.choice([None, 2]),
            "stop_token_ids": rng.integers(3, 320, 4).tolist(),
            "bad_words": None,
            "seed": i,
        }
        if rng.random() < 0.5:
            kind["logit_bias"] = {words[0]: 12.0, 5: 11.0}
        if rng.random() < 0.2:
            kind["allowed_token_ids"] = [*words, 5, 6, 7]
        params.append(SamplingParams(**kind))
    return prompts, params


def results(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    """Tokens, reasons and log-probabilities of every output."""
    out = []
    for request in llm.generate(prompts, params, use_tqdm=False):
        for one in request.outputs:
            rows = [[(t, round(x.logprob, 3)) for t, x in row.items()] for row in one.logprobs or ()]
            out.append((list(one.token_ids), one.finish_reason, one.stop_reason, rows))
    return out


def quiet(text: str) -> None:
    return


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as possible are drafted and verified, whether it pays or not."""
    monkeypatch.setattr(Speculation, "choose", lambda self, request, room: room)
    monkeypatch.setattr(Speculation, "wants", True)


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_nothing_changes(artifact: Path) -> None:
    """Batched, with preemption and the prefix cache: drafts depend on other requests, tokens do not."""
    prompts, params = requests()
    plain = LLM(artifact, say=quiet)
    want = results(plain, prompts, params)
    plain.close()
    roomy = LLM(artifact, say=quiet, speculate=NGRAM)
    assert results(roomy, prompts, params) == want
    stats = roomy.stats()
    drafts, accepted = (stats[f"spec_decode_num_{name}_tokens"] for name in ("draft", "accepted"))
    assert 0 < accepted < drafts and sum(stats["spec_decode_num_accepted_tokens_per_pos"].values()) == accepted
    roomy.close()
    page = json.loads((artifact / "manifest.json").read_text())["kv"]["bytes_per_page"]
    tight = LLM(artifact, say=quiet, speculate=NGRAM, kv_cache_memory_bytes=9 * page)
    assert results(tight, prompts[::-1], params[::-1]) == want[::-1], "in another company, with preemption"
    assert tight.stats()["num_preemptions"] > 0 and tight.stats()["spec_decode_num_accepted_tokens"] > 0
    tight.close()


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("method", ["suffix:4", "suffix:1"])
def test_drafts_of_the_host_change_nothing(demo: Path, method: str) -> None:
    """Prompts that repeat themselves and each other, greedy and sampled, one by one and batched."""
    prompts, params = requests(12)
    plain = LLM(demo, say=quiet)
    want = results(plain, prompts, params)
    plain.close()
    drafting = LLM(demo, say=quiet, speculate=method)
    assert results(drafting, prompts, params) == want
    assert results(drafting, prompts[::-1], params[::-1]) == want[::-1], "with what was learnt before"
    alone = [results(drafting, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
    assert alone == want
    assert drafting.stats()["spec_decode_num_accepted_tokens"] > 0
    drafting.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small demonstration model, which verifies up to 4 drafts; test_grammars.py has the same kernels."""
    path = tmp_path_factory.mktemp("demo") / "demo.llmc"
    limits: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 32, "speculate": 4}
    compile_model(SMALL_DEMO, path, Options(cache=CACHE, reuse=False, dtype="float32", **limits))
    return path


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("method", [None, "ngram:4", pytest.param("suffix:4", marks=pytest.mark.slow)])
def test_overlapping_steps_change_nothing(demo: Path, method: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled, with preemption: a step is launched before the one before it has run."""
    prompts, params = requests(8)
    for prompt in prompts[:3]:  # requests that begin with a page each, and need 15 together
        prompt["prompt_token_ids"] = prompt["prompt_token_ids"][:8]
    params[:3] = [replace(p, min_tokens=72, max_tokens=72) for p in params[:3]]
    with LLM(demo, say=quiet, threads=1) as plain:
        want = results(plain, prompts, params)
    defer(monkeypatch)
    page = json.loads((demo / "manifest.json").read_text())["kv"]["bytes_per_page"]
    with LLM(demo, say=quiet, speculate=method, kv_cache_memory_bytes=12 * page) as llm:
        assert results(llm, prompts, params) == want
        stats = llm.stats()
        assert llm.engine.executor.device.most_in_flight == 2 or method == "suffix:4"
        assert stats["num_preemptions"] > 0 and (method is None or stats["spec_decode_num_draft_tokens"] > 0)


@pytest.fixture
def pair(demo: Path) -> Iterator[tuple[LLM, LLM]]:
    """The model without and with speculation."""
    llms = LLM(demo, say=quiet), LLM(demo, say=quiet, speculate="ngram:4")
    yield llms
    for llm in llms:
        llm.close()


REPEAT = "one two three four one two three four one two three four one two"


@pytest.mark.usefixtures("eager")
def test_stop_strings_and_several_outputs(pair: tuple[LLM, LLM]) -> None:
    """A stop string is found inside an accepted run, and the text ends there."""
    text = pair[0].generate(REPEAT, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), use_tqdm=False)
    stop = text[0].outputs[0].text[-9:-5]
    cases = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=[stop]),
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=[stop], include_stop_str_in_output=True),
        SamplingParams(temperature=0, max_tokens=7),
        SamplingParams(temperature=0.8, max_tokens=40, n=3, seed=3, logprobs=1),
        SamplingParams(temperature=0, max_tokens=40, bad_words=["three"]),
    ]
    found = []
    for llm in pair:
        outs = llm.generate([REPEAT] * len(cases), cases, use_tqdm=False)
        found.append([(o.text, list(o.token_ids), o.finish_reason, o.stop_reason) for r in outs for o in r.outputs])
    assert found[0] == found[1]
    assert found[1][1][2:] == found[1][2][2:] == ("stop", stop)
    assert stop not in found[1][1][0] and found[1][2][0].endswith(stop)
    assert pair[1].stats()["spec_decode_num_accepted_tokens"] > 8


@pytest.mark.usefixtures("eager")
def test_structured_outputs_beside_drafts(pair: tuple[LLM, LLM]) -> None:
    """Requests whose masks depend on their tokens, in steps with others (see also test_guided_drafts)."""
    from llmc_runtime import StructuredOutputsParams

    guided = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex="(one|two|three) [0-9]{3}")
    )
    cases = [guided, SamplingParams(temperature=0, max_tokens=60), guided, SamplingParams(seed=1, max_tokens=30)]
    found = []
    for llm in pair:
        outs = llm.generate([REPEAT] * len(cases), cases, use_tqdm=False)
        found.append([(r.outputs[0].text, list(r.outputs[0].token_ids)) for r in outs])
    assert found[0] == found[1]


def test_fewer_steps(pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that repeats takes fewer steps, with the cost model, if drafts are cheap."""
    speculation = pair[1].engine.scheduler.speculation
    assert speculation is not None
    costs = speculation.draft_count.costs
    for drafts in (0, 1, 2, 3, 4) * 3:
        costs.record(1, drafts, 1 + 0.1 * drafts)
    monkeypatch.setattr(costs, "record", lambda rows, drafts, seconds: None)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    steps = []
    for llm in pair:
        before = llm.stats()["num_steps"]
        llm.generate(REPEAT, params, use_tqdm=False)
        steps.append(llm.stats()["num_steps"] - before)
    assert steps[1] < 0.9 * steps[0], steps


def test_refused(demo: Path, tmp_path: Path) -> None:
    """More drafts than the model was compiled for, other methods, malformed values: one clear error each."""
    for value, code, text in (
        ("ngram:5", "E204", "compiled for at most 4"),
        ("eagle:model", "E201", "eagle:model"),
        ({"method": "eagle3", "model": "x"}, "E206", "EAGLE-3 head"),
        ({"model": "x", "num_speculative_tokens": 3}, "E206", "draft model, and the artifact has none"),
        ("draft", "E206", "the artifact has none"),
        ("draft:5", "E204", "compiled for at most 4"),
        ({"method": "draft_model", "prompt_lookup_min": 3}, "E201", "prompt_lookup_min"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "E201", "num_speculative_tokens = 0"),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "E201", "prompt_lookup_min = 3"),
        ({"method": "ngram", "draft": 1}, "E201", "draft"),
        (3, "E201", "speculate = 3"),
    ):
        with pytest.raises(LlmcError, match=text) as caught:
            LLM(demo, say=quiet, speculate=value)
        assert caught.value.code == code, value
    save(LISTED[0], tmp_path / "model")
    with pytest.raises(LlmcError, match="--speculate 33"):
        compile_model(tmp_path / "model", tmp_path / "wrong.llmc", Options(cache=CACHE, speculate=33))
    write_artifact(tmp_path / "plain.llmc", replace(tiny.parts(tmp_path), tokenizer=()))
    with pytest.raises(LlmcError, match="no drafted tokens") as caught:
        LLM(tmp_path / "plain.llmc", say=quiet, speculate="ngram")
    assert "llmc" not in caught.value.cause and "--speculate 4" in caught.value.remedy


def test_the_cost_model_stops_drafts_that_do_not_pay() -> None:
    """With expensive entries only likely drafts are verified; a row whose drafts fail is still tried now and then."""
    policy, request = Speculation(SpeculationConfig(4, 3, 5)), Request("r", [1])
    request.num_drafts = 4
    for drafts, seconds in ((0, 0.010), (1, 0.014), (2, 0.018), (3, 0.022), (4, 0.026)):  # 0.4 of a step each
        for _ in range(5):
            policy.draft_count.costs.record(1, drafts, seconds)
    request.draft_trials = (50.0, 50.0)
    policy.begin([request], 100)
    assert policy.drafts(request, 9) >= 2 and policy.drafts(request, 1) == 1 and policy.drafts(request, 0) == 0
    request.draft_trials = (50.0, 1.0)
    tried = []
    for _ in range(3 * PROBE_PERIOD):
        policy.begin([request], 100)
        tried.append(policy.drafts(request, 9))
    assert sum(tried[PROBE_PERIOD:]) == 2


def test_prompt_lookup_that_finds_nothing() -> None:
    """No plan wants drafts, though their cost is yet to be measured, and few steps are measured; then drafts come."""
    policy, request, counters = Speculation(SpeculationConfig(4, 3, 5)), Request("r", [1]), Counters()
    counters.drafted_at_most(4)
    request.num_drafts, work, measured = 4, [Work(0, 1, True)], []
    for _ in range(5):
        policy.draft_count.costs.record(1, 0, 0.01)
    policy.draft_count.costs.record = lambda *step: measured.append(step)  # type: ignore[method-assign]
    policy.begin([request], 100)
    assert policy.wants
    for _ in range(160):
        policy.learn(work, [request], StepOutput([2], [None], proposed=[0]), 0.01, counters)
        assert policy.begin_idle() and not policy.wants and policy.drafts(request, 9) == 0
    assert 4 <= len(measured) <= 6
    policy.learn(work, [request], StepOutput([2], [None], proposed=[3]), 0.01, counters)
    policy.begin([request], 100)
    assert policy.wants and policy.drafts(request, 9) >= 1


def test_the_number_of_drafts() -> None:
    """The number with the most tokens per second: only rows whose drafts are likely, if those of others fail."""
    count = DraftCount(7, together=False)
    assert count.choose([0.7], 100) == Choice(0, measures=True)
    for rows, slope in ((1, 0.02), (8, 0.9)):
        for drafts in (0, 1, 2, 3, 5, 7):
            for _ in range(5):
                count.costs.record(rows, drafts, 1 + slope * drafts)
    assert count.choose([0.95], 100).max_drafts == 7
    assert count.choose([0.3], 100).max_drafts in (2, 3) and count.choose([0.01], 100).max_drafts == 0
    assert count.choose([0.7] * 8, 100).max_drafts == 0
    for _ in range(5):
        count.costs.record(8, 1 / 8, 1.02)
    assert Choice(3, min_rate=0.5).drafts(0.6) == 3 and Choice(3, min_rate=0.5).drafts(0.4) == 0
    some = count.choose([0.9, *[0.1] * 7], 100)
    assert some.max_drafts >= 1 and some.drafts(0.9) >= 1 and some.drafts(0.1) == 0
    assert count.choose([0.95], 3).max_drafts == 3  # no more fit
