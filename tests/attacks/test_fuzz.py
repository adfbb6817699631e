"""The fuzzer: thousands of random requests to every endpoint while a neighbour streams. fuzz.py has the limits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.attacks import fuzz
from tests.attacks.conftest import option
from tests.attacks.fuzz import DEMO, KEYS, SAMPLE, Figures, Fuzz
from tests.attacks.shots import KINDS, MOST, Described, shot
from tests.attacks.target import target

FULL_SECONDS, SAMPLE_SECONDS = 600.0, 3.0


@pytest.fixture
def seconds(pytestconfig: pytest.Config, full: bool) -> float:
    """How long requests are sent."""
    return float(option(pytestconfig, "--fuzz-seconds", FULL_SECONDS if full else SAMPLE_SECONDS))


@pytest.fixture
def only(pytestconfig: pytest.Config) -> list[tuple[int, int]]:
    """The requests (worker, number) that are sent; none: all."""
    wanted = str(option(pytestconfig, "--fuzz-only", ""))
    return [
        (int(worker), int(number)) for worker, _, number in (one.partition(".") for one in wanted.split(",") if one)
    ]


def test_24_requests_of_every_kind_beside_a_neighbour(
    seed: int, seconds: float, full: bool, only: list[tuple[int, int]]
) -> None:
    """No stream, no probe of /health, no small request and no process suffers. A failure names the requests before it:
    --attack-seed repeats them, and --fuzz-only only some of them."""
    with fuzz.server(DEMO.is_dir()) as server:
        found = Fuzz(server, seed, seconds, only).run()
        faults = found.faults(1.0 if full else SAMPLE)
        print(f"--attack-seed {seed} --fuzz-seconds {seconds:g}", *found.last, *found.open.values(), sep="\n")
        print(
            dict(sorted(found.statuses.items())), found.quiet["itl"], *(one["itl"] for one in found.windows), sep="\n"
        )
        assert not faults, "\n".join(faults[:20])
        assert found.statuses.total() > 5 or only
        server.at_rest(60.0)


def test_24_a_server_that_blocks_would_be_seen(seed: int) -> None:
    """A handler that holds the event loop for 0.7 s."""
    with target("--max-num-seqs", "16", keys=KEYS, front={}, engine={"pace": 0.001}, block=0.7) as server:
        found = Fuzz(server, seed, 3.0).run()
    faults = found.faults(1.0)
    assert any("/health" in one for one in faults), (faults, found.windows)


def itl(p99: float, most: float = 950.0, **more: int) -> dict[str, Any]:
    """Of a window."""
    return {"tokens": 9, "p99_ms": p99, "max_ms": most, "refused": {"429": 1, **more}}


QUIET: dict[str, Any] = {"itl": itl(8.0)}


def window(**more: Any) -> dict[str, Any]:
    """One in which nothing was wrong."""
    small = {"statuses": {"200": 3, "429 rate_limit": 1}, "worst_ms": [9.0]}
    return {"itl": itl(20.0), "health": {"worst_ms": [450.0, 90.0, 8.0]}, **dict.fromkeys(fuzz.INNOCENT, small), **more}


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (Figures(QUIET, [window(), window(itl=itl(900.0))]), ""),
        (Figures(QUIET, [window(itl=itl(41.0))] * 2), "ITL"),
        (Figures(QUIET, [window(itl=itl(20.0, 1001.0))]), "ITL"),
        (Figures(QUIET, [window(itl={**itl(0.0), "tokens": 0})]), "ITL"),
        (Figures(QUIET, [window(itl=itl(20.0, broken=2))]), "streams got {'broken': 2}"),
        (Figures(QUIET, [window(health={"worst_ms": [501.0, 3.0]})]), "/health"),
        (Figures(QUIET, [window(health={"worst_ms": [110.0, 101.0]})]), "/health"),
        (Figures(QUIET, [window(schema={"statuses": {"400 invalid_value": 1}, "worst_ms": []})]), "small schema"),
        (Figures(QUIET, [window()], {(7, 1.0): 5 << 20}, {(7, 1.0): 261 << 20}), ""),
        (Figures(QUIET, [window()], {(7, 1.0): 5 << 20}, {(7, 1.0): 262 << 20}), "process 7 keeps 257 MiB"),
        (Figures(QUIET, [window()], {}, {(8, 1.0): 300 << 20}), "process 8"),
        (Figures(QUIET, [window()], golden=(b"a", b"b")), "golden"),
        (Figures(QUIET, [window()], ended=["process 7 ended"]), "ended"),
        (Figures(QUIET, [window()], odd=["500 for x"]), "500"),
    ],
)
def test_24_each_fault_is_seen(figures: Figures, words: str) -> None:
    """Values within the limits are no faults."""
    faults = figures.faults()
    assert bool(faults) == bool(words) and all(words in one for one in faults), faults


def test_24_a_seed_draws_the_same_requests_of_all_kinds_up_to_the_limit() -> None:
    """Each from its own number."""
    known = Described([("/v1/completions", ("n",))], ["/health"])
    numbers = list(range(400))
    made = [shot(3, 1, number, known) for number in numbers]
    assert {one.kind for one in made} == set(KINDS)
    assert str(shot(3, 1, numbers[-1], known)) == str(made[-1]) and str(shot(4, 1, 0, known)) != str(made[0])
    sizes = [len(one.body or b"") for one in made]
    assert max(sizes) > MOST // 8 and max(sizes) <= MOST + 1000
