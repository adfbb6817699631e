"""Continuations that an engine samples with drafts have the distribution of those without: two samples of a small
vocabulary, with different seeds, are compared by chi-square.

Each method runs with one step in flight, and with steps that overlap (see deferred_device), few pages, and numbers of
drafts that change from plan to plan.

python tests/models/test_sampled_distribution.py 20000           20,000 continuations of each setting
python tests/models/test_sampled_distribution.py 100000 plain    100,000 of the settings that are named
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams
from llmc_runtime.exec.executor import Executor
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.speculation import Speculation
from llmc_runtime.sched.step import Step

from llmc.driver import compile_model
from llmc.options import Options
from tests.runtime.deferred_device import DeferredDevice, defer

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "Once upon a time"
DRAFTS = 3  # tokens that are drafted at most
PAGES = 24  # of the KV cache if steps overlap: too few for the continuations of a batch, some of which are preempted
LENGTH, COUNTED = 6, 4  # tokens of a continuation, and its last ones that are compared
COUNT, IDS = 1000, 4  # continuations of a sample, and ids that may be sampled
SINGLE = 100  # continuations of a sample that is compared token by token
CHANGED = 10  # continuations of a sample that may differ from those of plain decoding, by rounding
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
COUNTERS = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "num_preemptions")
METHODS: Mapping[str, Any] = {"ngram": NGRAM, "suffix": "suffix:3", "draft": "draft:3", "eagle": "eagle:3"}


class Engines:
    """The demonstration model without drafts, and with drafts of each method, with overlapping steps or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        heads = {"draft": str(EXAMPLES / "demo-model-small"), "eagle": f"eagle:{EXAMPLES / 'demo-model-head'}"}
        for name, draft in heads.items():
            compile_model(EXAMPLES / "demo-model", folder / name, Options(cache=CACHE, speculate=DRAFTS, draft=draft))
        self.plain = self._open("draft")
        self.page_bytes = self.plain.engine.executor.capacity.nbytes // self.plain.engine.executor.capacity.pages
        self._opened: dict[tuple[str, bool], LLM] = {}
        self.samples: dict[tuple[str, range], list[tuple[int, ...]]] = {}  # of plain decoding, by setting and seeds

    def open(self, method: str, overlap: bool) -> LLM:
        """Return the engine with a method."""
        if (method, overlap) not in self._opened:
            options: dict[str, Any] = {"speculate": METHODS[method]}
            with pytest.MonkeyPatch.context() as monkeypatch:
                if overlap:
                    defer(monkeypatch)
                    options["kv_cache_memory_bytes"] = PAGES * self.page_bytes
                self._opened[method, overlap] = self._open("eagle" if method == "eagle" else "draft", **options)
        return self._opened[method, overlap]

    def close(self) -> None:
        """Close all engines."""
        for llm in (self.plain, *self._opened.values()):
            llm.close()

    def _open(self, name: str, **options: Any) -> LLM:
        return LLM(self.folder / name, say=lambda text: None, threads=1, **options)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


def draft(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """Let steps draft and verify whether it pays or not: as many tokens as they can, or 0 to DRAFTS by turns if steps
    overlap. Steps of methods that draft on the host overlap in plans without drafts.
    """

    def wanted(self: Speculation) -> int:
        return self.plans % (DRAFTS + 1) if overlap else DRAFTS

    def drafts(self: Speculation, request: Request, room: int) -> int:
        return max(0, min(room, request.num_drafts, wanted(self)))

    monkeypatch.setattr(Speculation, "choose", lambda self, request, room: min(room, wanted(self)))
    monkeypatch.setattr(Speculation, "wants", property(lambda self: wanted(self) > 0))
    monkeypatch.setattr(Speculation, "stop", lambda self, request: None)
    monkeypatch.setattr(Speculation, "drafts", drafts)
    monkeypatch.setattr(Speculation, "begin_idle", lambda self, running: False)


def prompt_and_ids(llm: LLM) -> tuple[list[int], list[int]]:
    """A prompt, and the only ids that may follow it. It has them in several orders, so that they can be looked up, and
    ends two tokens before the end of a page.
    """
    first = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, logprobs=IDS), use_tqdm=False)[0]
    logprobs, words = first.outputs[0].logprobs, list(first.prompt_token_ids or ())
    assert logprobs is not None
    ids = [token for token, _ in zip(logprobs[0], range(IDS))]
    orders = [*ids, *ids, *ids[::-1]]
    size = llm.config.page_size
    return [*(ids * size)[: -(len(orders) + len(words) + 2) % size], *orders, *words], ids


def sample(llm: LLM, prompt: list[int], ids: list[int], setting: str, seeds: range) -> list[tuple[int, ...]]:
    """Return the compared ends of continuations, one for each seed."""
    fixed = {"max_tokens": LENGTH, "ignore_eos": True, "allowed_token_ids": ids, **SETTINGS[setting]}
    params = [SamplingParams(seed=seed, **fixed) for seed in seeds]
    outs = llm.generate([{"prompt_token_ids": prompt}] * len(params), params, use_tqdm=False)
    return [tuple(out.outputs[0].token_ids[-COUNTED:]) for out in outs]


def score(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """Chi-square of two samples of equal size as a normal deviate (Wilson and Hilferty 1931)."""
    keys = sorted({*one, *other}, key=lambda key: one[key] + other[key])
    a, b = (np.array([counts[key] for key in keys], float) for counts in (one, other))
    cells = np.unique(np.cumsum(a + b) // 20, return_inverse=True)[1]  # rare continuations are counted together
    a, b = (np.bincount(cells, x) for x in (a, b))
    freedom = max(1, len(a) - 1)
    square = float(((a - b) ** 2 / (a + b)).sum())
    return float(((square / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5)


class Comparison(NamedTuple):
    """The score of a method beside plain decoding with other seeds, how many continuations differ from those of plain
    decoding with the same seeds, and what the method's engine counted meanwhile.
    """

    deviate: float
    changed: int
    drafts: int
    accepted: int
    preemptions: int


def compared(engines: Engines, method: str, overlap: bool, setting: str, count: int = COUNT) -> Comparison:
    """Compare samples of a method and of plain decoding."""
    (prompt, ids), begin = prompt_and_ids(engines.plain), SEED % 1000 * 10**6
    same, others = range(begin, begin + count), range(begin + count, begin + 2 * count)
    llm = engines.open(method, overlap)
    before = [llm.stats()[name] for name in COUNTERS]
    drafted = sample(llm, prompt, ids, setting, same)
    counted = [llm.stats()[name] - was for name, was in zip(COUNTERS, before, strict=True)]
    for seeds in (same, others):
        if (setting, seeds) not in engines.samples:
            engines.samples[setting, seeds] = sample(engines.plain, prompt, ids, setting, seeds)
    changed = sum(map(ne, drafted, engines.samples[setting, same]))
    return Comparison(score(Counter(drafted), Counter(engines.samples[setting, others])), changed, *counted)


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("overlap", [False, True], ids=["single", "overlap"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_continuations_with_drafts_are_distributed_like_those_without(
    engines: Engines, method: str, setting: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft(monkeypatch, overlap)
    found = compared(engines, method, overlap, setting)
    print(f"{method} {setting}: {found}")
    assert found.deviate < LIMIT and found.changed <= CHANGED
    assert 0 < found.accepted < found.drafts, "some are rejected, or there is nothing to test"
    if overlap:
        assert most_in_flight(engines.open(method, True)) == 2 and found.preemptions > 0


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_wrong_rule_is_detected(engines: Engines, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that keeps a rejected draft in place of the token that it has sampled."""
    draft(monkeypatch, overlap=False)
    keep_rejected_drafts(monkeypatch)
    deviate = compared(engines, method, False, "plain").deviate
    print(f"{method}: {deviate:.1f}")
    assert deviate > LIMIT


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_an_error_of_overlapping_steps_is_detected(
    engines: Engines, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths of rows that count the drafts in flight as accepted: right with a single step in flight. Drafts of a
    draft model are distributed nearly as the model's tokens, so that only a comparison with the same seeds shows it.
    """
    prompt, ids = prompt_and_ids(engines.plain)
    outputs = []
    for planted in (False, True):
        if planted:
            take_lengths_from_plans(monkeypatch)
        draft(monkeypatch, overlap=False)
        outputs.append(sample(engines.open(method, False), prompt, ids, "plain", range(SINGLE)))
    assert outputs[0] == outputs[1]
    draft(monkeypatch, overlap=True)
    found = compared(engines, method, True, "plain")
    print(f"{method}: {found}")
    assert found.changed > COUNT // 50
    assert found.deviate > LIMIT or method == "draft"


def take_lengths_from_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the error in the executor: a step begins at the number of tokens that the scheduler has planned."""
    plan, start, lengths = Scheduler.next, Executor._start, dict[int, int]()

    def planned(self: Scheduler) -> Step:
        step = plan(self)
        if step.work:
            requests, new = self._in_flight[-1][1], {init.row for init in step.inits}
            lengths.clear()
            for request, item in zip(requests, step.work, strict=True):
                if item.row not in new:
                    lengths[item.row] = request.num_planned - item.num_tokens
        return step

    def started(self: Executor, step: Step) -> Any:
        for row, length in lengths.items():
            self.rows._tables["length"].set(row, [length])
        return start(self, step)

    monkeypatch.setattr(Scheduler, "next", planned)
    monkeypatch.setattr(Executor, "_start", started)


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


def most_in_flight(llm: LLM) -> int:
    """Return the maximum number of steps that were in flight at a time."""
    device = llm.engine.executor.device
    return device.most_in_flight if isinstance(device, DeferredDevice) else 1


def main(count: int, settings: Sequence[str]) -> None:
    """Print the scores of settings and methods, with a single step in flight and with overlapping steps."""
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(Path(folder))
        for method, setting, overlap in product(METHODS, settings or SETTINGS, (False, True)):
            with pytest.MonkeyPatch.context() as monkeypatch:
                draft(monkeypatch, overlap)
                found = compared(engines, method, overlap, setting, count)
            changed = f"{found.changed} changed"
            share = f"{found.accepted} of {found.drafts} drafts accepted, {found.preemptions} preemptions"
            steps = most_in_flight(engines.open(method, overlap))
            print(f"{method:7} {setting:10} {steps} in flight {found.deviate:6.2f}, {changed}, {share}", flush=True)
        engines.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
