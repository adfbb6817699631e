"""Models with recurrent layers on the GPU, without and with drafted tokens, of which some are rejected.

States that keep a rejected token, or lose an accepted one, change log-probabilities far more than rounding does: in
float32, they are compared directly with those of a CPU, which the tests of artifacts compare with transformers. Tokens
may differ where two were nearly equally likely, as other kernels compute steps with drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from draw import generator
from gpu.error_ratio import excess
from gpu.model_cases import LENGTH, RECURRENT_PAIRS, Pair, make_all
from gpu.test_models import LOGPROBS, ROUTED, TOLERANCE, compare, errors
from llmc_runtime import LLM, SamplingParams
from models.test_speculation import eager  # noqa: F401

pytestmark = pytest.mark.gpu
STEPS = 24
PAGE = 16
PAIRS = {p.name: p for p in RECURRENT_PAIRS if not p.speculate}
DRAFTS = "ngram:4"


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return {error.partition(" ")[0]: error for error in make_all(RECURRENT_PAIRS, 1)}


def repeating_prompts(count: int = 24) -> list[list[int]]:
    """Prompts that repeat a few tokens, so that drafts are found; most of them are longer than a chunk of a step."""
    rng = generator()
    parts = [rng.integers(3, 320, rng.integers(2, 9)).tolist() for _ in range(count)]
    return [(p * LENGTH)[: rng.integers(len(p), LENGTH - STEPS)] for p in parts]


def completions(pair: Pair, kind: str, prompts: list[Any], batched: bool, drafts: str | None = None) -> list[Any]:
    """Return the greedy completion of every prompt, of the first three of its ids, so that it repeats itself.

    With `drafts`, check that some were accepted and others not.
    """
    params = [
        SamplingParams(
            temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=LOGPROBS, allowed_token_ids=[*{*p[:3]}]
        )
        for p in prompts
    ]
    pairs = [*zip(given(prompts), params, strict=True)]
    with LLM(pair.path(kind), say=lambda text: None, speculate=drafts) as llm:
        groups = [pairs] if batched else [[x] for x in pairs]
        found = [out.outputs[0] for g in groups for out in llm.generate(*map(list, zip(*g)), use_tqdm=False)]
        if drafts:
            stats: Any = llm.stats()
            assert 0 < stats["spec_decode_num_accepted_tokens"] < stats["spec_decode_num_draft_tokens"]
    return found


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize("name", PAIRS)
def test_drafts_and_company_change_nothing_but_rounding(name: str, batched: bool, failures: dict[str, str]) -> None:
    if name in failures:
        pytest.fail(failures[name])
    pair, prompts = PAIRS[name], repeating_prompts()
    speculating = replace(pair, speculate=4)
    exact = completions(pair, pair.exact, prompts, batched)
    found = {
        "plain": completions(pair, "gpu", prompts, batched),
        "none drafted": completions(speculating, "gpu", prompts, batched),
        "drafted": completions(speculating, "gpu", prompts, batched, DRAFTS),
    }
    rounded = completions(pair, "cpu", prompts, batched)
    rounding = errors(rounded, exact)
    for how, ours in found.items():
        print(how)
        if pair.dtype == "float32":
            compare(ours, exact, TOLERANCE)
        else:
            assert not (reason := excess(errors(ours, exact), rounding)), reason
            compare(ours, exact, 4 * max(x.max() for x in rounding), ROUTED, rounded)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", [name for name, pair in PAIRS.items() if pair.dtype == "float32"])
def test_prompts_that_go_on_from_snapshots(name: str, failures: dict[str, str]) -> None:
    """Second turns start from the states that the first ones left, and agree with a CPU that computes them whole."""
    if name in failures:
        pytest.fail(failures[name])
    rng, params = generator(), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=LOGPROBS)
    first = [rng.integers(3, 320, rng.integers(PAGE + 1, LENGTH // 2)).tolist() for _ in range(24)]
    turns = [p + rng.integers(3, 320, rng.integers(1, LENGTH // 2 - 8)).tolist() for p in first]
    found: dict[str, Any] = {}
    for kind, options in (("gpu", {"state_snapshots": 4 * len(first)}), ("cpu", {"enable_prefix_caching": False})):
        with LLM(PAIRS[name].path(kind), say=lambda text: None, **options) as llm:
            llm.generate(given(first), SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            found[kind] = llm.generate(given(turns), params, use_tqdm=False)
    assert all(out.num_cached_tokens >= PAGE for out in found["gpu"])
    compare(*([out.outputs[0] for out in found[kind]] for kind in ("gpu", "cpu")), TOLERANCE)


def given(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": p} for p in prompts]
