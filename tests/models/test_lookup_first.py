"""Prompt lookup before a head: which of them drafts, what is counted for whom, and unchanged outputs."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams
from llmc_runtime.exec.draft_steps import DraftSteps
from llmc_runtime.metrics import Counters
from llmc_runtime.sched.draft_trials import Trials
from llmc_runtime.sched.lookup_first import LookupFirst
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation import Speculation
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.sched.step import StepOutput, Work
from models.cases import LISTED
from models.eagle import save_head, tensors
from models.kit import save
from models.test_speculation import eager, quiet, requests, results  # noqa: F401

from llmc.driver import compile_model
from llmc.options import Options

VERIFIED = (1.0, 1.2, 1.25, 1.4, 1.6)  # steps' durations by the drafts that they verify
DRAFT = 0.2  # duration of a draft of the head
HEAD = SpeculationConfig(4, max_rows=4, head="eagle", stops=True)
BOTH = SpeculationConfig(4, 3, 5, max_rows=4, head="eagle", stops=True)


def speed(config: SpeculationConfig, finds: float, right: float, head: float, plans: int = 6000) -> float:
    """Tokens per plain step of one request.

    A lookup finds drafts with probability `finds`, each of which is accepted with probability `right`; the head's are
    with probability `head`.
    """
    rng, policy, counters = random.Random(SEED), Speculation(config), Counters()
    counters.drafted_at_most(4)
    request, seconds, tokens = Request("r", [1]), 0.0, 0
    for _ in range(plans):
        policy.begin([request], 100)
        verified = policy.drafts(request, 4) if request.num_drafts else 0
        chance = right if request.verifies_lookup else head
        propose = policy.proposals(request) if policy.wants else 0
        lookup = bool(propose) and policy.prefers_lookup(request)
        stop = policy.stop(request) if propose > 1 else None
        request.num_drafts, request.likely = 0, []
        accepted = next((i for i in range(verified) if rng.random() >= chance), verified)
        found = 4 if config.looks_first and rng.random() < finds else 0
        made = 0 if lookup and found else propose
        request.num_drafts = made
        took = VERIFIED[verified] + DRAFT * made
        work = Work(0, 1 + verified, True, drafts=verified, propose=propose, stop=stop, lookup=lookup)
        output = StepOutput(
            [5], [None], accepted={0: [(5, None)] * accepted} if verified else {}, proposed=[found],
            likely={0: [head] * made} if made else {},
        )  # fmt: skip
        policy.learn([work], [request], output, took, counters)
        seconds, tokens = seconds + took, tokens + 1 + accepted
    return tokens / seconds


@pytest.mark.parametrize(("finds", "right", "head"), [(0.8, 0.95, 0.9), (0.5, 0.9, 0.2), (1.0, 0.9, 0.0)])
def test_lookup_drafts_where_texts_repeat(finds: float, right: float, head: float) -> None:
    """What prompt lookup finds costs no passes of the head, and is used where the head's drafts do not pay."""
    alone, both = speed(HEAD, finds, right, head), speed(BOTH, finds, right, head)
    print(f"seed {SEED}: the head alone {alone:.3f}, with prompt lookup {both:.3f}")
    assert both > 1.1 * alone


@pytest.mark.parametrize("head", [0.9, 0.1])
def test_wrong_findings_cost_little(head: float) -> None:
    """A text whose repetitions go on in another way: few of them are verified."""
    alone, both = speed(HEAD, 0.9, 0.05, head), speed(BOTH, 0.9, 0.05, head)
    print(f"seed {SEED}: the head alone {alone:.3f}, with prompt lookup {both:.3f}")
    assert both > 0.98 * alone


def test_acceptance_is_counted_apart() -> None:
    """Drafts that were looked up say nothing of the head's, and those of one request little of another kind's."""
    lookup, request = LookupFirst(), Request("r", [1], SamplingParams(temperature=0.0))
    other = Request("s", [1], SamplingParams(temperature=1.0))
    before = lookup.rate(request)
    for _ in range(50):
        lookup.record(request, 4, 0)
    assert lookup.rate(request) < 0.1 < before == lookup.rate(other)
    assert request.draft_trials == (0.0, 0.0)
    policy, third = Speculation(BOTH), Request("t", [1])
    for third.from_lookup in (True, False, False):
        policy.record_excluded(third)
    assert third.lookup_trials[0] == 1 and third.draft_trials[0] > 1, "a guide excludes a draft of one or the other"
    costs = [0.0, 0.2, 0.3, 0.4, 0.5]
    assert lookup.num_to_verify(other, 4, costs, 1) == 4 and lookup.num_to_verify(request, 4, costs, 1) == 0
    plans = (64, 65, 191, 192, 447, 448, 959, 960, 1471, 1472)
    probes = [plan for plan in plans if lookup.num_to_verify(request, 4, costs, plan)]
    assert probes == [64, 192, 448, 960, 1472], "after 64 plans, then rarer and rarer"
    lookup.record(request, 4, 1)
    lookup.num_to_verify(request, 4, costs, 1984)
    assert lookup.probes(1984 + 128) and not lookup.probes(1984 + 127)


def test_findings_that_do_not_pay_are_not_looked_at() -> None:
    """Until the next draft that is verified to measure acceptance, or until they can be paid."""
    lookup, request, trials = LookupFirst(), Request("r", [1]), Trials(8)
    costs, output = [0.0, 0.2, 0.3, 0.4, 0.5], StepOutput([5], [None], proposed=[4])
    assert lookup.take_found([request], output, trials, costs, 1) == 1 and request.num_drafts == 4
    for _ in range(50):
        lookup.record(request, 4, 0)
    assert lookup.take_found([request], output, trials, costs, 2) == 64 and not request.from_lookup
    few = StepOutput([5], [None], proposed=[1])
    assert lookup.take_found([request], few, trials, costs, 3) == 3, "more could pay"
    trials.lookup_credit.balance = -0.3
    assert lookup.take_found([request], output, trials, costs, 3) in (153, 154)
    assert lookup.take_found([request, Request("s", [1])], output, None, costs, 4) > 1 << 60


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of plain decoding whether drafts were looked up or made by the head; several rows do not look
    up. (For requests with a guide, see test_guided_drafts.)
    """
    save(LISTED[1], tmp_path / "model", SEED)
    save_head(tmp_path / "head", tensors(200, seed=SEED))
    limits: dict[str, Any] = {"cache": CACHE, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    compile_model(tmp_path / "model", tmp_path / "model.llmc", Options(**limits, draft=f"eagle:{tmp_path / 'head'}"))
    prompts, params = requests()
    with LLM(tmp_path / "model.llmc", say=quiet) as llm:
        want = results(llm, prompts, params)
    run, seen = DraftSteps.run, Counter[str]()

    def recorded(self: DraftSteps, work: Any, found: Any) -> dict[int, list[float]]:
        likely = run(self, work, found)
        for index, item in enumerate(work):
            looked_up = item.lookup and found[index] > 0
            assert not (looked_up and index in likely) and not (item.lookup and len(work) > 1)
            seen["looked up" if looked_up else "head" if index in likely else "none"] += 1
        return likely

    monkeypatch.setattr(DraftSteps, "run", recorded)
    verifies = Speculation.drafts

    def counted(self: Speculation, request: Request, room: int) -> int:
        drafts = verifies(self, request, room)
        seen["verified"] += drafts if request.verifies_lookup else 0
        return drafts

    monkeypatch.setattr(Speculation, "drafts", counted)
    with LLM(tmp_path / "model.llmc", say=quiet, speculate="eagle") as llm:
        assert [results(llm, [a], [b])[0] for a, b in zip(prompts, params, strict=True)] == want
        print(f"seed {SEED}: {dict(seen)}")
        assert seen["looked up"] and seen["head"] and seen["verified"]
        seen.clear()
        assert results(llm, prompts, params) == want
