"""Kill or stop the engine process under load; measure when it is noticed and when requests are served again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from random import Random
from statistics import median
from typing import Any

from bench.faults.client import NEVER, RIGHT, Client, Judged, drawn
from tests.attacks.target import Target

LOAD = 40  # clients, half of them streaming


async def _load(client: Client, judged: Judged, draw: Random, over: asyncio.Event, open_now: dict[int, float]) -> None:
    """A client that sends requests in sequence, and waits briefly after a refusal."""
    while not over.is_set():
        number = draw.getrandbits(60)
        open_now[number] = time.monotonic()
        outcome = await judged.send(client, drawn(draw))
        del open_now[number]
        if outcome != RIGHT:
            await asyncio.sleep(0.05)


async def _strike(server: Target, client: Client, judged: Judged, draw: Random, number: int, open_now: Any) -> Any:
    """Strike once; return the number of requests that were open, and the seconds until the first of them failed, until
    all had ended, and until a request was served again.
    """
    await asyncio.sleep(draw.uniform(0.2, 0.6))
    pid, before = server.engine, judged.counts["reported"]
    os.kill(pid, number)
    began, hit = time.monotonic(), set(open_now)
    noticed = 0.0
    while hit & open_now.keys():
        noticed = noticed or (time.monotonic() - began if judged.counts["reported"] > before else 0.0)
        await asyncio.sleep(0.005)
    failed_after = time.monotonic() - began
    while await judged.send(client, drawn(draw)) != RIGHT:
        await asyncio.sleep(0.01)
    again = time.monotonic() - began
    return len(hit), noticed or failed_after, failed_after, again


async def strikes(server: Target, draw: Random, number: int, times: int) -> dict[str, Any]:
    """Strike `times` times under load; return the figures."""
    judged, client, over = Judged(), Client(server.host, server.port), asyncio.Event()
    open_now: dict[int, float] = {}
    load = [asyncio.create_task(_load(client, judged, Random(draw.random()), over, open_now)) for _ in range(LOAD)]
    rows = [await _strike(server, client, judged, draw, number, open_now) for _ in range(times)]
    over.set()
    await asyncio.gather(*load)
    client.close()
    server.pids = server.processes()
    server.golden = b""
    await asyncio.to_thread(server.steady, "strikes")
    await asyncio.to_thread(server.at_rest)
    hit, noticed, all_failed, again = zip(*rows)
    return {
        "strikes": times, "signal": signal.Signals(number).name, "open when struck": sum(hit),
        "noticed median s": median(noticed), "noticed most s": max(noticed), "all failed most s": max(all_failed),
        "serving again median s": median(again), "serving again most s": max(again),
        "restarts": int(await asyncio.to_thread(server.figure, "restarts_total")),
        **outcomes(judged),
    }  # fmt: skip


def outcomes(judged: Judged) -> dict[str, Any]:
    """Count the outcomes of the requests; outcomes that must not occur are listed even with count 0."""
    counts = judged.counts
    return {
        "requests": counts.total(), "right": counts[RIGHT], "reported": counts["reported"],
        "refused": counts["refused"], **{name: counts[name] for name in (*NEVER, "invalid")}, "odd": judged.odd,
    }  # fmt: skip
