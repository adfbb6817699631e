"""Small random models and the demonstration model on the GPU beside the CPU: greedy tokens and log-probabilities.

Tokens may differ where the CPU's choice was nearly a tie; what follows such a place is not compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gpu.model_cases import LENGTH, ROWS, Pair, make_all, pairs
from llmc_runtime import LLM, SamplingParams

pytestmark = pytest.mark.gpu
STEPS = 10
LENGTHS = (1, 7, 45)
TOLERANCE = {"float32": 1e-3, "bfloat16": 8e-2, "auto": 8e-2}
PAIRS = {p.name: p for p in pairs()}
EVERY = {p.name: p for p in pairs(every=True)}


@pytest.fixture(scope="session")
def made() -> dict[str, str]:
    """Pair -> why it was not made; all are compiled at once, but for those that were carried here."""
    present = [p for p in EVERY.values() if p.made]
    jobs = max(1, (os.cpu_count() or 1) // 4)
    failed = make_all(list({**PAIRS, **{p.name: p for p in present}}.values()), jobs)
    return {why.partition(" ")[0]: why for why in failed}


def generate(pair: Pair, kind: str, prompts: Sequence[Any], steps: int, together: bool) -> list[Any]:
    """The first choice of every prompt: all at once, or one after the other."""
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, logprobs=4)
    llm = LLM(pair.path(kind), say=lambda text: None)
    try:
        groups = [list(prompts)] if together else [[p] for p in prompts]
        return [out.outputs[0] for g in groups for out in llm.generate(g, params, use_tqdm=False)]
    finally:
        llm.close()


def compare(ours: Any, theirs: Any, tolerance: float, what: str) -> int:
    """Tokens that were compared, up to a near tie or the end."""
    for i, (token, want) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
        entries, known = ours.logprobs[i], theirs.logprobs[i]
        scale = max(1.0, abs(known[want].logprob))
        for other in set(entries) & set(known):
            off = abs(entries[other].logprob - known[other].logprob)
            assert off < tolerance * scale, f"{what}, token {i}: the log-probability of {other} is off by {off:.3g}"
        if token != want:
            assert token in known, f"{what}, token {i}: {token} is none of the CPU's best"
            behind = known[want].logprob - known[token].logprob
            assert behind < 2 * tolerance * scale, f"{what}, token {i}: {token} is {behind:.3g} nats behind {want}"
            return i + 1
    return len(theirs.token_ids)


def check(pair: Pair, prompts: Sequence[Any], steps: int, together: bool) -> None:
    gpu, cpu = (generate(pair, kind, prompts, steps, together) for kind in ("gpu", "cpu"))
    tolerance = TOLERANCE[pair.dtype]
    seen = [compare(a, b, tolerance, f"prompt {i}") for i, (a, b) in enumerate(zip(gpu, cpu, strict=True))]
    assert sum(seen) >= steps * len(prompts) // 4, f"near ties hide too much: {seen} of {steps} tokens each"


def drawn(count: int) -> list[list[int]]:
    """Prompts of many lengths; two share pages with one before."""
    rng = np.random.default_rng()
    found = [rng.integers(3, 320, n).tolist() for n in LENGTHS]
    found.append([*found[-1][:32], 5, 6, 7])
    return [
        *found,
        *(rng.integers(3, 320, n).tolist() for n in rng.integers(1, LENGTH - STEPS - 1, count - len(found))),
    ]


@pytest.mark.parametrize("name", [n for n in EVERY if n != "demo-auto"])
def test_a_model_says_what_it_says_on_the_cpu(name: str, made: dict[str, str]) -> None:
    """One request at a time, then a full batch: every range of rows."""
    if name in made:
        pytest.fail(made[name])
    pair = EVERY[name]
    if not pair.made:
        pytest.skip("not compiled: python tests/gpu/model_cases.py --all")
    prompts = [p for p in drawn(ROWS + 3) if len(p) + STEPS <= _longest(pair)]
    check(pair, prompts[:3], STEPS, together=False)
    check(pair, prompts, STEPS, together=True)


def _longest(pair: Pair) -> int:
    case = pair.case
    return min(case.trace.get("max_positions", LENGTH), LENGTH) if case else LENGTH


def test_the_demonstration_tells_the_same_story(made: dict[str, str]) -> None:
    """Compiled on a machine without a GPU, if its artifacts were carried here."""
    assert "demo-auto" not in made, made["demo-auto"]
    pair = PAIRS["demo-auto"]
    prompts = ["When the morning came,", "Once there was a river that", "The old man said"]
    check(pair, prompts, 60, together=False)
    texts = [[o.text for o in generate(pair, kind, prompts, 60, False)] for kind in ("gpu", "cpu")]
    assert any(a == b for a, b in zip(*texts, strict=True)), texts
