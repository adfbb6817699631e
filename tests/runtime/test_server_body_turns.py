"""Few connections whose bodies are arriving are read at a time, and all of them in turn."""

from __future__ import annotations

import asyncio

from llmc_runtime.server.http import read_turns
from llmc_runtime.server.http.read_turns import BODY_BYTES, MAX_BODIES, BodyTurns


class Link:
    """A connection that counts its pauses."""

    def __init__(self) -> None:
        self.paused = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def reading(links: list[Link]) -> set[int]:
    return {i for i, link in enumerate(links) if not link.paused}


def test_few_are_read_at_a_time_and_a_full_turn_is_passed_on() -> None:
    async def run() -> None:
        turns, links = BodyTurns(), [Link() for _ in range(3 * MAX_BODIES)]
        for link in links:
            turns.read(link, 1000)
        assert reading(links) == set(range(MAX_BODIES))
        seen = set(reading(links))
        for _ in range(3):
            for i in sorted(reading(links)):
                turns.read(links[i], BODY_BYTES)
            assert len(reading(links)) == MAX_BODIES
            seen |= reading(links)
        assert seen == set(range(3 * MAX_BODIES)), "each has had its turn"
        for link in links:
            turns.leave(link)
        assert not turns._active and not turns._waiting and not any(link.paused for link in links)

    asyncio.run(run())


def test_slow_clients_do_not_keep_their_turn() -> None:
    async def run() -> None:
        turns, links = BodyTurns(), [Link() for _ in range(MAX_BODIES + 2)]
        for link in links:
            turns.read(link, 1)
        assert links[-1].paused
        await asyncio.sleep(3 * read_turns.BODY_SECONDS)
        assert turns._active.keys() != set(links[:MAX_BODIES]), "some gave way"
        for link in links:
            turns.leave(link)

    asyncio.run(run())


def test_a_single_connection_is_not_paused() -> None:
    async def run() -> None:
        turns, links = BodyTurns(), [Link() for _ in range(MAX_BODIES)]
        for _ in range(5):
            for link in links:
                turns.read(link, BODY_BYTES)
        assert reading(links) == set(range(MAX_BODIES))

    asyncio.run(run())
