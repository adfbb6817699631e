"""Small random models and the demonstration model on the GPU beside the CPU: greedy tokens and log-probabilities.

Tokens may differ where the choice was nearly a tie; what follows such a place is not compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from draw import generator
from gpu.model_cases import LENGTH, ROWS, TEXTS, Pair, make_all, pairs
from llmc_runtime import LLM, SamplingParams

pytestmark = pytest.mark.gpu
STEPS = 10
LENGTHS = (1, 7, 45)
TOLERANCE = 1e-3
PAIRS = {p.name: p for p in pairs()}
EVERY = {p.name: p for p in pairs(every=True)}
STORIES = ("When the morning came,", "Once there was a river that", "The old man said")


@pytest.fixture(scope="session")
def made(request: Any) -> dict[str, str]:
    """Pair -> why it was not made; those of the chosen tests are compiled at once, unless they were carried here."""
    chosen = [value for item in request.session.items for value in _parameters(item)]
    jobs = max(1, (os.cpu_count() or 1) // 4)
    failed = make_all([p for p in PAIRS.values() if p in chosen or p.name in chosen], jobs)
    return {why.partition(" ")[0]: why for why in failed}


def _parameters(item: Any) -> list[Any]:
    return list(item.callspec.params.values()) if hasattr(item, "callspec") else []


def generate(pair: Pair, kind: str, prompts: Sequence[Any], steps: int, at_once: bool) -> list[Any]:
    """The first choice of every prompt: all at once, or one after the other."""
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, logprobs=4)
    llm = LLM(pair.path(kind), say=lambda text: None)
    try:
        groups = [list(prompts)] if at_once else [[p] for p in prompts]
        return [out.outputs[0] for g in groups for out in llm.generate(g, params, use_tqdm=False)]
    finally:
        llm.close()


def together(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens whose context is the same to both: up to the first that differs, itself included."""
    differs = (i + 1 for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return next(differs, len(theirs))


def errors(ours: Sequence[Any], theirs: Sequence[Any]) -> np.ndarray:
    """Differences of log-probabilities of the same ids in the same contexts, each relative to one that is below -1."""
    found = [
        abs(a.logprobs[i][k].logprob - b.logprobs[i][k].logprob) / max(1.0, abs(b.logprobs[i][b.token_ids[i]].logprob))
        for a, b in zip(ours, theirs, strict=True)
        for i in range(together(a.token_ids, b.token_ids))
        for k in set(a.logprobs[i]) & set(b.logprobs[i])
    ]
    return np.array(found)


def compare(ours: Sequence[Any], theirs: Sequence[Any], tolerance: float) -> None:
    """Log-probabilities agree, and where a token differs it was nearly as good."""
    off = errors(ours, theirs)
    assert off.max() < tolerance, f"a log-probability is off by {off.max():.3g}, the tolerance is {tolerance:.3g}"
    seen = [together(a.token_ids, b.token_ids) for a, b in zip(ours, theirs, strict=True)]
    for i, (n, a, b) in enumerate(zip(seen, ours, theirs, strict=True)):
        token, want, known = a.token_ids[n - 1], b.token_ids[n - 1], b.logprobs[n - 1]
        assert token in known, f"prompt {i}, token {n - 1}: {token} is none of the best"
        behind = known[want].logprob - known[token].logprob
        limit = 2 * tolerance * max(1.0, abs(known[want].logprob))
        assert behind < limit, f"prompt {i}, token {n - 1}: {token} is {behind:.3g} nats behind {want}"
    total = sum(len(b.token_ids) for b in theirs)
    assert sum(seen) >= total // 4, f"near ties hide too much: {seen} of {total} tokens"


def check(pair: Pair, prompts: Sequence[Any], steps: int, at_once: bool) -> None:
    """In float32 the GPU says what the CPU says. In bfloat16 both are rough, in other orders of sums: beside the same
    weights in float32 the GPU's errors are of the size of the CPU's."""
    outputs = {kind: generate(pair, kind, prompts, steps, at_once) for kind in pair.kinds}
    if pair.dtype == "float32":
        compare(outputs["gpu"], outputs["cpu"], TOLERANCE)
        return
    gpu, cpu = (errors(outputs[kind], outputs["exact"]) for kind in ("gpu", "cpu"))
    summary = f"medians {np.median(gpu):.3g} and {np.median(cpu):.3g}, largest {gpu.max():.3g} and {cpu.max():.3g}"
    print(f"{pair.name}: errors of GPU and CPU, {summary}, of {len(gpu)} and {len(cpu)}")
    assert np.median(gpu) <= 1.5 * np.median(cpu), summary
    compare(outputs["gpu"], outputs["exact"], 4 * cpu.max())


def drawn(count: int) -> list[list[int]]:
    """Prompts of many lengths; two share pages with one before."""
    rng = generator()
    found = [rng.integers(3, 320, n).tolist() for n in LENGTHS]
    found.append([*found[-1][:32], 5, 6, 7])
    return [
        *found,
        *(rng.integers(3, 320, n).tolist() for n in rng.integers(1, LENGTH - STEPS - 1, count - len(found))),
    ]


@pytest.mark.parametrize("name", [p.name for p in EVERY.values() if p.case])
def test_a_model_says_what_it_says_on_the_cpu(name: str, made: dict[str, str]) -> None:
    """One request at a time, then a full batch: every range of rows."""
    if name in made:
        pytest.fail(made[name])
    pair = EVERY[name]
    if not pair.made:
        pytest.skip("not compiled: python tests/gpu/model_cases.py --all")
    prompts = [p for p in drawn(ROWS + 3) if len(p) + STEPS <= _longest(pair)]
    check(pair, prompts[:3], STEPS, at_once=False)
    check(pair, prompts, STEPS, at_once=True)


def _longest(pair: Pair) -> int:
    case = pair.case
    return min(case.trace.get("max_positions", LENGTH), LENGTH) if case else LENGTH


@pytest.mark.parametrize("pair", TEXTS, ids=lambda p: p.name)
def test_the_demonstration_tells_the_same_story(pair: Pair, made: dict[str, str]) -> None:
    """Compiled on a machine without a GPU, if its artifacts were carried here. In float32 word for word; in bfloat16
    sums in another order decide near ties otherwise, and what follows is another story."""
    assert pair.name not in made, made[pair.name]
    check(pair, STORIES, 60, at_once=False)
    if pair.dtype == "float32":
        ours, theirs = ([o.text for o in generate(pair, kind, STORIES, 60, False)] for kind in ("gpu", "cpu"))
        assert ours == theirs
