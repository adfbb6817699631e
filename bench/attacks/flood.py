"""Offer a server more requests than it can serve: first the peak of a closed loop, then a Poisson stream.

    python -m bench.attacks.flood '{"host": ..., "port": ..., "key": ..., "seconds": S, "times": N, "drain": S}'

`times`: the offered rate, in peaks; `drain`: seconds to wait for answers after the last request. It prints
JSON: peak and goodput in answers a second, how long refusals took, and the statuses.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from collections import Counter
from typing import Any

from llmc_runtime.bench.http_client import Pool, WireError

from bench.attacks.figures import milliseconds, quantile
from bench.attacks.watch import request

CLIENTS = 32
TOKENS = 96
WARM = 1.0  # seconds at the beginning of each phase that do not count


class Flood:
    """Requests of one API key; outcomes with their times."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.draw = settings, random.Random(3)
        self.pool = Pool(settings["host"], settings["port"], None)
        self.done: list[tuple[float, float, int]] = []  # (ended, seconds, status)

    async def one(self) -> None:
        """Send one request."""
        body = {"prompt": [self.draw.randrange(3, 250) for _ in range(12)], "max_tokens": TOKENS,
                "temperature": 0, "ignore_eos": True}  # fmt: skip
        began, status = time.monotonic(), 0
        try:
            link = await self.pool.acquire()
            requested = request(self.settings["host"], self.settings["key"], "/v1/completions", body)
            reply = await link.send(requested, lambda _, data: None)
            status = reply.status
            self.pool.release(link, reply)
        except (OSError, WireError):
            pass
        ended = time.monotonic()
        self.done.append((ended, ended - began, status))

    async def peak(self, seconds: float) -> float:
        """Return the responses per second of a few clients that send requests in sequence."""
        end = time.monotonic() + WARM + seconds

        async def client() -> None:
            while time.monotonic() < end:
                await self.one()

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return sum(end - seconds < t <= end for t, _, status in self.done if status == 200) / seconds

    async def offer(self, rate: float, seconds: float) -> tuple[float, int]:
        """Send requests at a rate regardless of responses; return responses per second, and the number of requests."""
        due = time.monotonic()
        end, tasks, sent = due + WARM + seconds, set[asyncio.Task[None]](), 0
        while (now := time.monotonic()) < end:
            while due <= now:
                due += self.draw.expovariate(rate)
                tasks.add(task := asyncio.create_task(self.one()))
                task.add_done_callback(tasks.discard)
                sent += 1
            await asyncio.sleep(max(0.0, min(0.005, due - now)))
        if tasks:
            await asyncio.wait(set(tasks), timeout=self.settings["drain"])
        for task in tasks:
            task.cancel()
        return sum(end - seconds < t <= end for t, _, status in self.done if status == 200) / seconds, sent


async def flood(settings: dict[str, Any]) -> dict[str, Any]:
    """The figures."""
    load, seconds = Flood(settings), settings["seconds"]
    peak = await load.peak(seconds / 2)
    load.done.clear()
    goodput, sent = await load.offer(max(1.0, settings["times"] * peak), seconds)
    refused = sorted(took for _, took, status in load.done if status in (429, 503))
    return {
        "peak": peak, "offered": sent / (WARM + seconds), "goodput": goodput, "share": goodput / max(peak, 1e-9),
        "seconds": seconds, "refused_p50_ms": milliseconds(quantile(refused, 0.5)),
        "refused_p99_ms": milliseconds(quantile(refused, 0.99)), "unanswered": sent - len(load.done),
        "statuses": {str(k): v for k, v in sorted(Counter(status for _, _, status in load.done).items())},
    }  # fmt: skip


if __name__ == "__main__":
    gc.disable()
    print(json.dumps(asyncio.run(flood(json.loads(sys.argv[1])))))
