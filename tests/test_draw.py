"""The sampling of tests marked `drawn`: each seed selects another share, and `--every` selects all. The random numbers
of tests depend on the run's seed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import draw
import pytest
from draw import SECONDS, SEED, SLOW, drawn, generator, left_out, of_test, seed_test

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


@dataclass
class Marked:
    """A test with marks."""

    nodeid: str
    marks: tuple[pytest.Mark, ...]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((m for m in self.marks if m.name == name), None)

    def iter_markers_with_node(self, name: str) -> Iterator[tuple[Marked, pytest.Mark]]:
        return ((self, m) for m in self.marks if m.name == name)


def test_a_test_that_takes_long_is_drawn_more_rarely() -> None:
    def draw_of(*marks: pytest.MarkDecorator, named: bool = False) -> tuple[str, float]:
        return drawn(Marked("a.py::test", tuple(m.mark for m in marks)), 0.02, named)  # type: ignore[arg-type]

    mark = pytest.mark
    assert draw_of() == ("a.py::test", 1.0)
    assert draw_of(mark.drawn) == draw_of(mark.drawn(seconds=1), mark.slow) == ("a.py::test", 0.02)
    assert draw_of(mark.drawn(seconds=10 * SECONDS["drawn"])) == ("a.py::test", pytest.approx(0.002))
    assert draw_of(mark.slow) == ("slow a.py::test", pytest.approx(SLOW * 0.02))
    assert draw_of(mark.slow("shared", seconds=2 * SECONDS["slow"])) == ("slow shared", pytest.approx(SLOW * 0.01))
    assert draw_of(mark.slow(seconds=90), named=True) == ("slow a.py::test", 1.0)


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
