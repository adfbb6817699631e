"""The simulator: millions of scheduler steps on the fake device, under invariants. Every seed can be replayed.

    python -m tests.runtime.simulator --steps 1000000 --jobs 2 [--seed N] [--depth N]

A run is a sequence of episodes. An episode is one world (sizes, load, faults) generated from its own seed, and ends
when idle. A failure prints the command that replays its episode.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from multiprocessing import Pool
from typing import Any

from llmc_runtime.engine.engine import Engine
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.request import RequestDelta
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig

from tests.runtime.audit import audit, check_logprobs, idle
from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.fake_ranks import FakeRanks
from tests.runtime.faulty_executor import FaultyExecutor
from tests.runtime.oracle import Expected
from tests.runtime.oracle_draft import draft_of
from tests.runtime.shares import WEIGHT, Shares
from tests.runtime.time_limit import time_limit
from tests.runtime.world import draw_world

EPISODE = 1500  # steps with arrivals
AUDIT_EVERY = 20  # mean number of steps between full audits
LONGEST = 300  # seconds of an episode; most take less than one


class SimulationFailure(AssertionError):
    """An invariant was violated in the episode with this seed."""

    def __init__(self, seed: int, step: int, cause: BaseException, depth: int | None = None) -> None:
        super().__init__(seed, step, cause, depth)
        self.seed, self.step, self.cause, self.depth = seed, step, cause, depth

    def __str__(self) -> str:
        return (
            f"episode {self.seed}, step {self.step}: {type(self.cause).__name__}: {self.cause}\n"
            f"  Replay: python -m tests.runtime.simulator --seed {self.seed} --steps 1"
            f"{'' if self.depth is None else f' --depth {self.depth}'}"
        )


class Interrupt(BaseException):
    """Simulates Ctrl-C."""


class Watch:
    """Checks every plan on its way to the device, and aborts requests while the device runs."""

    def __init__(self, episode: Episode, inner: Any) -> None:
        self.episode, self.inner, self.depth, self.settle = episode, inner, inner.depth, inner.settle

    def launch(self, step: Any) -> Any:
        """Check the guarantees of every plan."""
        episode = self.episode
        config, scheduler = episode.world.config, episode.engine.scheduler
        scheduled = rows = 0
        for work in step.work:
            scheduled += work.num_tokens
            rows += work.rows
        assert scheduled <= config.max_num_batched_tokens, f"{scheduled} tokens in a step"
        assert rows <= config.logits, f"{rows} rows of logits in a step"
        assert all(r.num_total <= r.limit for r in scheduler.running), "work after the last token"
        # No starvation: the first in line runs in every step, unless its last token by length is in flight; and under
        # fcfs it is the oldest live request.
        for request in scheduler.running:
            if any(work.row == request.row for work in step.work):
                break
            if request.guide is not None and (episode.world.late_masks or request.num_masked is not None):
                continue  # it may wait for its mask
            assert request.num_total == request.limit, "the first running request does not run"
        episode.shares.launched(step, scheduler)
        episode.look()
        if config.policy == "fcfs" and episode.world.tenants == 1:
            oldest = next(name for name in episode.expected if name in scheduler.requests)
            assert scheduler.running[0].id == oldest, f"{oldest} is the oldest and not first in line"
        return self.inner.launch(step)

    def guide(self, ticket: Any, masks: Any) -> None:
        """Pass the masks of an open step on; a request may be aborted before or after."""
        episode = self.episode
        when = episode.world.rng.randrange(8 * episode.world.abort_every)
        if when == 0:
            episode.abort()
        self.inner.guide(ticket, masks)
        if when == 1:
            episode.abort()

    def wait(self, ticket: Any) -> Any:
        """Wait for an output; a request may be aborted before or after."""
        episode = self.episode
        when = episode.world.rng.randrange(8 * episode.world.abort_every)
        if when == 0:
            episode.abort()
        output = self.inner.wait(ticket)
        if when == 1:
            episode.abort()
        return output


class Episode:
    """One world, from its first request until it is idle."""

    def __init__(self, seed: int, depth: int | None = None) -> None:
        self.seed, self.world = seed, draw_world(seed)
        self.depth, self.forced = depth or self.world.depth, depth is not None
        config, rng = self.world.config, self.world.rng
        self.expected: dict[str, Expected] = {}  # live requests, in order of arrival
        self.deadline: dict[str, int] = {}
        self.backlog = 0  # tokens that live requests may still require
        self.backlogs: Counter[str] = Counter()  # the same by tenant
        self.shares, self.ended = Shares(), Counter[str]()
        self.steps = self.submitted = 0
        self.generated = self.guided = self.scored = 0
        self.device = make_device(config, self.depth, random.Random(seed))
        executor: Any = self.device
        if self.world.ranks > 1:
            faults = rng if self.world.kind == "failure" else None
            others = [make_device(config, self.depth, random.Random(seed)) for _ in range(1, self.world.ranks)]
            executor = FakeRanks(executor, others, faults)
        if self.world.kind == "interrupts":
            executor = FaultyExecutor(executor, rng, 50, Interrupt)
        elif self.world.kind == "failure" and self.world.ranks == 1:
            executor = FaultyExecutor(executor, rng, 700, lambda: OSError("the device is gone"))
        clock = accumulate(iter(random.Random(seed).random, None)).__next__
        self.draft = draft_of(config, seed)
        scheduler = Scheduler(config, lambda: rng.randrange(1 << 64), clock, self.draft)
        scheduler.pool.released_per_step = random.Random(seed).choice((1, 8, 1024))
        if self.draft is not None:
            self.draft.requests = scheduler.requests
        self.engine = Engine(scheduler, Watch(self, executor), grace=0.0)

    def run(self, most: int = EPISODE) -> None:
        """Run about `most` steps with arrivals, then drain. Raises SimulationFailure if an invariant is violated."""
        rng, engine = self.world.rng, self.engine
        target = 1
        try:
            while self.steps < most and engine.error is None:
                if rng.randrange(30) == 0:
                    target = rng.randint(0, self.world.max_live) if rng.random() < 0.5 else self.world.max_live
                if not self.expected:
                    self.check_idle()
                    target = target or 1
                while len(self.expected) < target:
                    self.submit()
                if rng.randrange(self.world.abort_every) == 0:
                    self.abort()
                self.step()
            patience = self.steps + (self.backlog * 2 + 100) * (60 if self.world.late_masks else 1)
            while engine.has_work():
                self.step()
                assert self.steps < patience, "the requests do not end"
            self.check_idle()
        except (Exception, Interrupt) as cause:
            raise SimulationFailure(self.seed, self.steps, cause, self.depth if self.forced else None) from cause

    def submit(self) -> None:
        """Submit a request; sometimes also one that must be rejected."""
        self.submitted += 1
        if self.world.rng.randrange(40) == 0:
            try:
                self.engine.add(self.world.impossible(self.submitted))
            except LlmcError:
                pass
            else:
                raise AssertionError("a request that cannot run was accepted")
        for request in self.world.family(self.submitted):
            guided = request.guide is not None
            self.look()
            self.engine.add(request)
            expected = self.expected[request.id] = Expected(request, self.world.config, guided)
            self.shares.submitted(expected.num_prompt, expected.longest())
            self.backlog += expected.longest()
            self.backlogs[request.tenant] += expected.longest()
            self.deadline[request.id] = self.steps + self.patience(request.tenant)

    def look(self) -> None:
        """Check, under fcfs, that waiting tenants get equal service."""
        if self.world.config.policy == "fcfs":
            self.shares.look(self.engine.scheduler)

    def patience(self, tenant: str) -> int:
        """Return the number of steps within which the tenant's last request has to end under fcfs.

        With a single tenant, every step advances the oldest request. With several, each of the others may get as much
        service as this tenant's backlog and the bound.
        """
        if self.world.tenants == 1:
            return self.backlog + self.depth - 1
        return 2 * self.world.tenants * (WEIGHT * self.backlogs[tenant] + self.shares.bound)

    def abort(self) -> None:
        """Abort a random live request and check that the engine has no trace of it."""
        live = [name for name in self.expected if name in self.engine.scheduler.requests]
        if live:
            name = self.world.rng.choice(live)
            assert self.engine.abort(name), f"{name} cannot be aborted"
            assert not self.engine.abort(name), f"{name} was aborted twice"
            self.end(name, "abort")
            self.look()

    def step(self) -> None:
        """Run an engine step and check it."""
        self.steps += 1
        try:
            deltas = self.engine.step()
        except Interrupt:
            return
        if self.engine.error is not None:
            self.check_failure(deltas)
            return
        for delta in deltas:
            self.check(delta)
        if self.world.rng.randrange(AUDIT_EVERY) == 0:
            audit(self.engine.scheduler, self.device, self.expected)

    def check(self, delta: RequestDelta) -> None:
        """Check that the token and the end agree with the oracle."""
        expected = self.expected.get(delta.id)
        assert expected is not None, f"{delta.id} answered after its end"
        if expected.late is not None:
            got_late = (delta.new_token_ids, delta.finish_reason, delta.stop_reason)
            assert got_late == ([], expected.late, None), f"{delta.id}: {got_late} after its guide ended it"
            self.check_end(delta, expected, expected.late)
            return
        finish = None
        for index, got in enumerate(delta.new_token_ids):
            assert finish is None, f"{delta.id}: tokens after the last one"
            token, finish, stop = expected.next()
            if not index:
                assert delta.prompt_logprobs == expected.scores(), f"{delta.id}: scores of the prompt"
            last = index == len(delta.new_token_ids) - 1
            if self.world.late_masks and expected.ended_by_guide(finish) and last and delta.finish_reason is None:
                expected.late, finish = finish, None
            assert got == token, f"{delta.id}: {got}, expected {token}"
        found = (delta.finish_reason, delta.stop_reason)
        assert found == (finish, stop), f"{delta.id}: {found}, expected {finish, stop}"
        check_logprobs(delta, expected.request.params.logprobs)
        self.scored += len(delta.prompt_logprobs or ())
        self.account(expected, len(delta.new_token_ids))
        self.check_end(delta, expected, finish)

    def account(self, expected: Expected, tokens: int) -> None:
        """Count generated tokens."""
        self.generated += tokens
        self.guided += tokens * expected.guided
        for _ in range(tokens):
            self.shares.generated(expected.request.tenant)

    def check_end(self, delta: RequestDelta, expected: Expected, finish: str | None) -> None:
        """Check the conditions that hold when a request ends."""
        assert (delta.error is not None) == (finish == "error"), f"{delta.id}: {delta.error}"
        if finish is not None:
            if self.world.config.policy == "fcfs" and self.world.kind == "calm" and not self.world.late_masks:
                assert self.steps <= self.deadline[delta.id], f"{delta.id} starved"
            if self.world.rng.randrange(8) == 0:
                self.world.remember(expected.tokens)
            self.end(delta.id, finish)

    def end(self, name: str, reason: str) -> None:
        """Record that a request ended; this happens once per request."""
        expected = self.expected.pop(name)
        self.backlog -= expected.longest()
        self.backlogs[expected.request.tenant] -= expected.longest()
        del self.deadline[name]
        self.ended[reason] += 1

    def check_failure(self, deltas: list[RequestDelta]) -> None:
        """Check that a device failure is reported once to every live request, that those which had ended for another
        reason get that one, and that no new request is accepted.
        """
        for delta in [delta for delta in deltas if delta.error is not self.engine.error]:
            self.check(delta)
            deltas.remove(delta)
        error, cause = str(self.engine.error), "E119" if self.world.ranks > 1 else "the device is gone"
        assert self.world.kind == "failure" and cause in error, error
        assert [delta.id for delta in deltas] == list(self.expected), "which requests got an end"
        for delta in deltas:
            assert delta.finish_reason == "error" and delta.error is self.engine.error
            self.end(delta.id, "error")
        try:
            self.engine.add(self.world.request(0))
        except LlmcError as error:
            assert error is self.engine.error
        else:
            raise AssertionError("a dead engine accepted a request")

    def check_idle(self) -> None:
        """Check that everything is released and counted when there are no requests."""
        scheduler = self.engine.scheduler
        assert not self.engine.has_work() and not self.expected and not self.backlog
        assert scheduler.pool.reclaim(scheduler.pool.num_pages) and idle(self.engine), self.engine.stats()
        audit(scheduler, self.device, self.expected)
        if self.draft is not None and self.engine.error is None:
            assert not self.draft.known, "outputs that ended unnoticed by their Draft, or it failed"
        counters = scheduler.counters
        ended = {reason: count for reason, count in counters.request_success.items() if count}
        assert ended == dict(self.ended), f"{ended} counted, {dict(self.ended)} seen"
        assert counters.generation_tokens >= self.generated and counters.num_scheduled_tokens >= self.generated
        if self.world.rng.randrange(8) == 0:
            assert scheduler.reset_prefix_cache() and not len(scheduler.prefix)


def make_device(config: SchedulerConfig, depth: int = 1, rng: random.Random | None = None) -> FakeExecutor:
    """Return a fake device of this size."""
    sizes = config.max_num_seqs, config.num_pages, config.page_size, config.vocab_size, config.max_model_len
    head = config.speculation is not None and bool(config.speculation.head)
    stops = depth == 1 and config.speculation is not None and config.speculation.stops
    states = config.snapshots, config.speculation.num_tokens if config.speculation else 0
    return FakeExecutor(*sizes, config.max_num_batched_tokens, depth, rng, config.logits, head, stops, *states)


def simulate(seed: int, steps: int, stride: int = 1, depth: int | None = None) -> Counter[str]:
    """Run episodes with the seeds seed, seed + stride, ... until `steps` steps are done, and return statistics.

    `depth` sets the maximum number of steps in flight in every episode; None: random in each world.
    """
    total: Counter[str] = Counter()
    while total["steps"] < steps:
        episode = Episode(seed, depth)
        with time_limit(LONGEST):
            episode.run()
        total += summary(episode)
        seed += stride
    return total


def summary(episode: Episode) -> Counter[str]:
    """Return the statistics of an episode."""
    counters = episode.engine.counters
    return Counter(
        episodes=1,
        steps=episode.steps,
        in_ranks=episode.steps if episode.world.ranks > 1 else 0,
        overlapped=episode.steps if episode.depth > 1 else 0,
        guided=episode.guided,
        scored=episode.scored,
        shared=episode.shares.met,
        requests=episode.submitted,
        computed=counters.num_scheduled_tokens,
        generated=episode.generated,
        preemptions=counters.num_preemptions,
        hits=counters.prefix_cache_hits,
        restored=0 if episode.world.config.snapshots is None else counters.prefix_cache_hits,
        drafts=counters.spec_decode_num_draft_tokens,
        accepted=counters.spec_decode_num_accepted_tokens,
        **{f"ended by {reason}": count for reason, count in episode.ended.items()},
    )


def run(seed: int, steps: int, jobs: int, depth: int | None) -> Iterator[Counter[str]]:
    """Yield the statistics of each job. Raises the first SimulationFailure, and ends the other jobs then."""
    if jobs == 1:
        yield simulate(seed, steps, depth=depth)
        return
    with Pool(jobs) as pool:
        job = partial(simulate, steps=-(-steps // jobs), stride=jobs, depth=depth)
        yield from pool.imap_unordered(job, range(seed, seed + jobs))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Simulate the scheduler on a fake device, under invariants.")
    parser.add_argument("--steps", type=int, default=100_000, help="scheduler steps in all (default 100000)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first episode (default: drawn)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--depth", type=int, default=None, help="most steps under way (default: drawn, 1 to 3)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 40) if options.seed is None else options.seed
    print(f"simulator: --seed {seed} --steps {options.steps} --jobs {options.jobs}", flush=True)
    start = time.monotonic()
    try:
        total = sum(run(seed, options.steps, options.jobs, options.depth), Counter())
    except SimulationFailure as failure:
        print(failure, file=sys.stderr)
        return 1
    print(", ".join(f"{count} {name}" for name, count in total.items()))
    cpu = sum(os.times()[:4])
    print(f"{time.monotonic() - start:.1f} s, {cpu:.1f} s of CPU, {1e6 * cpu / total['steps']:.0f} us of CPU a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
