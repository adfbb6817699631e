"""How fast the queue moves: the work that left it, over the seconds in which there was one. It queues nothing.

Seconds in which nobody had to wait tell nothing of what the engine can do, so the clock stands still in them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW = 30.0  # seconds with a queue that an estimate looks back over
_LEAST = 1.0  # seconds with a queue before there is one
_APART = 0.5  # seconds between two samples


class Pace:
    """Work in tokens; `clock` tells seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None  # the queue has been there since; None: there is none
        self._busy = self._work = 0.0  # seconds with a queue, work that left it in them
        self._samples: deque[tuple[float, float]] = deque([(0.0, 0.0)])  # those two, the oldest at the window's begin

    def queue(self, there: bool) -> None:
        """There is a queue from now on, or none."""
        now = self._clock()
        if self._since is not None:
            self._busy += now - self._since
        self._since = now if there else None

    def left(self, work: float) -> None:
        """So much work has left the queue."""
        if self._since is None:
            return
        self.queue(True)
        self._work += work
        if self._busy - self._samples[-1][0] >= _APART:
            self._samples.append((self._busy, self._work))

    def seconds(self, work: float, sequences: int) -> float | None:
        """In which so much work of so many sequences leaves the queue; None where too little was seen. Where nothing
        has left it in all the time, one sequence is taken to do so now."""
        if not sequences:
            return 0.0
        if self._since is not None:
            self.queue(True)
        while len(self._samples) > 1 and self._busy - self._samples[1][0] >= _WINDOW:
            self._samples.popleft()
        began, before = self._samples[0]
        busy, done = self._busy - began, self._work - before
        if busy < _LEAST:
            return None
        return work * busy / (done or work / sequences)
