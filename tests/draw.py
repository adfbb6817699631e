"""The seed of a test run, random numbers for each test, and the sample of the tests marked `drawn` or `slow` that run.

`SEED=n make test` repeats a run, and `SEED=n pytest FILE::TEST` a test: conftest.py seeds `random` and torch from the
run's seed and the test's name, and prints the seed if a test fails. Random numbers of numpy come from `generator`.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np

# One seed a run, the same in all of its workers; SEED=n repeats a run.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", secrets.token_hex(8))
SEED = int(os.environ.get("SEED") or zlib.crc32(RUN.encode()))


_calls: Counter[str] = Counter()  # of `of_test`, by test


def of_test() -> int:
    """A seed for the test that runs now, another one at each call, derived from its name and SEED, which is printed."""
    name = os.environ.get("PYTEST_CURRENT_TEST", "")
    if not _calls[name]:
        print(f"SEED={SEED}")
    _calls[name] += 1
    return zlib.crc32(f"{SEED} {name} {_calls[name]}".encode())


def generator() -> np.random.Generator:
    """A generator of random numbers for the test that runs now, seeded by `of_test`."""
    return np.random.default_rng(of_test())


def seed_test() -> None:
    """Seed `random`, and torch if it is loaded, for the test that runs now (torch has a constant seed at its start)."""
    random.seed(of_test())
    if torch := sys.modules.get("torch"):
        torch.manual_seed(of_test())


def left_out(names: Sequence[str], share: float, seed: int = SEED) -> set[str]:
    """Return the items that a run skips: all but `share` of them. A fractional number of items is rounded at random."""
    rng = Random(seed)
    kept = rng.sample(sorted(names), int(share * len(names) + rng.random()))
    return set(names) - set(kept)
