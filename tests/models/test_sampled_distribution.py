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
from collections.abc import Iterator, Sequence
from itertools import product
from operator import ne, sub
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM
from llmc_runtime.exec.executor import Executor
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.step import Step
from models.sampled_drafts import (
    DRAFTS,
    HEADS,
    JSON,
    METHODS,
    MODEL,
    REGEX,
    SETTINGS,
    Continuation,
    artifact_of,
    counted,
    force_drafts,
    sample,
    score,
    task_of,
)

from llmc.driver import compile_model
from llmc.options import Options
from tests.runtime.deferred_device import DeferredDevice, defer

PAGES = 24  # of the KV cache if steps overlap: too few for the continuations of a batch, some of which are preempted
COUNT = 1000  # continuations of a sample
SINGLE = 100  # continuations of a sample that is compared token by token
CHANGED = 10  # continuations of a sample that may differ from those of plain decoding, by rounding
LIMIT = 5.0  # standard deviations from the expected chi-square


class Engines:
    """The demonstration model without drafts, and with drafts of each method, with overlapping steps or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, draft in HEADS.items():
            compile_model(MODEL, folder / name, Options(cache=CACHE, speculate=DRAFTS, draft=draft))
        self.plain = self._open("draft")
        self.page_bytes = self.plain.engine.executor.capacity.nbytes // self.plain.engine.executor.capacity.pages
        self._opened: dict[tuple[str, bool], LLM] = {}
        self.samples: dict[tuple[str, range], list[Continuation]] = {}  # of plain decoding, by setting and seeds

    def open(self, method: str, overlap: bool) -> LLM:
        """Return the engine with a method."""
        if (method, overlap) not in self._opened:
            options: dict[str, Any] = {"speculate": METHODS[method]}
            with pytest.MonkeyPatch.context() as monkeypatch:
                if overlap:
                    defer(monkeypatch)
                    options["kv_cache_memory_bytes"] = PAGES * self.page_bytes
                self._opened[method, overlap] = self._open(artifact_of(method), **options)
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
    task, begin = task_of(engines.plain, setting), SEED % 1000 * 10**6
    same, others = range(begin, begin + count), range(begin + count, begin + 2 * count)
    llm = engines.open(method, overlap)
    before = counted(llm)
    drafted = sample(llm, task, same)
    counts = map(sub, counted(llm), before)
    for seeds in (same, others):
        if (setting, seeds) not in engines.samples:
            engines.samples[setting, seeds] = sample(engines.plain, task, seeds)
    changed = sum(map(ne, drafted, engines.samples[setting, same]))
    return Comparison(score(Counter(drafted), Counter(engines.samples[setting, others])), changed, *counts)


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("overlap", [False, True], ids=["single", "overlap"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_continuations_with_drafts_are_distributed_like_those_without(
    engines: Engines, method: str, setting: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting in (REGEX, JSON):
        pytest.importorskip("llguidance")
    force_drafts(monkeypatch, overlap)
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
    force_drafts(monkeypatch, overlap=False)
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
    task, outputs = task_of(engines.plain, "plain"), []
    for planted in (False, True):
        if planted:
            take_lengths_from_plans(monkeypatch)
        force_drafts(monkeypatch, overlap=False)
        outputs.append(sample(engines.open(method, False), task, range(SINGLE)))
    assert outputs[0] == outputs[1]
    force_drafts(monkeypatch, overlap=True)
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
                force_drafts(monkeypatch, overlap)
                found = compared(engines, method, overlap, setting, count)
            changed = f"{found.changed} changed"
            share = f"{found.accepted} of {found.drafts} drafts accepted, {found.preemptions} preemptions"
            steps = most_in_flight(engines.open(method, overlap))
            print(f"{method:7} {setting:10} {steps} in flight {found.deviate:6.2f}, {changed}, {share}", flush=True)
        engines.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
