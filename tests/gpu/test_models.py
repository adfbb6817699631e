"""Small random models and the demonstration model: greedy tokens and log-probabilities of the GPU and of the CPU.

Tokens may differ where two of them were nearly equally likely; the tokens after such a place are not compared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from draw import generator
from gpu.error_ratio import excess
from gpu.model_cases import LENGTH, MIXTURES, TEXTS, Pair, make_all, pairs
from llmc_runtime import LLM, SamplingParams

pytestmark = pytest.mark.gpu
STEPS = 10
LENGTHS = (1, 7, 45)
PROMPTS = 100
LOGPROBS = 20  # likeliest ids whose log-probabilities are compared
TOLERANCE = 1e-3
ROUTED = 0.1  # three of 30 completions of a mixture
PAIRS = {p.name: p for p in pairs()}
EVERY = {p.name: p for p in pairs(every=True)}
PLAIN = {p.name: p for p in MIXTURES if not p.forced}
STORIES = ("When the morning came,", "Once there was a river that", "The old man said")
OPENINGS = ("Once there was", "In the morning", "The old man saw", "Far away lived", "At night", "She looked for")
SUBJECTS = (" a river", " a small house", " the king", " two birds", " a boat", " the moon")
BEGINNINGS = [a + b for a in OPENINGS for b in SUBJECTS]


@pytest.fixture(scope="session")
def failures(request: Any) -> dict[str, str]:
    """Compile the models of the selected tests that have no artifacts; return the error of each pair that failed."""
    selected = [value for item in request.session.items for value in _parameters(item)]
    jobs = max(1, (os.cpu_count() or 1) // 4)
    known = [*PAIRS.values(), *MIXTURES]
    failed = make_all([p for p in known if p in selected or p.name in selected], jobs)
    return {error.partition(" ")[0]: error for error in failed}


def _parameters(item: Any) -> list[Any]:
    return list(item.callspec.params.values()) if hasattr(item, "callspec") else []


def generate(pair: Pair, kind: str, prompts: Sequence[Any], steps: int, batched: bool) -> list[Any]:
    """Return the completion of every prompt, computed in one batch or one prompt at a time."""
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, logprobs=LOGPROBS)
    llm = LLM(pair.path(kind), say=lambda text: None)
    try:
        groups = [list(prompts)] if batched else [[p] for p in prompts]
        return [out.outputs[0] for g in groups for out in llm.generate(g, params, use_tqdm=False)]
    finally:
        llm.close()


def comparable(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the number of tokens with equal contexts: up to the first that differs, which is included."""
    differs = (i + 1 for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return next(differs, len(theirs))


def errors(ours: Sequence[Any], theirs: Sequence[Any]) -> list[np.ndarray]:
    """Return the differences of the log-probabilities of each completion, of equal ids in equal contexts.

    They are relative to the sampled token's log-probability if that is below -1. The error of a completion without ids
    that both report is inf.
    """
    return [np.array(_differences(a, b) or [np.inf]) for a, b in zip(ours, theirs, strict=True)]


def _differences(a: Any, b: Any) -> list[float]:
    return [
        abs(a.logprobs[i][k].logprob - b.logprobs[i][k].logprob) / max(1.0, abs(b.logprobs[i][b.token_ids[i]].logprob))
        for i in range(comparable(a.token_ids, b.token_ids))
        for k in set(a.logprobs[i]) & set(b.logprobs[i])
    ]


def compare(
    ours: Sequence[Any], theirs: Sequence[Any], tolerance: float, routed: float = 0.0, rounded: Sequence[Any] = ()
) -> None:
    """Check that log-probabilities agree, and that a token that differs was nearly as likely.

    A token that is not listed in `theirs` is at most as likely as the least likely listed one. routed: the share of
    log-probabilities, and of completions, that may be off by more, as the experts of a token were nearly tied.
    rounded: the completions of a device that rounds as much. A quarter of all tokens must have equal contexts, or half
    as many as of those.
    """
    largest = np.quantile(np.concatenate(errors(ours, theirs)), 1 - routed)
    assert largest < tolerance, f"a log-probability is off by {largest:.3g}, the tolerance is {tolerance:.3g}"
    compared = [comparable(a.token_ids, b.token_ids) for a, b in zip(ours, theirs, strict=True)]
    unlikely = []
    for i, (n, a, b) in enumerate(zip(compared, ours, theirs, strict=True)):
        token, expected, known = a.token_ids[n - 1], b.token_ids[n - 1], b.logprobs[n - 1]
        found = known[token].logprob if token in known else min(x.logprob for x in known.values())
        behind = known[expected].logprob - found
        if behind >= 2 * tolerance * max(1.0, abs(known[expected].logprob)):
            unlikely.append(f"prompt {i}, token {n - 1}: {token} is {behind:.3g} nats behind {expected}")
    assert len(unlikely) <= routed * len(ours), "; ".join(unlikely)
    least = sum(len(b.token_ids) for b in theirs) // 4
    if rounded:
        least = min(least, sum(comparable(a.token_ids, b.token_ids) for a, b in zip(rounded, theirs, strict=True)) // 2)
    assert sum(compared) >= least, f"only {compared} tokens have equal contexts, at least {least} must"


def check(pair: Pair, prompts: Sequence[Any], steps: int, batched: bool) -> None:
    """Compare the GPU with the CPU: directly in float32, in bfloat16 by their errors relative to the CPU in float32.

    In bfloat16 both round, in different orders of summation: `error_ratio` compares the sizes of the errors.
    """
    check_outputs(pair, {kind: generate(pair, kind, prompts, steps, batched) for kind in pair.kinds})


def check_outputs(pair: Pair, outputs: Mapping[str, Sequence[Any]], routed: float = 0.0) -> None:
    """Compare the completions of each kind of artifact, as `check` says. routed: see `compare`, in bfloat16."""
    if pair.dtype == "float32":
        compare(outputs["gpu"], outputs["cpu"], TOLERANCE)
        return
    gpu, cpu = (errors(outputs[kind], outputs["exact"]) for kind in ("gpu", "cpu"))
    assert not (reason := excess(gpu, cpu)), reason
    compare(outputs["gpu"], outputs["exact"], 4 * max(x.max() for x in cpu), routed, outputs["cpu"])


def random_prompts(longest: int, count: int = PROMPTS) -> list[list[int]]:
    """Draw `count` prompts of 1 to `longest` tokens; the fourth shares a prefix of pages with the third."""
    rng = generator()
    lengths = [*LENGTHS, longest, *rng.integers(1, longest, count - len(LENGTHS) - 2)]
    drawn = [rng.integers(3, 320, n).tolist() for n in lengths]
    return [*drawn[:3], [*drawn[2][:32], 5, 6, 7], *drawn[3:]]


@pytest.mark.parametrize("name", [p.name for p in EVERY.values() if p.case])
def test_random_model_matches_cpu(name: str, failures: dict[str, str]) -> None:
    """One request at a time, then full batches, so that kernels for every range of rows run."""
    if name in failures:
        pytest.fail(failures[name])
    pair = EVERY[name]
    if not pair.made:
        pytest.skip("not compiled: python tests/gpu/model_cases.py --all")
    prompts = random_prompts(_max_length(pair) - STEPS)
    check(pair, prompts, STEPS, batched=False)
    check(pair, prompts, STEPS, batched=True)


def _max_length(pair: Pair) -> int:
    case = pair.case
    return min(case.trace.get("max_positions", LENGTH), LENGTH) if case else LENGTH


@lru_cache(maxsize=4)
def mixture_on_cpu(name: str, kind: str, batched: bool) -> list[Any]:
    """The completions of `generate` on the CPU, which mixtures with other kernels forced share."""
    return generate(PLAIN[name], kind, mixture_prompts(name), STEPS, batched)


@lru_cache(maxsize=4)
def mixture_prompts(name: str) -> list[list[int]]:
    return random_prompts(_max_length(PLAIN[name]) - STEPS, 30)


@pytest.mark.parametrize("pair", MIXTURES, ids=lambda p: p.name)
@pytest.mark.parametrize("batched", (False, True), ids=("alone", "batched"))
def test_mixture_matches_cpu(batched: bool, pair: Pair, failures: dict[str, str]) -> None:
    """With each kernel of the experts' products forced in turn. Prompts run in graphs of padded sizes.

    The only mixture of experts of the deepseek_v3 model is in its last layer, whose experts are sorted.
    """
    assert pair.name not in failures, failures[pair.name]
    plain = replace(pair, forced=()).name
    outputs = {kind: mixture_on_cpu(plain, kind, batched) for kind in ("cpu", "exact")}
    outputs["gpu"] = generate(pair, "gpu", mixture_prompts(plain), STEPS, batched)
    check_outputs(pair, outputs, ROUTED)
    (last,) = (pair.path("gpu") / "ir").glob("*-memory.llir")
    chosen = set(re.findall(r' (moe_\w+)\(.*\bkernel="([^"]+)"', last.read_text()))
    assert not pair.forced or {kernel for op, kernel in chosen if op in ("moe_up", "moe_down")} <= set(pair.forced)
    gathers = not pair.forced and pair.case is not None and pair.case.model_type != "deepseek_v3"
    assert (("moe_gather_down", "triton/moe_gather_down") in chosen) is gathers


@pytest.mark.parametrize("pair", TEXTS, ids=lambda p: p.name)
def test_demo_model_matches_cpu(pair: Pair, failures: dict[str, str]) -> None:
    """In float32, texts are equal. In bfloat16, near ties may be decided otherwise, after which texts differ."""
    assert pair.name not in failures, failures[pair.name]
    check(pair, BEGINNINGS, 60, batched=False)
    if pair.dtype == "float32":
        gpu, cpu = ([o.text for o in generate(pair, kind, STORIES, 60, False)] for kind in ("gpu", "cpu"))
        assert gpu == cpu
