"""Heartbeats of other processes: how long one has sent none, and the counters by which ranks send theirs."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from pathlib import Path

HEARTBEAT_TIMEOUT = 0.8  # seconds, by default
TICK_SECONDS = 0.1  # seconds between two checks
INTERVAL_SECONDS = 0.1  # seconds between two heartbeats of a rank
# Bytes for the ranks' counters, at the start of the memory that a group shares.
SHARED_BYTES = mmap.ALLOCATIONGRANULARITY
_STARVED_FACTOR = 5.0  # multiplier of the timeout while the process is runnable but gets no processor


class Silence:
    """The time for which a process has sent no heartbeat. A pause of the process that checks counts as two ticks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._starved = False  # whether the process was runnable at a check during the silence

    def end(self) -> None:
        """Begin anew, after a heartbeat."""
        self.seconds = 0.0

    def exceeded(self, passed: float, pid: int, timeout: float) -> float | None:
        """Return the timeout that the silence exceeds, None if it does not. `passed` seconds after the last call.

        A process that is runnable at one of the checks, and so waits for a processor, has a longer timeout.
        """
        self.seconds += min(passed, 2 * TICK_SECONDS)
        # One look is too few: the threads of a starved process sleep briefly while they wait for each other.
        if self.seconds <= timeout / 2:
            self._starved = False
        elif not self._starved:
            self._starved = is_runnable(pid)
        limit = timeout * (_STARVED_FACTOR if self._starved else 1.0)
        return limit if self.seconds > limit else None


def is_runnable(pid: int) -> bool:
    """Whether a thread of the process runs, or waits for a processor or in uninterruptible sleep (states R and D).

    False if /proc has no answer.
    """
    threads = Path(f"/proc/{pid}/task")
    with contextlib.suppress(OSError):
        for thread in os.listdir(threads):
            with contextlib.suppress(OSError):
                if (threads / thread / "stat").read_text().rpartition(")")[2].split()[:1] in (["R"], ["D"]):
                    return True
    return False


def shared_counters(memory: int) -> memoryview:
    """Return the heartbeats that each rank has sent, u32[n], in the memory with this file descriptor."""
    return memoryview(mmap.mmap(memory, SHARED_BYTES)).cast("I")


class RankHeartbeats(threading.Thread):
    """Sends the heartbeats of `rank`, which count in the memory with this file descriptor, until the process ends."""

    def __init__(self, memory: int, rank: int) -> None:
        super().__init__(name="llmc-heartbeat", daemon=True)
        self._counters, self._rank = shared_counters(memory), rank

    def run(self) -> None:
        while True:
            self._counters[self._rank] = (self._counters[self._rank] + 1) % 2**32
            time.sleep(INTERVAL_SECONDS)
