"""Through the server: caching, chunks, preemption, kills and stops change no token. bench.faults measures them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from random import Random

import pytest

from bench.faults.client import NEVER
from bench.faults.settings import settings
from bench.faults.strikes import strikes
from tests.attacks.target import target


def test_settings_of_caching_chunks_and_pages_change_no_token(draw: Random, times: Callable[[int, int], int]) -> None:
    """Servers of drawn settings, their pools too small for what runs: every answer is the oracle's."""
    found = asyncio.run(settings(target, draw, times(1, 12), times(40, 80)))
    assert found["right"] == found["requests"], found["odd"]
    assert found["num_steps_total"], found
    if found["settings"] > 1:
        assert found["num_preemptions_total"] and found["prompt_tokens_cached_total"], found


def test_a_wrong_token_would_be_seen(draw: Random) -> None:
    """A device that gives one wrong token in 20."""

    def start(*options: str, engine: dict[str, object]) -> object:
        return target(*options, engine={**engine, "wrong": 20})

    found = asyncio.run(settings(start, draw, 1, 20))
    assert found["wrong"], found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_ends_or_stops_costs_no_right_token(
    number: int, draw: Random, full_only: None
) -> None:  # fmt: skip
    """Every open request fails within about a second, and the server serves again."""
    patient = {"restart_delay": 0.0, "max_restarts": 10**6}
    with target(engine={"pace": 0.004}, front=patient) as server:
        found = asyncio.run(strikes(server, draw, number, 5))
    assert not any(found[name] for name in NEVER), found
    assert found["reported"] and found["right"] and found["restarts"] == found["strikes"]
    assert found["noticed most s"] < 3 and found["serving again most s"] < 10, found
