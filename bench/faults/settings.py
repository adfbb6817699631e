"""Draw settings of prefix caching, prefill chunks and preemption at random; served tokens must not depend on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from bench.faults.client import VOCAB, Client, Judged, drawn
from bench.faults.strikes import outcomes
from tests.attacks.fake_engine import TOKEN_BYTES
from tests.attacks.target import Target

FIGURES = ("num_preemptions_total", "prompt_tokens_cached_total", "num_steps_total", "num_scheduled_tokens_total")


def options(draw: Random) -> list[str]:
    """Draw options of llmc-serve: a KV pool that is small for its rows, small chunks, caching on or off."""
    rows, length = draw.choice((2, 5, 8, 16)), 160
    pool = draw.randrange(length, max(length + 8, rows * 50))
    chunk = draw.choice((rows, rows + 3, 32, 64))
    caching = draw.choice(("--enable-prefix-caching", "--no-enable-prefix-caching"))
    policy = draw.choice(("fcfs", "priority"))
    return [
        "--max-num-seqs", str(rows), "--max-model-len", str(length), "--max-num-batched-tokens", str(max(chunk, rows)),
        "--kv-cache-memory-bytes", str(pool * TOKEN_BYTES), "--scheduling-policy", policy, caching,
    ]  # fmt: skip


async def _together(server: Target, draw: Random, count: int, priorities: bool) -> Judged:
    """Send `count` requests at once, some with two outputs, many with a common prefix."""
    judged, client = Judged(), Client(server.host, server.port)
    shared = [[draw.randrange(3, VOCAB - 1) for _ in range(draw.randrange(4, 60))] for _ in range(3)]

    async def send() -> None:
        await asyncio.sleep(draw.random() * 0.2)
        request = drawn(draw, 60, shared, 30)
        if draw.random() < 0.3:
            request.n, request.temperature = 2, draw.choice((0.5, 1.0))
        if priorities:
            request.extra["priority"] = draw.randrange(-2, 3)
        if draw.random() < 0.2:
            request.extra["cache_salt"] = draw.choice(("a", "b"))
        await judged.send(client, request)

    await asyncio.gather(*(send() for _ in range(count)))
    client.close()
    return judged


async def settings(start: Callable[..., Any], draw: Random, times: int, count: int) -> dict[str, Any]:
    """Run `count` requests on each of `times` servers with different settings; `start` starts one."""
    all_of, sums, caching = Judged(), dict.fromkeys(FIGURES, 0.0), 0
    for _ in range(times):
        flags, depth = options(draw), draw.choice((1, 2))
        caching += "--enable-prefix-caching" in flags
        with start(*flags, engine={"depth": depth, "pace": 0.0005}) as server:
            judged = await _together(server, draw, count, "priority" in flags)
            await asyncio.to_thread(server.at_rest)
            for name in FIGURES:
                sums[name] += server.figure(name)
        all_of.counts += judged.counts
        all_of.odd += [f"{' '.join(flags)}: {odd}" for odd in judged.odd]
    names = {name: int(value) for name, value in sums.items()}
    return {"settings": times, "of them caching": caching, **names, **outcomes(all_of)}
