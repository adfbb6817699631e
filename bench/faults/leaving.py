"""Clients disconnect at random points, streaming or not: count the steps still spent on them, and check for leaks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from bench.faults.client import Client, Judged, Request, drawn
from bench.faults.strikes import outcomes
from tests.attacks.fake_engine import VOCAB
from tests.attacks.target import Target

AT_ONCE = 12  # clients that disconnect
STAYING = 2  # clients that wait for their responses


async def leave(client: Client, draw: Random, left_at: dict[str, float], stream: bool, max_tokens: int = 200) -> None:
    """Send a request or most of it, possibly read some of the response, and disconnect, with or without a reset."""
    tag = tuple(draw.randrange(3, VOCAB - 1) for _ in range(3))
    ids = [*tag, *(draw.randrange(3, VOCAB - 1) for _ in range(draw.randrange(40)))]
    body = Request(ids, max_tokens, stream, 1).body
    sent = client.head("/v1/completions", len(body)) + body
    reader, writer = await client.link()
    writer.write(sent if draw.random() < 0.85 else sent[: draw.randrange(len(sent))])
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(draw.expovariate(1 / 0.15)):
            while await reader.read(draw.choice((1, 100, 4000))):
                pass
    link = writer.get_extra_info("socket")
    if draw.random() < 0.5:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    await asyncio.sleep(0)  # the loop closes it in its next iteration
    left_at[".".join(map(str, tag))] = time.monotonic()


async def leaving(server: Target, draw: Random, times: int, log: Path) -> dict[str, Any]:
    """Run `times` such clients, half of them streaming, and a few that wait for their answers."""
    judged, client, over = Judged(), Client(server.host, server.port), asyncio.Event()
    left_at: dict[str, float] = {}
    remaining = list(range(times))

    async def some() -> None:
        draws = Random(draw.random())
        while remaining:
            await leave(client, draws, left_at, bool(remaining.pop() % 2))

    async def stay() -> None:
        draws = Random(draw.random())
        while not over.is_set():
            await judged.send(client, drawn(draws))

    staying = [asyncio.create_task(stay()) for _ in range(STAYING)]
    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    over.set()
    await asyncio.gather(*staying)
    began = time.monotonic()
    await asyncio.to_thread(server.at_rest)
    rest = time.monotonic() - began
    pages = await asyncio.to_thread(server.figure, "kv_cache_usage_perc")
    await asyncio.to_thread(server.steady, "disconnects")
    steps = steps_after(log, left_at)
    client.close()
    met = sum(steps.values())
    return {
        "disconnects": times, "of them in the engine": met, "steps after leaving": dict(sorted(steps.items())),
        "within two steps": sum(count for number, count in steps.items() if number <= 2) / max(1, met),
        "at rest after s": rest, "pages held": pages,
        **outcomes(judged),
    }  # fmt: skip


def steps_after(log: Path, left_at: dict[str, float]) -> Counter[int]:
    """Return, from the engine's record, how many steps that began after a client had left still computed for it."""
    later: Counter[str] = Counter()
    met = set()
    for line in log.read_text().splitlines():
        began, *tags = line.split(" ")
        for tag in tags:
            if tag in left_at:
                met.add(tag)
                later[tag] += float(began) > left_at[tag]
    return Counter(later[tag] for tag in met)
