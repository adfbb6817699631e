"""A sample of the simulator with a fresh printed seed, and the proof that it sees bugs: each seeded one fails it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from draw import of_test

from tests.runtime.bugs import BUGS, OVERLAPS
from tests.runtime.draft_bugs import DRAFT_BUGS
from tests.runtime.fake_ranks import FAULTS
from tests.runtime.simulator import Episode, SimulationFailure, simulate
from tests.runtime.snapshot_bugs import SNAPSHOT_BUGS
from tests.runtime.world import World, draw_world

ROOT = Path(__file__).resolve().parents[2]


def test_a_sample_under_a_fresh_seed() -> None:
    seed = of_test()
    print(f"python -m tests.runtime.simulator --seed {seed} --steps 20000")
    total = simulate(seed, 20_000)
    assert total["preemptions"] and total["hits"] and total["ended by abort"] and total["ended by stop"], total


def test_a_sample_covers_every_kind_of_event() -> None:
    """Under one seed, as a sample without one kind of event is possible under another."""
    total = simulate(1, 20_000)
    assert total["guided"] and total["scored"] and total["shared"] and total["ended by error"], total
    assert total["accepted"] and total["accepted"] < total["drafts"], total
    assert total["restored"], total
    assert 0 < total["overlapped"] < total["steps"], "both depths are sampled"


def test_a_seed_replays() -> None:
    assert simulate(11, 1) == simulate(11, 1) != simulate(12, 1)


def test_fewer_tokens_a_step_than_running_requests() -> None:
    """Drafts have no room then, and the choice of their number ends (this world has one token a step)."""
    assert simulate(6004, 1)["episodes"] == 1


def test_the_command_line() -> None:
    command = [sys.executable, "-m", "tests.runtime.simulator", "--steps", "2", "--seed", "5", "--jobs", "2"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--seed 5 " in done.stdout and "2 episodes" in done.stdout


def name(bug: Any) -> str:
    inner = bug.__closure__[0].cell_contents if bug.__name__ == "make" else bug
    return inner.__name__


ALL_BUGS = (*BUGS, *DRAFT_BUGS, *SNAPSHOT_BUGS)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("owner", "method", "bug"),
    ALL_BUGS,
    ids=[name(bug) for _, _, bug in ALL_BUGS],
)
def test_a_bug_is_seen(owner: Any, method: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    see(owner, method, bug, None, monkeypatch)


@pytest.mark.drawn
@pytest.mark.parametrize(("owner", "method", "bug", "depth"), OVERLAPS, ids=[bug[2].__name__ for bug in OVERLAPS])
def test_a_bug_of_overlap_is_seen(
    owner: type, method: str, bug: Any, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(owner, method, bug, depth, monkeypatch)


def see(owner: Any, method: str, bug: Any, depth: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug fails some episode, and again when that is replayed."""
    monkeypatch.setattr(owner, method, bug(getattr(owner, method)))
    with pytest.raises(SimulationFailure, match=r"--seed \d+ --steps 1") as caught:
        simulate(100, 300_000, depth=depth)
    print(caught.value)
    with pytest.raises(SimulationFailure) as again:
        simulate(caught.value.seed, 1, depth=depth)
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_ends_every_request_once(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is dead, late or diverges, or a message to it is lost: the episode checks which requests get the error."""

    def failing(seed: int) -> World:
        world = draw_world(seed)
        world.kind, world.ranks = "failure", 3
        return world

    monkeypatch.setattr("tests.runtime.simulator.draw_world", failing)
    monkeypatch.setattr("tests.runtime.fake_ranks.FAULTS", (fault,))
    monkeypatch.setattr("tests.runtime.fake_ranks.EVERY", 100)
    ended, first = 0, of_test()
    for seed in range(first, first + 10):  # in a few episodes, no request is alive when a rank fails
        episode = Episode(seed)
        episode.run()
        assert episode.engine.error is not None and episode.engine.error.code == "E119"
        ended += episode.ended["error"]
        if ended:
            break
    assert ended
