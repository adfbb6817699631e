"""Prompt lookup before a head: a request that arrives in the step for which the head does not draft."""

from __future__ import annotations

import random

import pytest
from draw import SEED
from llmc_runtime.engine.engine import Engine
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.speculation import Speculation
from llmc_runtime.sched.speculation_config import SpeculationConfig

from tests.runtime.simulator import make_device

CONFIG = SchedulerConfig(
    num_pages=40, page_size=4, max_model_len=96, max_num_seqs=3, max_num_batched_tokens=16, vocab_size=64,
    eos_token_ids=(), max_num_logits=12,
    speculation=SpeculationConfig(4, 1, 3, max_rows=3, head="eagle", stops=True),
)  # fmt: skip


def test_no_more_drafts_are_verified_than_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device refuses to verify drafts that do not exist. What lookup finds is not taken for two requests."""
    monkeypatch.setattr(Speculation, "wants", True)
    monkeypatch.setattr(Speculation, "proposals", lambda self, request: 4)
    monkeypatch.setattr(Speculation, "prefers_lookup", lambda self, request: self._alone)
    monkeypatch.setattr(Speculation, "drafts", lambda self, request, room: max(0, min(room, request.num_drafts)))
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    engine = Engine(Scheduler(CONFIG, lambda: 7), make_device(CONFIG, rng=rng), grace=0.0)
    names = iter(range(1000))
    for _ in range(300):
        if len(engine.scheduler.requests) < rng.choice((1, 3)):
            params = SamplingParams(max_tokens=60, temperature=0.0, seed=1)
            engine.add(Request(str(next(names)), rng.choices(range(64), k=30), params))
        engine.step()
        assert engine.error is None
    assert engine.counters.spec_decode_num_accepted_tokens > 0
