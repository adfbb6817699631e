"""Drafting stops after unlikely drafts: the counters, the verified drafts, and unchanged outputs."""

from __future__ import annotations

import random
from math import prod
from pathlib import Path
from typing import Any

import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams
from llmc_runtime.exec.draft_steps import DraftSteps
from llmc_runtime.metrics import Counters
from llmc_runtime.sched.draft_stops import Chances, Stop, worth_verifying
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

VERIFIED = (1.0, 1.3, 1.45, 1.6, 1.8)  # steps' durations by the drafts that they verify
DRAFT = 0.2  # duration of a draft


def test_accepted_drafts_are_counted_by_probability() -> None:
    """The estimates begin between the draft's probability and the row's rate, and follow the accepted drafts."""
    chances = Chances()
    assert all(0 < low < high < 1 for low, high in zip(chances.of_rate(0.3), chances.of_rate(0.3)[1:], strict=False))
    assert chances.of_rate(0.1)[2] < chances.of_rate(0.9)[2]
    for _ in range(300):
        chances.record(0.3, 0.05, True)
        chances.record(0.3, 0.99, False)
    assert chances.of_rate(0.3)[0] > 0.9 > 0.1 > chances.of_rate(0.3)[5], "a head that is unsure and right"
    assert chances.of_rate(0.9)[0] < 0.6, "rows with another rate"


@pytest.mark.parametrize(
    ("chances", "costs", "count"),
    [
        ([0.9, 0.9, 0.9], [0.0, 0.3, 0.5, 0.7], 3),
        ([0.9, 0.1, 0.9], [0.0, 0.3, 0.5, 0.7], 1),
        ([0.2, 0.99, 0.99], [0.0, 0.3, 0.5, 0.7], 0),
        ([0.4, 0.99, 0.99], [0.0, 0.5, 0.55, 0.6], 3),
        ([0.9], [0.0, 0.3, 0.5, 0.7], 1),
        ([], [0.0, 0.3], 0),
    ],
)
def test_the_number_with_the_largest_gain_is_verified(chances: list[float], costs: list[float], count: int) -> None:
    """The number with the largest gain is verified, even if a single draft would not pay."""
    stop = Stop((0.05, 0.2, 0.4, 0.55, 0.9, 0.99), 0.0)
    given = {0.1: 0.05, 0.2: 0.2, 0.4: 0.4, 0.9: 0.8, 0.99: 0.95}
    tokens = [stop.chance(given[p]) for p in chances]
    gains = [sum(prod(tokens[: i + 1]) for i in range(k)) - costs[k] for k in range(len(tokens) + 1)]
    assert worth_verifying(stop, [given[p] for p in chances], costs) == gains.index(max(gains)) == count


def speed(stops: bool, rng: random.Random, plans: int = 6000) -> float:
    """Tokens per plain step if every draft is sure (0.97 accepted) or not (0.1), and its probability tells which."""
    policy, counters = Speculation(SpeculationConfig(4, max_rows=4, head="eagle", stops=stops)), Counters()
    counters.drafted_at_most(4)
    request, seconds, tokens, sure = Request("r", [1]), 0.0, 0, list[bool]()
    for _ in range(plans):
        policy.begin([request], 100)
        verified = policy.drafts(request, 4) if request.num_drafts else 0
        propose = policy.proposals(request) if policy.wants else 0
        stop = policy.stop(request) if propose > 1 else None
        request.num_drafts, request.likely = 0, []
        right = [rng.random() < (0.97 if one else 0.1) for one in sure[:verified]]
        accepted = (*right, False).index(False)
        sure, chance = [], 1.0
        while len(sure) < propose and (stop is None or chance >= stop.min_chance):
            sure.append(rng.random() < 0.75)
            chance *= 1.0 if stop is None else stop.chance(0.95 if sure[-1] else 0.2)
        took = VERIFIED[verified] + DRAFT * len(sure)
        likely = {0: [0.95 if one else 0.2 for one in sure]} if stops and sure else {}
        more = {0: [(5, None)] * accepted} if verified else {}
        work = Work(0, 1 + verified, True, drafts=verified, propose=propose, stop=stop)
        policy.learn([work], [request], StepOutput([5], [None], accepted=more, likely=likely), took, counters)
        request.num_drafts = len(sure)
        seconds, tokens = seconds + took, tokens + 1 + accepted
    return tokens / seconds


def test_stops_are_faster_where_probabilities_tell() -> None:
    print(f"seed {SEED}")
    fixed, stopping = (speed(stops, random.Random(SEED)) for stops in (False, True))
    print(f"fixed numbers {fixed:.3f}, with stops {stopping:.3f}")
    assert stopping > 1.03 * fixed and stopping > 1.1


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", [SEED])
def test_nothing_changes(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a batch stop at numbers of their own, by their drafts' probabilities; tokens stay as they are."""
    save(LISTED[1], tmp_path / "model", seed)
    save_head(tmp_path / "head", tensors(200, seed=seed))
    limits: dict[str, Any] = {"cache": CACHE, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    compile_model(tmp_path / "model", tmp_path / "model.llmc", Options(**limits, draft=f"eagle:{tmp_path / 'head'}"))
    prompts, params = requests()
    params = [*params, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={5: 5.0, 9: 5.5})]
    prompts = [*prompts, {"prompt_token_ids": [7, 8, 9]}]
    with LLM(tmp_path / "model.llmc", say=quiet) as llm:
        want = results(llm, prompts, params)
    stop, seen = Stop((0.5, 0.6, 0.7, 0.8, 0.95, 0.99), 0.45), list[tuple[int, list[float]]]()
    monkeypatch.setattr(Speculation, "stop", lambda self, request: stop)
    run = DraftSteps.run

    def recorded(self: DraftSteps, work: Any, found: Any) -> dict[int, list[float]]:
        likely = run(self, work, found)
        seen.extend((work[index].propose, chances) for index, chances in likely.items())
        return likely

    monkeypatch.setattr(DraftSteps, "run", recorded)
    with LLM(tmp_path / "model.llmc", say=quiet, speculate="eagle") as llm:
        assert results(llm, prompts, params) == want
        assert [results(llm, [a], [b])[0] for a, b in zip(prompts, params, strict=True)] == want
        assert llm.stats()["spec_decode_num_accepted_tokens"] > 0
    for propose, likely in seen:
        going = [prod(map(stop.chance, likely[: i + 1])) >= stop.min_chance for i in range(len(likely))]
        assert all(0 < p <= 1.0001 for p in likely) and all(going[:-1])
        assert propose == 1 or len(likely) == propose or not going[-1]
    numbers = {len(likely) for propose, likely in seen if propose == 4}
    print(f"seed {seed}: {len(seen)} chains, of {sorted(numbers)} drafts")
    assert len(numbers) > 1
