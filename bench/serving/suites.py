"""The measurements: throughput beside a bare handler, added latency of one stream, steps beside a long queue."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
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
    """Tokens a second at 256 streams: ours at full speed beside the bare handler, interleaved; and at a GPU's pace."""
    with server("bench.serving.front", 0.0, 2) as ours, server("bench.serving.peer", EVENT) as bare:
        found: dict[str, list[Row]] = {"ours": [], "bare": []}
        for name in ("ours", "bare", "bare", "ours") * ((rounds + 1) // 2):
            found[name].append(_streams(ours if name == "ours" else bare))
    with server("bench.serving.front", GPU_STEP, 2) as ours:
        paced = [_streams(ours) for _ in range(rounds)]
    mine, theirs = (statistics.median(r["output_throughput"] for r in found[name]) for name in ("ours", "bare"))
    rows = [
        _row("streamed, 256 at a time", "tokens/s", mine, theirs / 3, mine / theirs, _least, found["ours"]),
        _row("the bare handler", "events/s", theirs, None, 1.0, _least, found["bare"]),
    ]
    rate = statistics.median(r["output_throughput"] for r in paced)
    most = STREAMS / GPU_STEP
    return [*rows, _row("at steps of 12 ms, 256 at a time", "tokens/s", rate, 0.95 * most, rate / most, _least, paced)]


def _streams(target: Any) -> Row:
    sizes = ("--random-input-len", 32, "--random-output-len", TOKENS, "--num-prompts", REQUESTS)
    return load(target, *sizes, "--max-concurrency", STREAMS, "--num-warmups", 8)


def latency(rounds: int) -> list[Row]:
    """What a stream waits for a token beyond the step: at depth 1, where nothing hides the host's time, and at 2."""
    rows = []
    for depth, pace in ((1, 0.01), (2, 0.01)):
        with server("bench.serving.front", pace, depth) as ours:
            sizes = ("--random-input-len", 32, "--random-output-len", 200, "--num-prompts", 3, "--max-concurrency", 1)
            found = [load(ours, *sizes) for _ in range(rounds)]
        added = [one["mean_itl_ms"] - 1e3 * pace for one in found]
        middle = statistics.median(added)
        row = _row(f"added to a step by the host, one stream, depth {depth}", "ms", middle, 1.0, middle, _most, found)
        rows.append(row | {"p99_added_ms": statistics.median(one["p99_itl_ms"] - 1e3 * pace for one in found)})
    return rows


def queue(rounds: int) -> list[Row]:
    """Milliseconds of a step of 64 running requests, nothing waiting, and 10,000 waiting: 4 of the device, the host's
    time behind them (depth 1)."""
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
    """The waiting ones are put in place, and taken away, by turns."""
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
    """By the engine's own counters, which come with its signs of life."""
    before, begin = llm.stats()["num_steps"], time.monotonic()
    await asyncio.sleep(seconds)
    return 1e3 * (time.monotonic() - begin) / max(llm.stats()["num_steps"] - before, 1)


def _least(measured: float, target: float) -> bool:
    return measured >= target


def _most(measured: float, target: float) -> bool:
    return measured <= target


def _row(
    name: str, unit: str, measured: float, target: float | None, ratio: float,
    holds: Callable[[float, float], bool], runs: list[Row],
) -> Row:  # fmt: skip
    keys = ("front", "engine", "client")
    cpu = {
        key: statistics.median(r["cpu_us_per_token"][key] for r in runs)
        for key in keys
        if key in runs[0]["cpu_us_per_token"]
    }
    return {
        "name": name, "unit": unit, "measured": measured, "target": target, "ratio": ratio,
        "held": None if target is None else holds(measured, target), "cpu_us_per_token": cpu,
        "tokens_per_chunk": statistics.median(r["tokens_per_chunk"] for r in runs),
        "p99_itl_ms": statistics.median(r["p99_itl_ms"] for r in runs),
        "all": [r["output_throughput"] for r in runs],
    }  # fmt: skip
