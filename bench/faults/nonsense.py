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

LINKS = 6
BESIDE = 2  # clients that send valid requests
EVERY = 500  # bodies between two checks of the server


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
            got = await client.ask(body, path)
            slowest = max(slowest, time.monotonic() - began)
            statuses[got.status] += 1
            if got.status == 0 or (got.status >= 500 and not got.announced):
                judged.counts[FAILED] += 1
                judged.odd.append(f"{got.status} {got.body[:200]!r} {path} {body[:1000]!r}")
            if got.status != 200 and leaks(got.body.decode(errors="replace")):
                leaking.append(f"{path} {body[:300]!r}: {got.body[:300]!r}")
            if number % EVERY == 0:
                await asyncio.to_thread(server.steady, body[:500])

    async def beside() -> None:
        draws = Random(draw.random())
        while not over.is_set():
            await judged.send(client, drawn(draws))
            await asyncio.sleep(0.01)

    others = [asyncio.create_task(beside()) for _ in range(BESIDE)]
    began = time.monotonic()
    memory = await asyncio.to_thread(server.memory)
    await asyncio.gather(*(feed() for _ in range(LINKS)))
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
