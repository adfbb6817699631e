"""The measurements: throughput compared with a minimal handler, added latency of a stream, steps with a long queue."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from llmc_runtime import SamplingParams

from bench.serving.front import simulated
from bench.serving.measure import load, server

STREAMS, TOKENS, REQUESTS = 256, 128, 512
EVENT = 190  # bytes of one of our events
QUEUED, RUNNING = 10_000, 64
GPU_STEP = 0.012  # of 256 rows of an 8B model

Row = dict[str, Any]


def throughput(rounds: int) -> list[Row]:
    """Return tokens per second of 256 streams: our server and the minimal handler at full speed, interleaved; our
    server at a GPU's pace.
    """
    with server("bench.serving.front", 0.0, 2) as ours, server("bench.serving.peer", EVENT) as bare:
        runs: dict[str, list[Row]] = {"ours": [], "bare": []}
        for name in ("ours", "bare", "bare", "ours") * ((rounds + 1) // 2):
            runs[name].append(_streams(ours if name == "ours" else bare))
    with server("bench.serving.front", GPU_STEP, 2) as ours:
        paced = [_streams(ours, 2 * TOKENS, 2 * REQUESTS) for _ in range((rounds + 1) // 2)]
    ours_rate, theirs = (statistics.median(r["output_throughput"] for r in runs[name]) for name in ("ours", "bare"))
    rows = [
        _row("streamed, 256 at a time", "tokens/s", ours_rate, theirs / 3, ours_rate / theirs, runs["ours"]),
        _row("the bare handler", "events/s", theirs, None, 1.0, runs["bare"]),
    ]
    rate = statistics.median(r["output_throughput"] for r in paced)
    limit = STREAMS / GPU_STEP
    return [*rows, _row("at steps of 12 ms, 256 at a time", "tokens/s", rate, 0.95 * limit, rate / limit, paced)]


def _streams(target: Any, tokens: int = TOKENS, requests: int = REQUESTS) -> Row:
    sizes = ("--random-input-len", 32, "--random-output-len", tokens, "--num-prompts", requests)
    return load(target, *sizes, "--max-concurrency", STREAMS, "--num-warmups", 8)


def latency(rounds: int) -> list[Row]:
    """Latency of a stream's token beyond the step, at depth 1, which hides none of the host's time, and at depth 2."""
    rows = []
    for depth, pace in ((1, 0.01), (2, 0.01)):
        with server("bench.serving.front", pace, depth) as ours:
            sizes = ("--random-input-len", 32, "--random-output-len", 200, "--num-prompts", 3, "--max-concurrency", 1)
            runs = [load(ours, *sizes) for _ in range(rounds)]
        added = {key: statistics.median(run[f"{key}_itl_ms"] - 1e3 * pace for run in runs) for key in ("median", "p99")}
        for key, value in added.items():
            name = f"added to a step of 10 ms, one stream, depth {depth}, {key}"
            target = {"target": 1.0, "ratio": value, "held": value < 1.0} if key == "median" else {}
            rows.append({"name": name, "unit": "ms", "measured": value, **target})
    return rows


def queue(rounds: int) -> list[Row]:
    """Milliseconds per step of 64 running requests with an empty queue and with 10,000 waiting requests: 4 ms on the
    device, plus the host's time (depth 1).
    """
    alone, beside = asyncio.run(_queue(rounds))
    few, many = statistics.median(alone), statistics.median(beside)
    return [
        {"name": "a step of 64 rows, nothing waiting", "unit": "ms", "measured": few, "all": alone},
        {
            "name": "a step of 64 rows, 10,000 waiting", "unit": "ms", "measured": many, "target": 1.05 * few,
            "ratio": many / few, "held": many <= 1.05 * few, "all": beside,
        },
    ]  # fmt: skip


async def _queue(rounds: int) -> tuple[list[float], list[float]]:
    """Alternate between adding and removing the waiting requests."""
    alone, beside = [], []
    async with simulated(0.004, 1, RUNNING) as llm:
        running = [asyncio.create_task(_again(llm)) for _ in range(RUNNING)]
        for _ in range(rounds):
            await asyncio.sleep(1.0)
            alone.append(await _step_ms(llm))
            tasks = [asyncio.create_task(_once(llm)) for _ in range(QUEUED)]
            while llm.stats()["num_requests_waiting"] < 0.99 * QUEUED:
                await asyncio.sleep(0.5)
            beside.append(await _step_ms(llm))
            assert llm.stats()["num_requests_waiting"] > 0.9 * QUEUED
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return alone, beside


async def _again(llm: Any) -> None:
    while True:
        await _once(llm)


async def _once(llm: Any) -> None:
    params = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)
    async for _ in llm.generate({"prompt_token_ids": [20] * 8}, params, "r", output_kind="final_only"):
        pass


async def _step_ms(llm: Any, seconds: float = 3.0) -> float:
    """Return the milliseconds per step, from the counters in the engine's heartbeats."""
    before, begin = llm.stats()["num_steps"], time.monotonic()
    await asyncio.sleep(seconds)
    return 1e3 * (time.monotonic() - begin) / max(llm.stats()["num_steps"] - before, 1)


def _row(
    name: str, unit: str, measured: float, target: float | None, ratio: float,
    runs: list[Row],
) -> Row:  # fmt: skip
    keys = ("front", "engine", "client")
    cpu = {
        key: statistics.median(r["cpu_us_per_token"][key] for r in runs)
        for key in keys
        if key in runs[0]["cpu_us_per_token"]
    }
    return {
        "name": name, "unit": unit, "measured": measured, "target": target, "ratio": ratio,
        "held": None if target is None else measured >= target, "cpu_us_per_token": cpu,
        "tokens_per_chunk": statistics.median(r["tokens_per_chunk"] for r in runs),
        "p99_itl_ms": statistics.median(r["p99_itl_ms"] for r in runs),
        "all": [r["output_throughput"] for r in runs],
    }  # fmt: skip
