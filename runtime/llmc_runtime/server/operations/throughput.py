"""Estimates the throughput of the queue: the work that left it, per second in which there was a queue.

Time without a queue is not counted, because it does not measure the engine's capacity.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW_SECONDS = 30.0  # seconds with a queue that an estimate covers
_MIN_SECONDS = 1.0  # seconds with a queue before there is an estimate
_SAMPLE_SECONDS = 0.5  # seconds between two samples


class Throughput:
    """The throughput estimate. Work is measured in tokens; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None  # start of the current queue; None: there is none
        self._busy = self._work = 0.0  # seconds with a queue; work that left the queue meanwhile
        self._samples: deque[tuple[float, float]] = deque([(0.0, 0.0)])  # pairs of these, since the start of the window

    def queue(self, there: bool) -> None:
        """Record whether there is a queue from now on."""
        now = self._clock()
        if self._since is not None:
            self._busy += now - self._since
        self._since = now if there else None

    def left(self, work: float) -> None:
        """Record that `work` left the queue."""
        if self._since is None:
            return
        self.queue(True)
        self._work += work
        if self._busy - self._samples[-1][0] >= _SAMPLE_SECONDS:
            self._samples.append((self._busy, self._work))

    def seconds(self, work: float, sequences: int) -> float | None:
        """Return the seconds until `work` of this many sequences has left the queue; None without enough data.

        If nothing has left the queue in the window, one sequence is assumed to leave it now.
        """
        if not sequences:
            return 0.0
        if self._since is not None:
            self.queue(True)
        while len(self._samples) > 1 and self._busy - self._samples[1][0] >= _WINDOW_SECONDS:
            self._samples.popleft()
        began, before = self._samples[0]
        busy, done = self._busy - began, self._work - before
        if busy < _MIN_SECONDS:
            return None
        return work * busy / (done or work / sequences)
