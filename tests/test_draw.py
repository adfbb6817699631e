"""The sampling of tests marked `drawn`: each seed selects another share, and `--every` selects all. The random numbers
of tests depend on the run's seed."""

from __future__ import annotations

import random
import re
from pathlib import Path

import draw
import pytest
from draw import SEED, generator, left_out, of_test, seed_test

TESTS = Path(__file__).resolve().parent
UNSEEDED = re.compile(r"default_rng\(\)|\bRandom\(\)|SystemRandom|np\.random\.(?!default_rng|Generator)|import secrets")
# They have an option for the seed, or need no random numbers that can be repeated.
SCRIPTS = (
    "draw.py", "runtime/simulator.py", "corpus/run.py", "clients/conftest.py", "clients/test_schemathesis.py",
    "models/test_ray.py",  # secrets, not inputs
)  # fmt: skip


def test_a_run_leaves_out_its_share_and_every_seed_another_one() -> None:
    names = [f"test[{i}]" for i in range(41)]
    out = left_out(names, 0.5)
    assert out == left_out(names[::-1], 0.5, SEED) and out < set(names) and 20 <= len(out) <= 21
    assert set.union(*(set(names) - left_out(names, 0.5, seed) for seed in range(20))) == set(names)
    assert not left_out(names, 1.0) and not left_out([], 0.5)
    assert 20 < sum(not left_out(["one"], 0.3, seed) for seed in range(100)) < 40


def test_a_test_has_random_numbers_of_its_own_that_the_seed_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(test: str) -> list[float]:
        monkeypatch.setenv("PYTEST_CURRENT_TEST", test)
        draw._calls.clear()
        seed_test()
        return [random.random(), generator().random(), generator().random(), of_test()]

    one, again, other = numbers("one"), numbers("one"), numbers("other")
    assert one == again and len({*one, *other}) == 8


def test_no_test_draws_without_the_seed() -> None:
    files = [p for p in TESTS.rglob("*.py") if p != Path(__file__) and "libcuda" not in p.parts]
    found = [str(p.relative_to(TESTS)) for p in files if UNSEEDED.search(p.read_text())]
    assert sorted(found) == sorted(SCRIPTS)
