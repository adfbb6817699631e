"""What drafting in vain costs, and how soon drafts begin that pay: the scheduler on steps of given costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from draw import SEED
from llmc_runtime.engine.engine import Engine
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.sched.step import RowMasks, Step, StepOutput

HEAD = SpeculationConfig(4, max_rows=32, head="eagle", stops=True, skips_prompts=True)
LOOKUP_AND_HEAD = replace(HEAD, min_ngram=3, max_ngram=5)
SIBLING = SpeculationConfig(4, max_rows=32, stops=True)
GPU_HEAD = SpeculationConfig(7, max_rows=32, head="eagle")
METHODS = {"head": HEAD, "lookup and head": LOOKUP_AND_HEAD, "sibling": SIBLING}
SHORT, LONG = 64, 1500  # tokens of a request
NOISE = 0.1  # a step takes up to this share longer
# Durations relative to a step without drafts, as measured on a CPU: of verifying 0 to 4 drafts of each row, of a pass
# of the head, what the first pass or verification after a pause takes longer, and of a head's entries in a step without
# drafts, with its plan; and of another plan that is not idle and has no prompt, by the number of rows.
VERIFY, PASS, COLD, ENTRIES = (0.0, 0.4, 0.6, 0.75, 1.0), 0.2, 0.4, 0.1
DECIDE = {1: 0.1, 8: 0.015, 32: 0.015}
PROMPT, PROMPT_ENTRIES = {1: 0.45, 8: 0.1, 32: 0.03}, 0.04  # of a prompt's token, and a head's entries' share of it
GPU_DRAFT = 0.05  # of verifying a draft, and of a pass of the head, on a GPU


class Device:
    """An executor of steps with given costs, with a scheduler and its clock.

    rate: the probability that a draft is accepted. found: the probability that prompt lookup finds drafts. plans: gets
    an item for each plan that is not idle.
    """

    depth = 1

    def __init__(
        self, config: SpeculationConfig, rows: int, rate: float, plans: list[int], found: float = 0.0, gpu: bool = False
    ) -> None:
        limits: dict[str, Any] = {"max_num_seqs": rows, "max_num_batched_tokens": 512, "max_num_logits": 8 * rows}
        sizes = SchedulerConfig(rows * 128, 16, 2048, vocab_size=40, speculation=config, **limits)
        self.config, self.rows, self.rate, self.found, self.gpu = config, rows, rate, found, gpu
        self.engine = Engine(Scheduler(sizes, lambda: 7, lambda: self.now), self)
        self.now, self.warm, self.draw = 0.0, False, random.Random(f"{SEED} {rows} {rate}")
        self.plans, self.decided = plans, 0  # decided: the length of `plans` before this step
        self.tokens = self.lost = 0.0  # tokens of each row, and what the steps took longer than as many without drafts
        self.prompts = 0.0  # what prompts took, without a head's entries

    def generate(self, name: str, length: int, temperature: float, prompt: int = 3) -> None:
        """Run requests of this length, after prompts of `prompt` tokens, one in each row."""
        for row in range(self.rows):
            params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True)
            words = random.Random(f"{name} {row}").choices(range(40), k=prompt)
            self.engine.add(Request(f"{name}.{row}", words, params))
        while self.engine.has_work():
            self.engine.step()
        assert self.engine.error is None

    def speed(self) -> float:
        """The tokens per second since `tokens` and `lost` were 0, relative to plain decoding."""
        return self.tokens / (self.tokens + self.lost)

    def launch(self, step: Step) -> Step:
        return step

    def guide(self, ticket: Step, masks: Sequence[RowMasks]) -> None:
        raise AssertionError("no request has a guide")

    def settle(self) -> None:
        raise AssertionError("no step is interrupted")

    def wait(self, ticket: Step) -> StepOutput:
        """Return the output of a step, after the time that it takes."""
        work = ticket.work
        found = [4 * (self.draw.random() < self.found) for _ in work]
        passes = [0 if item.lookup and count else item.propose for item, count in zip(work, found, strict=True)]
        accepted = {i: [(5, None)] * self.accepted(item.drafts) for i, item in enumerate(work) if item.drafts}
        more = self.cost(max(item.drafts for item in work), max(passes), ticket.plain)
        prompts = sum(item.num_tokens for item in work if item.num_tokens > 1 + item.drafts) * PROMPT[self.rows]
        if len(self.plans) > self.decided and ticket.plain and not (prompts or self.gpu):
            more += DECIDE[self.rows]
        self.decided = len(self.plans)
        more += any(item.fill for item in work)  # as long as a step
        more += PROMPT_ENTRIES * prompts if self.config.head and not ticket.plain else 0.0
        self.prompts += prompts
        self.now += (1 + prompts + more) * self.draw.uniform(1, 1 + NOISE)
        gained = sum(map(len, accepted.values())) / self.rows
        self.tokens, self.lost = self.tokens + (not prompts) + gained, self.lost + more - gained
        return StepOutput(
            [5 if item.emit else None for item in work],
            [None] * len(work),
            accepted=accepted,
            likely={} if self.gpu else {i: [max(self.rate, 0.3)] * count for i, count in enumerate(passes) if count},
            proposed=found if self.config.proposals else [],
        )

    def accepted(self, drafts: int) -> int:
        """Draw how many of the first drafts are accepted."""
        return next((n for n in range(drafts) if self.draw.random() >= self.rate), drafts)

    def cost(self, drafts: int, passes: int, plain: bool) -> float:
        """Return how much longer than one without drafts a step takes that verifies `drafts` drafts of a row."""
        if self.gpu:
            return GPU_DRAFT * (drafts + passes)
        more = VERIFY[drafts] + PASS * passes
        if drafts or passes:
            more += 0.0 if self.warm else COLD
        elif not plain:
            more += ENTRIES
        self.warm = bool(drafts or passes)
        return more


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("method", METHODS)
def test_the_cost_of_drafting_in_vain(method: str, rows: int, length: int, plans: list[int]) -> None:
    """No draft is ever accepted: less than 2 % of the first 3,000 steps are lost, and 1 % with several rows, including
    what it takes to learn the costs.
    """
    device = Device(METHODS[method], rows, 0.0, plans, 0.05 if method == "lookup and head" else 0.0)
    for number in range(2 * LONG // length):
        device.generate(str(number), length, 1.0)
    print(f"seed {SEED}: {device.lost:.1f} of {device.tokens} steps lost, {len(plans)} plans decided")
    assert 0 < device.lost < (0.02 if rows == 1 else 0.01) * device.tokens


@pytest.mark.parametrize("rows", [1, 8])
def test_the_cost_of_prompts_of_rows_that_do_not_draft(rows: int, plans: list[int]) -> None:
    """Their entries would take 4 % of the prompts' time. Less than 1 % of the time is lost, including all trials."""
    device = Device(LOOKUP_AND_HEAD, rows, 0.0, plans)
    for number in range(60):
        device.generate(str(number), 20, 1.0, 250)
    print(f"seed {SEED}: {device.lost:.1f} of {device.tokens + device.prompts:.0f} steps lost")
    assert 0 < device.lost < 0.01 * (device.tokens + device.prompts)


@pytest.mark.parametrize("rows", [1, 8])
def test_prompts_of_rows_that_draft(rows: int, plans: list[int]) -> None:
    """They get entries while drafts pay, also those of requests after the first ones."""
    device, skipped = Device(LOOKUP_AND_HEAD, rows, 0.9, plans), list[bool]()
    launch = device.launch

    def counted(step: Step) -> Step:
        if any(item.num_tokens > 1 + item.drafts for item in step.work):
            skipped.append(step.plain)
        return launch(step)

    device.launch = counted  # type: ignore[method-assign]
    for number in range(12):
        device.generate(str(number), 200, 0.0, 40)
    assert len(skipped) >= 12 and not any(skipped)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize(("gpu", "least"), [(True, 1.5), (False, 1.03)])
def test_drafts_that_pay_begin_at_once(gpu: bool, least: float, rows: int, plans: list[int]) -> None:
    """In the first 192 tokens of each row, in which costs are learned too."""
    device = Device(GPU_HEAD if gpu else LOOKUP_AND_HEAD, rows, 0.85, plans, gpu=gpu)
    device.generate("r", 192, 0.0)
    print(f"seed {SEED}: {device.speed():.3f}")
    assert device.speed() > least


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_drafts_begin_when_a_text_becomes_predictable(rows: int, plans: list[int]) -> None:
    """Within 1,500 tokens of a row, in short requests of the kind whose drafts were not accepted before.

    At the median of five runs: in one of 200, drafts of a single row begin later.
    """
    speeds = []
    for run in range(5):
        device = Device(LOOKUP_AND_HEAD, rows, 0.0, plans)
        device.draw = random.Random(f"{SEED} {rows} {run}")
        device.generate("before", LONG, 1.0)
        device.rate = 0.9
        for number in range(12):
            device.generate(f"meanwhile {number}", 128, 1.0)
        device.tokens = device.lost = 0.0
        device.generate("then", 128, 1.0)
        speeds.append(device.speed())
    print(f"seed {SEED}: {speeds}")
    assert median(speeds) > 1.15
