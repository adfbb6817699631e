"""Random worlds for the simulator: their sizes and requests, from one random source."""

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
    """One episode's sizes and habits; `rng` is its only source of chance."""

    rng: random.Random
    config: SchedulerConfig
    kind: str  # calm; interrupts: steps are lost now and then; failure: the device dies at some step
    abort_every: int  # steps between aborts, on average
    crowd: int  # most live requests that are aimed at
    longest: int  # tokens of a prompt or an output, mostly
    depth: int = 1  # most steps under way
    guides: float = 0.0  # share of requests that have one
    late_masks: bool = False
    tenants: int = 1  # whose requests they are
    ranks: int = 1
    stems: list[list[int]] = field(default_factory=list)  # beginnings that prompts share
    busy: list[float] = field(default_factory=list)  # how much each tenant asks for, at the moment

    def request(self, number: int) -> Request:
        """A request that can run."""
        rng, config = self.rng, self.config
        room = min(config.max_model_len, config.pool_tokens + 1)
        prompt = self._prompt(room)
        left = room - len(prompt)
        most = None if rng.random() < 0.05 else min(left, rng.randint(1, self.longest))
        salt = "" if rng.random() < 0.9 else "other"
        bans, tenant = self._bans(), self._tenant()
        return Request(f"r{number}", prompt, self._params(most), rng.randrange(3), salt, *bans, tenant=tenant)

    def family(self, number: int) -> list[Request]:
        """Yield a request, sometimes followed by others with the same prompt."""
        first = self.request(number)
        if self.rng.random() > 0.03:
            return [first]
        room = min(self.config.max_model_len, self.config.pool_tokens + 1) - len(first.prompt_token_ids)
        others = [
            Request(
                f"r{number}.{i}", first.prompt_token_ids, self._params(min(room, self.rng.randint(1, self.longest))),
                first.priority, first.cache_salt, leader=first, tenant=first.tenant,
            )
            for i in range(1, self.rng.randint(2, 5))
        ]  # fmt: skip
        return [first, *others]

    def _tenant(self) -> str:
        """Whose request the next one is; now and then their habits change."""
        if self.tenants == 1:
            return ""
        if not self.busy or self.rng.random() < 0.02:
            self.busy = [self.rng.choice((0.02, 0.2, 0.5, 1.0)) for _ in range(self.tenants)]
            self.busy[self.rng.randrange(self.tenants)] = 5.0
        return self.rng.choices([f"t{i}" for i in range(self.tenants)], self.busy)[0]

    def _bans(self) -> tuple[list[list[int]], Wandering | None]:
        """Bad words, and a guide, of few requests."""
        rng, vocab = self.rng, self.config.vocab_size
        words = [rng.choices(range(vocab), k=rng.choice((1, 1, 2, 3))) for _ in range(rng.choice((0,) * 19 + (1, 4)))]
        return words, Wandering(vocab, self._delay) if rng.random() < self.guides else None

    def _delay(self) -> int:
        """Return how many times a mask is requested before it is ready."""
        return self.rng.choice((0, 0, 0, 1, 2, 3, 5, 40)) if self.late_masks else 0

    def _prompt(self, room: int) -> list[int]:
        rng = self.rng
        most = room - 1 if rng.random() < 0.05 else max(1, room // rng.choice((2, 3, 6)))
        head: list[int] = []
        if rng.random() < 0.6:
            stem = rng.choice(self.stems)
            head = stem[: rng.randint(0, len(stem)) if rng.random() < 0.5 else len(stem)]
        tail = rng.choices(range(self.config.vocab_size), k=rng.randint(not head, max(1, self.longest // 2)))
        return (head + tail)[:most] or [0]

    def _params(self, most: int | None) -> SamplingParams:
        rng = self.rng
        if rng.random() < 0.6:
            return replace(_PLAIN, max_tokens=most)
        low = rng.randint(0, min(most if most is not None else 8, 8)) if rng.random() < 0.5 else 0
        vocab = self.config.vocab_size
        ids, first = rng.choices(range(vocab), k=rng.randint(0, 4)), rng.randrange(vocab - 24)
        return SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            max_tokens=most,
            min_tokens=low,
            stop_token_ids=ids,
            ignore_eos=rng.random() < 0.3,
            seed=rng.randrange(1 << 64) if rng.random() < 0.5 else None,
            logprobs=rng.choice((None, None, None, 0, 2)),
            prompt_logprobs=rng.choice((None,) * 12 + (0, 2)),
            logit_bias={rng.randrange(vocab): rng.uniform(-9, 9)} if rng.random() < 0.1 else None,
            allowed_token_ids=range(first, first + 24) if rng.random() < 0.1 else None,
        )

    def impossible(self, number: int) -> Request:
        """A request that must be refused."""
        rng, config, name = self.rng, self.config, f"bad{number}"
        prompts = [[], [config.vocab_size], [0, -1], [0] * config.max_model_len]
        if rng.random() < 0.5:
            return Request(name, rng.choice(prompts))
        return Request(name, [0], SamplingParams(max_tokens=max(config.max_model_len, config.pool_tokens + 1)))

    def remember(self, tokens: list[int]) -> None:
        """A finished sequence becomes a beginning that later prompts share, as in a conversation."""
        self.stems[self.rng.randrange(len(self.stems))] = tokens[:64]


_PLAIN = SamplingParams(temperature=0.0)


def _with_model(seed: int, drafts: int, most: int, head: bool) -> SpeculationConfig:
    """A draft model or a head, which can skip prompts in half of the worlds."""
    if not head:
        return SpeculationConfig(drafts, max_rows=most)
    skips_prompts = random.Random(f"{seed} prompts").random() < 0.5
    return SpeculationConfig(drafts, max_rows=most, head="eagle", skips_prompts=skips_prompts)


def draw_world(seed: int) -> World:
    """A small world: tiny pools, short budgets, few rows, now and then a roomy one."""
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 3, 4, 4, 8, 16))
    rows = rng.choice((1, 2, 3, 4, 6, 8, 12, 16))
    longest = rng.choice((6, 16, 32, 32, 64))
    drafts = rng.choice((1, 2, 5))
    most = rng.choice((1, rows, rows))
    drafting = (
        SpeculationConfig(drafts, 1, 3),
        _with_model(seed, drafts, most, rng.random() < 0.4),
        SpeculationConfig(drafts, host="oracle"),
    )
    tokens = rng.randint(longest, longest * (1 + rows // rng.choice((1, 3))))  # of the pool: from starved to roomy
    config = SchedulerConfig(
        num_pages=max(2, tokens // page_size),
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
        speculation=rng.choice((None, *drafting)),
        max_num_logits=rng.choice((0, 2 * rows, 6 * rows)),
        max_masks=rng.choice((1, 1 + drafts, 1 + drafts)),
        target_itl=rng.choice((0.0, 0.0, 1.0, 9.0)),
        snapshots=random.Random(f"{seed} states").choice((None, None, None, 0, 1, 2, 8)),
    )
    habits = (rng.choice(KINDS), rng.choice((20, 50, 1000)), rng.choice((2, 8, 16, 32)), longest)
    world = World(rng, config, *habits, depth=rng.choice((1, 1, 1, 2, 2, 2, 3)), guides=rng.choice((0, 0, 0.05, 0.3)))
    world.tenants = rng.choice((1, 1, 2, 3, 5))
    world.late_masks = bool(world.guides) and rng.random() < 0.5
    for _ in range(4):
        world.stems.append(rng.choices(range(config.vocab_size), k=rng.randint(1, longest)))
    world.ranks = rng.choice((1, 1, 1, 2, 3))
    drafts_by = config.speculation
    if seed % 2 and world.ranks == 1 and drafts_by is not None and drafts_by.max_rows:
        low, high = (1, 3) if drafts_by.head and rng.random() < 0.7 else (0, 0)
        stopping = replace(drafts_by, stops=True, min_ngram=low, max_ngram=high)
        world.depth, world.config = 1, replace(config, speculation=stopping)
        if low and rng.random() < 0.5:  # lookups together with masks: rarely drawn otherwise
            world.guides, world.config = 0.5, replace(world.config, max_masks=1 + drafts)
    world.stems.append(world.stems[0] + rng.choices(range(config.vocab_size), k=rng.randint(1, longest)))
    return world
