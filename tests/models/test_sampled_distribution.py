"""Continuations that an engine samples with drafts have the distribution of those without: two samples of a small
vocabulary, with different seeds, are compared by chi-square.

python tests/models/test_sampled_distribution.py 20000      the same with so many continuations of each setting
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams
from llmc_runtime.exec.executor import Executor
from llmc_runtime.sched.speculation import Speculation

from llmc.driver import compile_model
from llmc.options import Options

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "Once upon a time"
LENGTH, COUNTED = 6, 4  # tokens of a continuation, and its last ones that are compared
COUNT, IDS = 1000, 4  # continuations of a sample, and ids that may be sampled
LIMIT = 5.0  # standard deviations from the expected chi-square
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "cold": {"temperature": 0.3},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "top-p": {"temperature": 1.7, "top_p": 0.8},
    "min-p": {"temperature": 1.7, "min_p": 0.15},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.4, "frequency_penalty": 0.5},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
METHODS: Mapping[str, Any] = {"ngram": NGRAM, "suffix": "suffix:3", "draft": "draft:3", "eagle": "eagle:3"}


def engines(folder: Path) -> dict[str, LLM]:
    """The demonstration model without drafts, and with drafts of each method."""
    heads = {"draft": str(EXAMPLES / "demo-model-small"), "eagle": f"eagle:{EXAMPLES / 'demo-model-head'}"}
    for name, draft in heads.items():
        compile_model(EXAMPLES / "demo-model", folder / name, Options(cache=CACHE, speculate=3, draft=draft))
    out = {"": LLM(folder / "draft", say=lambda text: None)}
    for method, speculate in METHODS.items():
        artifact = folder / ("eagle" if method == "eagle" else "draft")
        out[method] = LLM(artifact, say=lambda text: None, speculate=speculate)
    return out


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LLM]]:
    made = engines(tmp_path_factory.mktemp("engines"))
    yield made
    for llm in made.values():
        llm.close()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step draft and verify as many tokens as it can, whether it pays or not."""
    monkeypatch.setattr(Speculation, "choose", lambda self, request, room: room)
    monkeypatch.setattr(Speculation, "wants", True)
    monkeypatch.setattr(Speculation, "stop", lambda self, request: None)
    monkeypatch.setattr(Speculation, "drafts", lambda self, request, room: max(0, min(room, request.num_drafts)))
    monkeypatch.setattr(Speculation, "begin_idle", lambda self, running: False)


def prompt_and_ids(llm: LLM) -> tuple[list[int], list[int]]:
    """A prompt, and the only ids that may follow it. It has them in several orders, so that they can be looked up."""
    first = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, logprobs=IDS), use_tqdm=False)[0]
    logprobs, words = first.outputs[0].logprobs, list(first.prompt_token_ids or ())
    assert logprobs is not None
    ids = [token for token, _ in zip(logprobs[0], range(IDS))]
    return [*ids, *ids, *ids[::-1], *words], ids


def sample(llm: LLM, prompt: list[int], ids: list[int], setting: str, seeds: range) -> Counter[tuple[int, ...]]:
    """How often each end of a continuation is sampled; one continuation for each seed."""
    fixed = {"max_tokens": LENGTH, "ignore_eos": True, "allowed_token_ids": ids, **SETTINGS[setting]}
    params = [SamplingParams(seed=seed, **fixed) for seed in seeds]
    outs = llm.generate([{"prompt_token_ids": prompt}] * len(params), params, use_tqdm=False)
    return Counter(tuple(out.outputs[0].token_ids[-COUNTED:]) for out in outs)


def score(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """Chi-square of two samples of equal size as a normal deviate (Wilson and Hilferty 1931)."""
    keys = sorted({*one, *other}, key=lambda key: one[key] + other[key])
    a, b = (np.array([counts[key] for key in keys], float) for counts in (one, other))
    cells = np.unique(np.cumsum(a + b) // 20, return_inverse=True)[1]  # rare continuations are counted together
    a, b = (np.bincount(cells, x) for x in (a, b))
    freedom = max(1, len(a) - 1)
    square = float(((a - b) ** 2 / (a + b)).sum())
    return float(((square / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5)


def compared(llms: Mapping[str, LLM], method: str, setting: str, count: int = COUNT) -> tuple[float, int, int]:
    """Return the score of a method beside plain decoding, and its numbers of drafts and of accepted ones."""
    (prompt, ids), begin = prompt_and_ids(llms[""]), SEED % 1000 * 10**6
    names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    before = [llms[method].stats()[name] for name in names]
    drafted = sample(llms[method], prompt, ids, setting, range(begin, begin + count))
    drafts, accepted = (llms[method].stats()[name] - was for name, was in zip(names, before, strict=True))
    plain = sample(llms[""], prompt, ids, setting, range(begin + count, begin + 2 * count))
    return score(drafted, plain), drafts, accepted


@pytest.mark.slow(seconds=30)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_continuations_with_drafts_are_distributed_like_those_without(
    llms: dict[str, LLM], method: str, setting: str
) -> None:
    deviate, drafts, accepted = compared(llms, method, setting)
    assert deviate < LIMIT
    assert drafts > 0 and accepted < drafts, "some are rejected, or there is nothing to test"


@pytest.mark.slow(seconds=30)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_wrong_rule_is_detected(llms: dict[str, LLM], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that keeps a rejected draft in place of the token that it has sampled."""
    keep_rejected_drafts(monkeypatch)
    deviate, _, _ = compared(llms, method, "plain")
    print(f"{method}: {deviate:.1f}")
    assert deviate > LIMIT


def keep_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the error in the executor: the device rows and the output get the draft."""
    start, wait, drafts = Executor._start, Executor.wait, dict[int, tuple[int, int, int]]()

    def remembered(self: Executor, step: Any) -> Any:
        tokens, length = (self.rows._tables[name].view for name in ("tokens", "length"))
        drafts.clear()
        for index, item in enumerate(step.work):
            if item.drafts:
                at = int(length[item.row, 0]) + 1
                drafts[index] = item.row, at, int(tokens[item.row, at])
        return start(self, step)

    def kept(self: Executor, ticket: Any) -> Any:
        out = wait(self, ticket)
        for index, (row, at, token) in drafts.items():
            if not out.accepted[index]:
                self.rows._tables["tokens"].view[row, at] = out.tokens[index] = token
        return out

    monkeypatch.setattr(Executor, "_start", remembered)
    monkeypatch.setattr(Executor, "wait", kept)


def main(count: int) -> None:
    """Print the scores of all settings and methods."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        draft_always(monkeypatch)
        made = engines(Path(folder))
        for method in METHODS:
            for setting in SETTINGS:
                deviate, drafts, accepted = compared(made, method, setting, count)
                print(f"{method:9} {setting:10} {deviate:6.2f}  {accepted} of {drafts} drafts accepted", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
