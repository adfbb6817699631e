"""Stops a draft model or head after tokens that are unlikely to be accepted.

A device whose calls return after completion returns the probability that the draft model gives to each token that it
drafts before the next one is drafted. From the recent acceptance of drafts with such probabilities follows the
probability that the next step accepts all drafts so far. Drafting ends when it is below the cost of one more draft.

The output is not affected. A step samples the tokens from the model's own distribution, with random numbers that depend
on seed and position only, and accepts a draft only if it equals its sample (see the op row_accept): for any
number of drafts, the tokens are those of plain decoding. The number also depends on nothing that the step has yet to
sample: on drafts, their probabilities, and tokens that are known.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

_BOUNDS = (0.1, 0.25, 0.45, 0.7, 0.9)  # boundaries between intervals of probabilities
_RATE_INTERVALS = 4  # intervals of a row's rate of acceptance
_PRIOR_WEIGHT = 4.0  # weight of the estimate before any draft was verified, in drafts
_MEMORY = 0.98  # weight of earlier drafts at each further one


@dataclass(frozen=True, slots=True)
class Stop:
    """When to stop drafting for a row.

    chances: the probability that a draft is accepted if those before it are, by the interval of the draft's own
    probability. min_chance: drafting ends when the probability that all drafts are accepted falls below it.
    """

    chances: tuple[float, ...]
    min_chance: float

    def chance(self, probability: float) -> float:
        """Return the probability of acceptance of a draft to which the draft model gives this probability."""
        return self.chances[bisect(_BOUNDS, probability)]


class Chances:
    """How often drafts were accepted, by their probabilities and by the rate of acceptance of their rows."""

    def __init__(self) -> None:
        middles = [(low + high) / 2 for low, high in zip((0.0, *_BOUNDS), (*_BOUNDS, 1.0))]
        rates = [(interval + 0.5) / _RATE_INTERVALS for interval in range(_RATE_INTERVALS)]
        self._counts = [  # drafts and how many of them were accepted, by intervals of rates and probabilities
            [(_PRIOR_WEIGHT, _PRIOR_WEIGHT * (middle + rate) / 2) for middle in middles] for rate in rates
        ]
        self._chances: list[tuple[float, ...] | None] = [None] * _RATE_INTERVALS

    def of_rate(self, rate: float) -> tuple[float, ...]:
        """Return the probabilities of acceptance (see Stop.chances) for a row with this rate of acceptance."""
        interval = _rate_interval(rate)
        chances = self._chances[interval]
        if chances is None:
            chances = self._chances[interval] = tuple(accepted / drafts for drafts, accepted in self._counts[interval])
        return chances

    def record_run(self, rate: float, probabilities: Sequence[float], accepted: int) -> None:
        """Record that the first `accepted` of the drafts of a row were accepted, and the next one was not."""
        for index, probability in enumerate(probabilities[: accepted + 1]):
            self.record(rate, probability, index < accepted)

    def record(self, rate: float, probability: float, accepted: bool) -> None:
        """Record whether a draft was accepted; all drafts before it were."""
        interval, column = _rate_interval(rate), bisect(_BOUNDS, probability)
        past_drafts, past_accepted = self._counts[interval][column]
        self._counts[interval][column] = (_MEMORY * past_drafts + 1, _MEMORY * past_accepted + accepted)
        self._chances[interval] = None


def _rate_interval(rate: float) -> int:
    return min(_RATE_INTERVALS - 1, int(rate * _RATE_INTERVALS))


def worth_verifying(stop: Stop, probabilities: Sequence[float], costs: Sequence[float]) -> int:
    """Return how many of the drafts with these probabilities to verify.

    costs: the cost of verifying 0, 1, 2 and so on of them, in units of the time that a token takes without drafts.
    """
    chance, expected_tokens = 1.0, 0.0
    best_count, best_gain = 0, -costs[0]
    for count, (probability, cost) in enumerate(zip(probabilities, costs[1:]), 1):
        chance *= stop.chance(probability)
        expected_tokens += chance
        if expected_tokens - cost > best_gain:
            best_count, best_gain = count, expected_tokens - cost
    return best_count
