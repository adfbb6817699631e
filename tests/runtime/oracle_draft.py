"""A Draft that knows the tokens of the fake device, and is often wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate

from llmc_runtime.drafts import Draft, DraftContext
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.scheduler_config import SchedulerConfig

from tests.runtime.fake_executor import ROOT, link
from tests.runtime.oracle import Expected


class OracleDraft(Draft):
    """Draws nothing, the right tokens, or some wrong ones; too many at times, and ids that do not exist."""

    requests: Mapping[str, Request]  # the live ones

    def __init__(self, rng: random.Random, config: SchedulerConfig) -> None:
        self._rng, self._config = rng, config
        self.known: set[str] = set()  # outputs that something was proposed for

    def propose(self, context: DraftContext, most: int) -> Sequence[int]:
        """Return the tokens of the device, each of which is wrong with a probability of 0.2."""
        rng, vocab = self._rng, self._config.vocab_size
        self.known.add(context.id)
        right = Expected(self.requests[context.id], self._config)
        assert list(context.tokens[: right.num_prompt]) == right.tokens and context.num_prompt == right.num_prompt
        right.tokens = list(context.tokens)
        right.chain = list(accumulate(right.tokens, link, initial=ROOT))
        count = rng.choice((0, most, most, most + 2))
        drafts = [right.next()[0] for _ in range(count)]
        return [token if rng.random() < 0.8 else rng.randrange(-1, vocab + 2) for token in drafts]

    def end(self, context: DraftContext) -> None:
        """Each output ends once."""
        self.known.remove(context.id)


def draft_of(config: SchedulerConfig, seed: int) -> OracleDraft | None:
    """Return a Draft for a scheduler that drafts on the host, else None."""
    on_host = config.speculation is not None and config.speculation.host
    return OracleDraft(random.Random(seed), config) if on_host else None
