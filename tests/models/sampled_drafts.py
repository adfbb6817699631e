"""Samples of continuations with and without drafts, from an engine, and their comparison by chi-square."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from llmc_runtime import LLM, SamplingParams, StructuredOutputsParams
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation import Speculation

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "demo-model"
# The option --draft of the artifacts: that of the head, and the one for all other methods.
HEADS = {"draft": str(EXAMPLES / "demo-model-small"), "eagle": f"eagle:{EXAMPLES / 'demo-model-head'}"}
DRAFTS = 3  # tokens that are drafted at most
LENGTH, COUNTED = 6, 4  # tokens of a continuation, and its last ones that are compared
IDS = 4  # ids that may be sampled, except in JSON
TEXT = "Once upon a time"
ARRAYS = '["a","b"]["c","a"]["b","c"]["a","c"]'
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
METHODS: Mapping[str, Any] = {"ngram": NGRAM, "suffix": "suffix:3", "draft": "draft:3", "eagle": "eagle:3"}
COUNTERS = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "num_preemptions")
REGEX, JSON = "regex", "json"  # settings whose masks depend on the tokens before
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "cold": {"temperature": 0.3},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "top-p": {"temperature": 1.7, "top_p": 0.8},
    "min-p": {"temperature": 1.7, "min_p": 0.15},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.4, "frequency_penalty": 0.5},
    "bias": {"temperature": 1.0},
    REGEX: {"temperature": 1.0},
    JSON: {"temperature": 1.0},
}
BIASES = (-1.0, 1.5, 0.5, -0.5)  # of the ids, in the setting "bias"
ARRAY = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 2, "maxItems": 3}

Continuation = tuple[int, ...]


class Task(NamedTuple):
    """A prompt, and the sampling parameters of its continuations except their seeds."""

    prompt: list[int]
    params: Mapping[str, Any]


def task_of(llm: LLM, setting: str) -> Task:
    """Return the task of a setting. Its prompt has the only ids that may follow it in several orders, so that they can
    be looked up, and ends two tokens before the end of a page.
    """
    tokenizer = llm.get_tokenizer()
    if setting == JSON:
        orders = tokenizer.encode(ARRAYS, add_special_tokens=False)
        ids, words = sorted(set(orders)), orders[:3]
    else:
        first = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=1, logprobs=IDS), use_tqdm=False)[0]
        logprobs, words = first.outputs[0].logprobs, list(first.prompt_token_ids or ())
        assert logprobs is not None
        ids = list(logprobs[0] or ())[:IDS]
        orders = [*ids, *ids, *ids[::-1]]
    size = llm.config.page_size
    prompt = [*(ids * size)[: -(len(orders) + len(words) + 2) % size], *orders, *words]
    params = {"max_tokens": LENGTH, "ignore_eos": True, "allowed_token_ids": ids, **SETTINGS[setting]}
    if setting == "bias":
        params["logit_bias"] = dict(zip(ids, BIASES, strict=True))
    if setting == REGEX:
        texts = [re.escape(tokenizer.decode([token])) for token in ids]
        pattern = f"(({texts[0]}|{texts[1]})({texts[2]}|{texts[3]}|{texts[0]}))+"
        params["structured_outputs"] = StructuredOutputsParams(regex=pattern)
    if setting == JSON:
        params["structured_outputs"] = StructuredOutputsParams(json=ARRAY)
    return Task(prompt, params)


def sample(llm: LLM, task: Task, seeds: range) -> list[Continuation]:
    """Return the compared ends of continuations, one for each seed."""
    params = [SamplingParams(seed=seed, **task.params) for seed in seeds]
    outs = llm.generate([{"prompt_token_ids": task.prompt}] * len(params), params, use_tqdm=False)
    return [tuple(out.outputs[0].token_ids[-COUNTED:]) for out in outs]


def score(one: Counter[Continuation], other: Counter[Continuation]) -> float:
    """Chi-square of two samples of equal size as a normal deviate (Wilson and Hilferty 1931)."""
    keys = sorted({*one, *other}, key=lambda key: one[key] + other[key])
    a, b = (np.array([counts[key] for key in keys], float) for counts in (one, other))
    cells = np.unique(np.cumsum(a + b) // 20, return_inverse=True)[1]  # rare continuations are counted together
    a, b = (np.bincount(cells, x) for x in (a, b))
    freedom = max(1, len(a) - 1)
    square = float(((a - b) ** 2 / (a + b)).sum())
    return float(((square / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5)


def counted(llm: LLM) -> Sequence[int]:
    """Return how many drafts the engine has verified and accepted, and how many requests it has preempted."""
    stats = llm.stats()
    return [int(stats[name]) for name in COUNTERS]


def force_drafts(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """Make steps draft and verify whether it pays or not: as many tokens as they can, or 0 to DRAFTS by turns if steps
    overlap. Steps of methods that draft on the host overlap in plans without drafts.
    """

    def wanted(self: Speculation) -> int:
        return self.plans % (DRAFTS + 1) if overlap else DRAFTS

    def drafts(self: Speculation, request: Request, room: int) -> int:
        return max(0, min(room, request.num_drafts, wanted(self)))

    monkeypatch.setattr(Speculation, "choose", lambda self, request, room: min(room, wanted(self)))
    monkeypatch.setattr(Speculation, "num_masked_drafts", lambda self, request, room: room)
    monkeypatch.setattr(Speculation, "wants", property(lambda self: wanted(self) > 0))
    monkeypatch.setattr(Speculation, "stop", lambda self, request: None)
    monkeypatch.setattr(Speculation, "drafts", drafts)
    monkeypatch.setattr(Speculation, "begin_idle", lambda self: False)


def artifact_of(method: str) -> str:
    """Return the key in HEADS of the artifact with which a method runs."""
    return "eagle" if method == "eagle" else "draft"
