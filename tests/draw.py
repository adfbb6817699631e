"""The seed of a run of the tests, and which of the tests that are one of many of a kind it draws; no test is here."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Sequence
from random import Random

# One seed a run, the same in all of its workers; SEED=n repeats a run.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", secrets.token_hex(8))
SEED = int(os.environ.get("SEED") or zlib.crc32(RUN.encode()))


def of_test() -> int:
    """A seed for the test that runs now, derived from its name and SEED, which is printed: SEED=n repeats the test."""
    print(f"SEED={SEED}")
    return zlib.crc32(f"{SEED} {os.environ.get('PYTEST_CURRENT_TEST', '')}".encode())


def left_out(names: Sequence[str], share: float, seed: int = SEED) -> set[str]:
    """What a run leaves out of these: all but `share` of them."""
    kept = Random(seed).sample(sorted(names), round(share * len(names)))
    return set(names) - set(kept)
