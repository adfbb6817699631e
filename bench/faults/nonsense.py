"""Send damaged bodies to every endpoint while other clients check their responses."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from random import Random
from typing import Any

from bench.faults.client import FAILED, Client, Judged, drawn
from bench.faults.strikes import outcomes
from tests.attacks.bodies import damaged
from tests.attacks.target import Target, leaks

CONNECTIONS = 6  # that send damaged bodies
VALID_CLIENTS = 2  # clients that send valid requests meanwhile
CHECK_EVERY = 500  # bodies between two checks of the server


async def nonsense(server: Target, draw: Random, times: int) -> dict[str, Any]:
    """Send `times` bodies; return counts of statuses and of outcomes that must not occur."""
    judged, client, over = Judged(), Client(server.host, server.port), asyncio.Event()
    statuses: Counter[int] = Counter()
    leaking: list[str] = []
    remaining, slowest = list(range(times)), 0.0

    async def feed() -> None:
        nonlocal slowest
        draws = Random(draw.random())
        while remaining:
            number = remaining.pop()
            path, body = damaged(draws)
            began = time.monotonic()
            response = await client.ask(body, path)
            slowest = max(slowest, time.monotonic() - began)
            statuses[response.status] += 1
            if response.status == 0 or (response.status >= 500 and not response.announced):
                judged.counts[FAILED] += 1
                judged.odd.append(f"{response.status} {response.body[:200]!r} {path} {body[:1000]!r}")
            if response.status != 200 and leaks(response.body.decode(errors="replace")):
                leaking.append(f"{path} {body[:300]!r}: {response.body[:300]!r}")
            if number % CHECK_EVERY == 0:
                await asyncio.to_thread(server.steady, body[:500])

    async def send_valid() -> None:
        draws = Random(draw.random())
        while not over.is_set():
            await judged.send(client, drawn(draws))
            await asyncio.sleep(0.01)

    others = [asyncio.create_task(send_valid()) for _ in range(VALID_CLIENTS)]
    began = time.monotonic()
    memory = await asyncio.to_thread(server.memory)
    await asyncio.gather(*(feed() for _ in range(CONNECTIONS)))
    seconds = time.monotonic() - began
    over.set()
    await asyncio.gather(*others)
    client.close()
    await asyncio.to_thread(server.at_rest)
    await asyncio.to_thread(server.steady, "nonsense")
    return {
        "bodies": times, "seconds": seconds, "statuses": {str(k): v for k, v in sorted(statuses.items())},
        "leaks": len(leaking),
        "slowest s": slowest, "memory growth MiB": (await asyncio.to_thread(server.memory) - memory) >> 20,
        "leaking": leaking[:5], **outcomes(judged),
    }  # fmt: skip
