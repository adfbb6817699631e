"""Greedy tokens with drafts equal those of plain decoding, except at ties, for models of all families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams
from models.cases import FURTHER, LISTED, UNLISTED, Case
from models.kit import save
from models.recent_cases import RECENT
from models.recurrent_cases import RECURRENT
from models.test_draft_model import accepted
from models.test_speculation import NGRAM, eager, quiet  # noqa: F401

from llmc.driver import compile_model
from llmc.options import Options

LIMITS: dict[str, Any] = {"cache": CACHE, "reuse": False, "max_num_seqs": 4, "max_num_batched_tokens": 24}
DRAFTS = 4
TIE = 1e-3  # difference of two log-probabilities that rounding may explain
BIAS = {5: 50.0, 9: 50.0, 200: 50.0}  # leaves three ids, so that the text repeats itself and drafts are accepted
LENGTH = 64  # tokens of a sequence at most, which all models allow
RECURRENT_NAMES = {case.name for case in RECURRENT}  # a draft model with recurrent layers is refused
CASES = {case.name: case for case in (*LISTED, *UNLISTED, *FURTHER, *RECENT, *RECURRENT)}

Output = list[tuple[int, dict[int, float]]]  # each token, with the log-probabilities of the most likely ones


def prompts() -> list[dict[str, list[int]]]:
    """Return short and long prompts of random and of repeated ids."""
    rng = np.random.default_rng(SEED)
    words = rng.integers(3, 320, 5).tolist()
    ids = [words[:1], (words * 9)[:39], rng.integers(3, 320, 17).tolist(), (words * 9)[3:30], words[::-1]]
    return [{"prompt_token_ids": prompt} for prompt in ids]


def greedy(llm: LLM) -> list[Output]:
    """Return the greedy outputs of all prompts in a batch, of the second half of them with likely ids."""
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 2}
    params = [SamplingParams(**common), SamplingParams(**common, logit_bias=BIAS)]
    outs = llm.generate(prompts() * 2, [one for one in params for _ in prompts()], use_tqdm=False)
    found = []
    for out in outs:
        tokens, logprobs = out.outputs[0].token_ids, out.outputs[0].logprobs
        found.append([(token, {i: x.logprob for i, x in row.items()}) for token, row in zip(tokens, logprobs)])
    return found


def agree(one: Output, other: Output) -> bool:
    """Return whether the tokens are the same up to the first tie."""
    for (token, likely), (other_token, _) in zip(one, other, strict=True):
        if token != other_token:
            return likely.get(token, 0.0) - likely.get(other_token, -np.inf) < TIE
    return True


@pytest.mark.drawn(seconds=15)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_plain_decoding(name: str, tmp_path: Path) -> None:
    """With prompt lookup, suffix matching, and a draft model of the same architecture with other weights."""
    case: Case = CASES[name]
    print(f"SEED={SEED}")
    save(case, tmp_path / "model", SEED)
    save(case, tmp_path / "draft", SEED + 1)
    methods = ["suffix", NGRAM] if name in RECURRENT_NAMES else ["suffix", NGRAM, "draft"]
    draft = str(tmp_path / "draft") if "draft" in methods else None
    length = min(case.trace.get("max_positions", LENGTH), LENGTH)
    options = Options(**LIMITS, max_model_len=length, speculate=DRAFTS, draft=draft)
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    with LLM(tmp_path / "model.llmc", say=quiet) as llm:
        want = greedy(llm)
    total = 0
    for method in methods:
        with LLM(tmp_path / "model.llmc", say=quiet, speculate=method) as llm:
            found = greedy(llm)
            drafts, right = accepted(llm)
        different = [i for i, (one, other) in enumerate(zip(want, found, strict=True)) if not agree(one, other)]
        print(f"{name}, {method}: {right} of {drafts} drafts accepted")
        assert not different, f"{method}: outputs {different}"
        assert 0 < drafts and (right < drafts or method == "suffix")
        total += right
    assert total, "no draft was accepted"


def test_ties_are_the_only_difference() -> None:
    """Two outputs that part at nearly the same log-probability agree, and no others."""
    first = [(3, {3: -0.1, 4: -3.0}), (5, {5: -1.0, 6: -1.0 - TIE / 2})]
    assert agree(first, first) and agree(first, [first[0], (6, {})])
    assert not agree(first, [(4, {}), first[1]]) and not agree(first, [first[0], (7, {})])
