"""Offer ten times the peak load for a minute: measure responses, refusals and the cost."""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import Any

from bench.faults.client import REFUSED, RIGHT, Client, Judged, Request, drawn
from bench.faults.strikes import outcomes
from tests.attacks.target import Target

TOKENS = 32  # of every answer
WARM = 2.0  # seconds at the beginning of a phase that do not count


def _request(draw: Random) -> Request:
    request = drawn(draw, longest=30)
    request.max_tokens = TOKENS
    return request


async def _peak(client: Client, draw: Random, clients: int, seconds: float) -> tuple[float, Judged]:
    """Return the correct answers per second of `clients` clients that send requests in sequence."""
    judged, began = Judged(), time.monotonic()
    counted = 0

    async def send() -> None:
        nonlocal counted
        draws = Random(draw.random())
        while time.monotonic() - began < WARM + seconds:
            if await judged.send(client, _request(draws)) == RIGHT:
                counted += WARM <= time.monotonic() - began < WARM + seconds

    await asyncio.gather(*(send() for _ in range(clients)))
    return counted / seconds, judged


async def _flood(client: Client, draw: Random, rate: float, seconds: float) -> tuple[float, float, Judged]:
    """Send `rate` requests per second regardless of responses; return the rates of correct answers and of requests."""
    judged, tasks, sent, counted = Judged(), set[asyncio.Task[None]](), 0, 0
    began = due = time.monotonic()
    end = began + WARM + seconds

    async def send() -> None:
        nonlocal counted
        if await judged.send(client, _request(draw)) == RIGHT:
            counted += began + WARM <= time.monotonic() < end

    while (now := time.monotonic()) < end:
        while due <= now:
            due += draw.expovariate(rate)
            sent += 1
            task = asyncio.create_task(send())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(max(0.0, min(0.01, due - now)))
    await asyncio.gather(*tasks)
    return counted / seconds, sent / (WARM + seconds), judged


async def overload(server: Target, draw: Random, seconds: float, times: float, clients: int) -> dict[str, Any]:
    """Measure the peak of `clients` clients, then offer `times` that load for `seconds`."""
    client = Client(server.host, server.port)
    peak, before = await _peak(client, draw, clients, max(5.0, seconds / 6))
    memory = await asyncio.to_thread(server.memory)
    goodput, offered, judged = await _flood(client, draw, times * peak, seconds)
    grown = await asyncio.to_thread(server.memory) - memory
    began = time.monotonic()
    while await judged.send(client, _request(draw)) != RIGHT:
        await asyncio.sleep(0.02)
    recovered = time.monotonic() - began
    await asyncio.to_thread(server.at_rest)
    await asyncio.to_thread(server.steady, "overload")
    client.close()
    refusals = sorted(judged.seconds.get(REFUSED, [0.0]))
    judged.counts += before.counts
    judged.odd += before.odd
    return {
        "peak req/s": peak, "offered req/s": offered, "goodput req/s": goodput, "share of the peak": goodput / peak,
        "seconds": seconds, "refused p50 ms": 1e3 * refusals[len(refusals) // 2],
        "refused p99 ms": 1e3 * refusals[int(0.99 * (len(refusals) - 1))], "refused most ms": 1e3 * refusals[-1],
        "memory before MiB": memory >> 20, "memory growth MiB": grown >> 20, "served again after s": recovered,
        **outcomes(judged),
    }  # fmt: skip
