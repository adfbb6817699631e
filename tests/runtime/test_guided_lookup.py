"""Prompt lookup before a head, of single requests with guides: the tokens of the oracle, and bugs that are seen.

Worlds of the simulator seldom have such requests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from draw import SEED
from llmc_runtime.engine.engine import Engine
from llmc_runtime.sched import scheduler
from llmc_runtime.sched.lookup_first import LookupFirst
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.speculation import Speculation
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.sched.step import Work

from tests.runtime.guides import Wandering
from tests.runtime.oracle import Expected
from tests.runtime.simulator import make_device

CONFIG = SchedulerConfig(
    num_pages=40, page_size=4, max_model_len=96, max_num_seqs=3, max_num_batched_tokens=16, vocab_size=64,
    eos_token_ids=(1,), max_num_logits=12, max_masks=5,
    speculation=SpeculationConfig(4, 1, 3, max_rows=3, head="eagle", stops=True),
)  # fmt: skip
ENOUGH = 20  # drafts


def run(seed: int, delay: int, crowd: int, config: SchedulerConfig = CONFIG) -> Counter[str]:
    """Run requests, up to `crowd` at a time; check each token and end. Return how many drafts were verified."""
    rng, seen = random.Random(seed), Counter[str]()
    device = make_device(config, rng=random.Random(seed))
    engine = Engine(Scheduler(config, lambda: 7), device, grace=0.0)
    verifies = Speculation.drafts

    def drafts(self: Speculation, request: Request, room: int) -> int:
        count = verifies(self, request, room)
        seen["looked up" if request.from_lookup else "head"] += count if request.guide is not None else 0
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "drafts", drafts)
        for number in range(0, 60, crowd):
            live = {}
            for name in map(str, range(number, number + rng.randint(1, crowd))):
                guide = Wandering(config.vocab_size, lambda: rng.randint(0, delay))
                params = SamplingParams(max_tokens=60, temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(99))
                request = Request(name, rng.choices(range(64), k=rng.randint(1, 30)), params, guide=guide)
                engine.add(request)
                live[name] = Expected(request, config, guided=True)
            while engine.has_work():
                for delta in engine.step():
                    check(live[delta.id], delta)
            assert engine.error is None and engine.scheduler.pool.num_used == 0
    return seen


def runs(delay: int, crowd: int) -> Counter[str]:
    """Run until 20 drafts that were looked up have been verified, which a single run may not reach; at most 8 times."""
    seen = Counter[str]()
    for seed in range(SEED, SEED + 8):
        print(f"seed {seed}")
        seen += run(seed, delay, crowd)
        if seen["looked up"] > ENOUGH:
            break
    return seen


def check(expected: Expected, delta: Any) -> None:
    """The tokens are those of the oracle; a guide may end a request one delta later."""
    finish = expected.late
    for got in delta.new_token_ids:
        assert finish is None
        token, finish, _ = expected.next()
        assert got == token
    if delta.finish_reason is None and finish is not None and expected.ended_by_guide(finish):
        expected.late, finish = finish, None
    assert delta.finish_reason == finish


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("crowd", [1, 3])
def test_the_tokens_of_the_oracle(delay: int, crowd: int) -> None:
    """Also if masks are late, and if others begin to run beside, so that lookup ends."""
    seen = runs(delay, crowd)
    assert seen["looked up"] > ENOUGH and seen["head"] > 0


def test_masks_of_earlier_drafts_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guides look at the drafts of every second plan. It verifies none of them, and the next plan other ones."""

    def drafts(self: Speculation, request: Request, room: int) -> int:
        return max(0, min(room, request.num_drafts)) if self.plans % 2 else 0

    monkeypatch.setattr(Speculation, "drafts", drafts)
    monkeypatch.setattr(Speculation, "wants", True)
    monkeypatch.setattr(Speculation, "num_masked_drafts", lambda self, request, room: room if self.plans % 2 else 0)
    run(SEED, 0, 3, replace(CONFIG, speculation=SpeculationConfig(4, 1, 3)))


def more_than_were_found(right: Any) -> Any:
    def take(self: LookupFirst, request: Request, found: int, *more: Any) -> None:
        right(self, request, found, *more)
        request.num_drafts += request.from_lookup

    return take


def masks_behind_the_next_drafts(right: Any) -> Any:
    def take_drafts(request: Request, work: Work, output: Any, proposals: int, count: int = 1, *more: bool) -> None:
        right(request, work, output, proposals, count + request.from_lookup, *more)

    return take_drafts


@pytest.mark.parametrize(
    ("owner", "method", "bug"),
    [
        (LookupFirst, "take", more_than_were_found),
        (scheduler, "take_drafts", masks_behind_the_next_drafts),
    ],
)
def test_a_bug_is_seen(owner: Any, method: str, bug: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, method, bug(getattr(owner, method)))
    with pytest.raises((AssertionError, RuntimeError)):
        runs(0, 1)
