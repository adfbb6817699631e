"""Random worlds for the simulator of tests/runtime/simulator.py.

A world has the configuration of a scheduler, the faults of its device, and the requests of its clients. All follow from
a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.speculation_config import SpeculationConfig

from tests.runtime.guides import Wandering

KINDS = ("calm",) * 17 + ("interrupts",) * 2 + ("failure",)


@dataclass
class World:
    """The configuration of an episode and the probabilities of its events.

    rng: the source of all random numbers of the requests.
    kind: "calm"; "interrupts": some steps raise Interrupt; "failure": the device fails at some step.
    abort_every: steps between two aborts, on average.
    max_live: upper bound of the number of requests that run or wait at a time.
    longest: usual maximum of the tokens of a prompt and of an output.
    depth: maximum number of steps in flight.
    guided_share: share of the requests that have a guide.
    late_masks: whether masks of guides can be ready later than their step.
    tenants, ranks: numbers of them.
    prefixes: token sequences with which prompts start.
    tenant_weights: the current relative number of requests of each tenant.
    """

    rng: random.Random
    config: SchedulerConfig
    kind: str
    abort_every: int
    max_live: int
    longest: int
    depth: int = 1
    guided_share: float = 0.0
    late_masks: bool = False
    tenants: int = 1
    ranks: int = 1
    prefixes: list[list[int]] = field(default_factory=list)
    tenant_weights: list[float] = field(default_factory=list)

    @property
    def max_total(self) -> int:
        """The maximum number of tokens of a prompt and its output together."""
        return min(self.config.max_model_len, self.config.pool_tokens + 1)

    def request(self, number: int) -> Request:
        """Return a request that can run."""
        rng = self.rng
        prompt = self._prompt(self.max_total)
        remaining = self.max_total - len(prompt)
        max_tokens = None if rng.random() < 0.05 else min(remaining, rng.randint(1, self.longest))
        salt = "" if rng.random() < 0.9 else "other"
        bad_words, guide, tenant = self._bad_words(), self._guide(), self._tenant()
        params = self._params(max_tokens)
        return Request(f"r{number}", prompt, params, rng.randrange(3), salt, bad_words, guide, tenant=tenant)

    def family(self, number: int) -> list[Request]:
        """Return a request, rarely followed by others with the same prompt (as those of the API's parameter n)."""
        first = self.request(number)
        if self.rng.random() > 0.03:
            return [first]
        remaining = self.max_total - len(first.prompt_token_ids)
        others = []
        for i in range(1, self.rng.randint(2, 5)):
            params = self._params(min(remaining, self.rng.randint(1, self.longest)))
            prompt, priority, salt = first.prompt_token_ids, first.priority, first.cache_salt
            others.append(Request(f"r{number}.{i}", prompt, params, priority, salt, leader=first, tenant=first.tenant))
        return [first, *others]

    def _tenant(self) -> str:
        """Return the tenant of the next request; rarely, the tenants' weights change first."""
        if self.tenants == 1:
            return ""
        if not self.tenant_weights or self.rng.random() < 0.02:
            self.tenant_weights = [self.rng.choice((0.02, 0.2, 0.5, 1.0)) for _ in range(self.tenants)]
            self.tenant_weights[self.rng.randrange(self.tenants)] = 5.0
        return self.rng.choices([f"t{i}" for i in range(self.tenants)], self.tenant_weights)[0]

    def _bad_words(self) -> list[list[int]]:
        """Return the bad words of a request, as tokens; most requests have none."""
        rng, vocab = self.rng, self.config.vocab_size
        number = rng.choice((0,) * 19 + (1, 4))
        return [rng.choices(range(vocab), k=rng.choice((1, 1, 2, 3))) for _ in range(number)]

    def _guide(self) -> Wandering | None:
        guided = self.rng.random() < self.guided_share
        return Wandering(self.config.vocab_size, self._delay) if guided else None

    def _delay(self) -> int:
        """Return how many times a mask is requested before it is ready."""
        return self.rng.choice((0, 0, 0, 1, 2, 3, 5, 40)) if self.late_masks else 0

    def _prompt(self, room: int) -> list[int]:
        rng = self.rng
        max_length = room - 1 if rng.random() < 0.05 else max(1, room // rng.choice((2, 3, 6)))
        start: list[int] = []
        if rng.random() < 0.6:
            prefix = rng.choice(self.prefixes)
            start = prefix[: rng.randint(0, len(prefix)) if rng.random() < 0.5 else len(prefix)]
        rest = rng.choices(range(self.config.vocab_size), k=rng.randint(not start, max(1, self.longest // 2)))
        return (start + rest)[:max_length] or [0]

    def _params(self, max_tokens: int | None) -> SamplingParams:
        rng = self.rng
        if rng.random() < 0.6:
            return SamplingParams(temperature=0.0, max_tokens=max_tokens)
        min_tokens = rng.randint(0, min(max_tokens if max_tokens is not None else 8, 8)) if rng.random() < 0.5 else 0
        vocab = self.config.vocab_size
        ids, first = rng.choices(range(vocab), k=rng.randint(0, 4)), rng.randrange(vocab - 24)
        return SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=ids,
            ignore_eos=rng.random() < 0.3,
            seed=rng.randrange(1 << 64) if rng.random() < 0.5 else None,
            logprobs=rng.choice((None, None, None, 0, 2)),
            prompt_logprobs=rng.choice((None,) * 12 + (0, 2)),
            logit_bias={rng.randrange(vocab): rng.uniform(-9, 9)} if rng.random() < 0.1 else None,
            allowed_token_ids=range(first, first + 24) if rng.random() < 0.1 else None,
        )

    def impossible(self, number: int) -> Request:
        """Return a request that must be rejected."""
        rng, config, name = self.rng, self.config, f"bad{number}"
        prompts = [[], [config.vocab_size], [0, -1], [0] * config.max_model_len]
        if rng.random() < 0.5:
            return Request(name, rng.choice(prompts))
        return Request(name, [0], SamplingParams(max_tokens=max(config.max_model_len, config.pool_tokens + 1)))

    def remember(self, tokens: list[int]) -> None:
        """Replace a prefix of later prompts by a finished sequence, as the turns of a conversation do."""
        self.prefixes[self.rng.randrange(len(self.prefixes))] = tokens[:64]


def draw_world(seed: int) -> World:
    """Return a world with a small pool and few rows; the pool is sometimes too small for the rows."""
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 3, 4, 4, 8, 16))
    rows = rng.choice((1, 2, 3, 4, 6, 8, 12, 16))
    longest = rng.choice((6, 16, 32, 32, 64))
    drafts = rng.choice((1, 2, 5))
    config = _draw_config(seed, rng, page_size, rows, longest, drafts)
    world = World(
        rng,
        config,
        kind=rng.choice(KINDS),
        abort_every=rng.choice((20, 50, 1000)),
        max_live=rng.choice((2, 8, 16, 32)),
        longest=longest,
        depth=rng.choice((1, 1, 1, 2, 2, 2, 3)),
        guided_share=rng.choice((0, 0, 0.05, 0.3)),
    )
    world.tenants = rng.choice((1, 1, 2, 3, 5))
    world.late_masks = bool(world.guided_share) and rng.random() < 0.5
    for _ in range(4):
        world.prefixes.append(_draw_tokens(world))
    world.ranks = rng.choice((1, 1, 1, 2, 3))
    has_draft_model = config.speculation is not None and config.speculation.max_rows > 0
    if seed % 2 and world.ranks == 1 and has_draft_model:
        _let_drafting_stop(world, drafts)
    world.prefixes.append(world.prefixes[0] + _draw_tokens(world))
    return world


def _draw_config(
    seed: int, rng: random.Random, page_size: int, rows: int, longest: int, drafts: int
) -> SchedulerConfig:
    draft_methods = _draw_draft_methods(seed, rng, rows, drafts)
    pool_tokens = rng.randint(longest, longest * (1 + rows // rng.choice((1, 3))))
    return SchedulerConfig(
        num_pages=max(2, pool_tokens // page_size),
        page_size=page_size,
        max_model_len=rng.choice((longest, 2 * longest, 3 * longest)),
        max_num_seqs=rows,
        max_num_batched_tokens=rng.choice((1, rows, 16, 32, 64, 64)),
        vocab_size=rng.choice((40, 64, 1000)),
        eos_token_ids=rng.choice(((), (1,), (1, 2, 3))),
        policy=rng.choice(("fcfs", "fcfs", "priority")),
        watermark=rng.choice((0.0, 0.01, 0.2)),
        prefix_caching=rng.random() < 0.85,
        long_prefill_threshold=rng.choice((0, 0, 0, 3, 16)),
        context=f"artifact {seed}",
        speculation=rng.choice((None, *draft_methods)),
        max_num_logits=rng.choice((0, 2 * rows, 6 * rows)),
        max_masks=rng.choice((1, 1 + drafts, 1 + drafts)),
        target_itl=rng.choice((0.0, 0.0, 1.0, 9.0)),
        snapshots=random.Random(f"{seed} states").choice((None, None, None, 0, 1, 2, 8)),
    )


def _draw_draft_methods(seed: int, rng: random.Random, rows: int, drafts: int) -> list[SpeculationConfig]:
    """Return configurations of prompt lookup, of a draft model or head on the device, and of drafts of the host."""
    max_rows = rng.choice((1, rows, rows))
    if rng.random() < 0.4:
        skips_prompts = random.Random(f"{seed} prompts").random() < 0.5
        on_device = SpeculationConfig(drafts, max_rows=max_rows, head="eagle", skips_prompts=skips_prompts)
    else:
        on_device = SpeculationConfig(drafts, max_rows=max_rows)
    return [SpeculationConfig(drafts, 1, 3), on_device, SpeculationConfig(drafts, host="oracle")]


def _let_drafting_stop(world: World, drafts: int) -> None:
    """Let the draft model stop early, which only one step in flight allows; a head is often combined with lookup."""
    rng, speculation = world.rng, world.config.speculation
    assert speculation is not None
    looks_up = bool(speculation.head) and rng.random() < 0.7
    low, high = (1, 3) if looks_up else (0, 0)
    world.depth = 1
    world.config = replace(world.config, speculation=replace(speculation, stops=True, min_ngram=low, max_ngram=high))
    if looks_up and rng.random() < 0.5:  # prompt lookup and masks together would be rare otherwise
        world.guided_share, world.config = 0.5, replace(world.config, max_masks=1 + drafts)


def _draw_tokens(world: World) -> list[int]:
    rng = world.rng
    return rng.choices(range(world.config.vocab_size), k=rng.randint(1, world.longest))
