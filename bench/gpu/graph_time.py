"""The time of launches, from a graph that repeats them."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from gpu.launcher import Card

ROUNDS, MOST = 5, 50  # rounds of which the median is taken, and graph launches in one of them at most


def graph_microseconds(card: Card, launch: Callable[[int], None], copies: int, seconds: float) -> float:
    """Return the median microseconds of one of `copies` calls `launch(i)` in a graph; a round takes about `seconds`."""
    cu = card.cu
    card.ok(cu.cuStreamBeginCapture(card.stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    for i in range(copies):
        launch(i)
    graph = card.ok(cu.cuStreamEndCapture(card.stream))
    run = card.ok(cu.cuGraphInstantiate(graph, 0))
    begin, end = (card.ok(cu.cuEventCreate(0)) for _ in range(2))

    def timed(times: int) -> float:
        card.ok(cu.cuEventRecord(begin, card.stream))
        for _ in range(times):
            card.ok(cu.cuGraphLaunch(run, card.stream))
        card.ok(cu.cuEventRecord(end, card.stream))
        card.wait()
        return float(card.ok(cu.cuEventElapsedTime(begin, end))) * 1e3

    timed(1)
    times = max(1, min(MOST, round(seconds * 1e6 / max(timed(1), 1.0))))
    us = statistics.median(timed(times) for _ in range(ROUNDS)) / times / copies
    card.ok(cu.cuGraphExecDestroy(run))
    card.ok(cu.cuGraphDestroy(graph))
    return us
