"""Compares the rounding errors of two devices prompt by prompt, with a bounded rate of false alarms.

Both devices compute a model in bfloat16, in different orders of summation, and both are compared with float32. The
check is a sign test. Its null hypothesis: the median over prompts of (mean error of the tested device) / (mean error of
the reference device) is at most LIMIT. Then the number of prompts above LIMIT has at most the binomial distribution
(n, 1/2). The check fails for a number that this distribution reaches with a probability below FALSE_ALARM.

The bound holds for any distribution of errors. Errors within a prompt may depend on each other, as those of the
log-probabilities of one token do; only prompts must be independent. A comparison of two medians over all errors has no
such bound: the hundred errors of three prompts are worth fewer than ten independent ones.

A run has 15 such checks, so that fewer than one run in 10,000 raises a false alarm even if every median ratio is LIMIT.
Between two CPU targets, whose median ratio is 1, 2 % of the prompts of random models exceed LIMIT, and 73 of 100 would
have to. With one projection of a model scaled by 1.05, 99 % exceed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

LIMIT = 1.5
FALSE_ALARM = 5e-6
FEWEST = 18  # prompts for which the test can reject: 2 ** -18 is below FALSE_ALARM


def critical_count(n: int) -> int:
    """Return the smallest number that a binomial (n, 1/2) variable reaches with a probability below FALSE_ALARM."""
    tail, k = 0, n + 1
    while tail + comb(n, k - 1) < FALSE_ALARM * 2**n:
        k -= 1
        tail += comb(n, k)
    return k


def excess(errors: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> str:
    """Return why the errors are too large in comparison with those of the reference device, or "".

    errors, reference: of each prompt, the absolute errors of one or more log-probabilities. Raises ValueError for fewer
    than FEWEST prompts.
    """
    n = len(errors)
    if n < FEWEST:
        raise ValueError(f"{n} prompts; the test needs at least {FEWEST}")
    means, limits = (np.array([x.mean() for x in found]) for found in (errors, reference))
    above, critical = int((means > LIMIT * limits).sum()), critical_count(n)
    if above < critical:
        return ""
    return (
        f"the errors of {above} of {n} prompts exceed {LIMIT} times those of the reference, fewer than {critical} may; "
        f"medians {np.median(means):.3g} and {np.median(limits):.3g}"
    )
