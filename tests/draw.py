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
import pytest

SLOW = 6  # tests marked `slow` are drawn this many times as often as those marked `drawn`
SECONDS = {"drawn": 4.0, "slow": 5.0}  # of a core; a test whose mark names more is drawn that many times more rarely

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


def drawn(item: pytest.Item, share: float, named: bool) -> tuple[str, float]:
    """What is drawn with a test, and the chance that it runs.

    item:    the test
    share:   of the tests marked `drawn`
    named:   whether the command line names a file: all of its tests marked `slow` then run

    A test marked `slow` is drawn with the rest of its file if that is marked as a whole, or with all tests with the
    same argument of the mark, which share a slow fixture.
    """

    def chance(mark: pytest.Mark, most: float) -> float:
        usual = SECONDS[mark.name]
        return min(1.0, most * usual / max(usual, float(mark.kwargs.get("seconds", usual))))

    if mark := item.get_closest_marker("drawn"):
        return item.nodeid, chance(mark, share)
    for node, mark in item.iter_markers_with_node("slow"):
        return f"slow {mark.args[0] if mark.args else node.nodeid}", 1.0 if named else chance(mark, SLOW * share)
    return item.nodeid, 1.0
