"""Run the demonstration model under the same faults; its outputs must equal those from before the faults."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from bench.faults.client import CUT, REPORTED, RIGHT, WRONG, Answer, Client, Judged, Request
from bench.faults.leaving import leave
from bench.faults.strikes import outcomes
from tests.attacks.bodies import damaged
from tests.attacks.target import Target

SERVE = "import sys; from llmc_runtime.cli import main_serve; sys.exit(main_serve())"
PROMPTS = (
    "Once upon a time",
    "The river",
    "When the morning came,",
    "A king who",
    "In the dark wood",
    "She said",
    "Far away",
    "The",
)
TOKENS, LOAD = 24, 6


class Story(Request):
    """A prompt of the model, and its output without faults."""

    def __init__(self, text: str, stream: bool, known: dict[str, str]) -> None:
        super().__init__([], TOKENS, stream, 7, extra={"prompt": text})
        self.text, self.known = text, known

    def judge(self, response: Answer) -> str:
        """Judge an answer as for any request, against the first output."""
        if response.status == 200 and response.done:
            return RIGHT if response.texts[0] == self.known.setdefault(self.text, response.texts[0]) else WRONG
        return super().judge(response) if response.status != 200 or response.error else CUT


async def story(path: Path, start: Any, draw: Random, share: float) -> dict[str, Any]:
    """Apply kills, stops, disconnecting clients and damaged bodies, one after the other, under load."""
    options = ("--port", "0", "--max-num-seqs", "8", "--max-model-len", "256")
    with start(*options, program=("-c", SERVE, str(path))) as server:
        client, known, judged, over = Client(server.host, server.port), dict[str, str](), Judged(), asyncio.Event()
        for text in PROMPTS:
            await judged.send(client, Story(text, False, known))
        load = [asyncio.create_task(_load(client, judged, Random(draw.random()), known, over)) for _ in range(LOAD)]
        again = [await _blow(server, client, judged, known, number) for number in (signal.SIGKILL, signal.SIGSTOP)]
        left_at: dict[str, float] = {}
        for i in range(max(10, int(100 * share))):
            await leave(client, draw, left_at, bool(i % 2), 64)
        statuses: Counter[int] = Counter()
        for _ in range(max(50, int(1000 * share))):
            where, body = damaged(draw)
            statuses[(await client.ask(body, where)).status] += 1
        over.set()
        await asyncio.gather(*load)
        client.close()
        await asyncio.to_thread(server.at_rest)
        judged.counts["failed"] += sum(count for status, count in statuses.items() if status >= 500 and status != 503)
        return {
            "serving again after SIGKILL s": again[0], "after SIGSTOP s": again[1], "left": len(left_at),
            "damaged bodies": {str(k): v for k, v in sorted(statuses.items())}, **outcomes(judged),
        }  # fmt: skip


async def _load(client: Client, judged: Judged, draw: Random, known: dict[str, str], over: asyncio.Event) -> None:
    while not over.is_set():
        if await judged.send(client, Story(draw.choice(PROMPTS), draw.random() < 0.5, known)) == REPORTED:
            await asyncio.sleep(0.05)


async def _blow(server: Target, client: Client, judged: Judged, known: dict[str, str], number: int) -> float:
    await asyncio.sleep(0.5)
    began = time.monotonic()
    os.kill(server.engine, number)
    await asyncio.sleep(0.05)
    while await judged.send(client, Story(PROMPTS[0], False, known)) != RIGHT:
        await asyncio.sleep(0.02)
    return time.monotonic() - began
