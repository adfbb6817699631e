"""Fair queues: clients, named by a key such as their tenant, take turns, whatever number of jobs each has."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class KeyCounts(Counter[str]):
    """Nonnegative counts by key, with no entry for a count of zero."""

    def change(self, key: str, difference: int) -> None:
        """Add to the count of a key."""
        self[key] += difference
        if not self[key]:
            del self[key]

    @property
    def heaviest(self) -> str:
        """The key with the largest count. Raises ValueError if all counts are zero."""
        return max(self, key=self.__getitem__)


class FairQueue(Generic[T]):
    """Queues of jobs by key. At most `slots` jobs run at a time, and at most `per_key` of one key."""

    def __init__(self, slots: int, per_key: int) -> None:
        self._free, self._per_key = slots, per_key
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # ordered by turn; none is empty
        self._running = KeyCounts()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def start(self, key: str) -> bool:
        """Count a new job as running until `end`, and return True, if it need not wait."""
        if not self._free or self._running[key] >= self._per_key or key in self._waiting:
            return False
        self._free -= 1
        self._running.change(key, 1)
        return True

    def add(self, key: str, job: T) -> None:
        """Append a job to the queue of its key."""
        self._waiting.setdefault(key, deque()).append(job)

    def next(self, may_start: Callable[[str], bool] = lambda key: True) -> tuple[str, T] | None:
        """Return a waiting job that may start, which counts as running until `end`, or None.

        `may_start` returns whether jobs of a key may start.
        """
        if not self._free:
            return None
        key = next((key for key in self._waiting if self._running[key] < self._per_key and may_start(key)), None)
        if key is None:
            return None
        job = self._waiting[key].popleft()
        self._waiting.move_to_end(key)
        self._drop_empty(key)
        self._free -= 1
        self._running.change(key, 1)
        return key, job

    def end(self, key: str) -> None:
        """Record that a running job of this key has ended."""
        self._free += 1
        self._running.change(key, -1)

    def remove(self, key: str, job: T) -> bool:
        """Remove a job from the queue of its key. Returns whether it was there."""
        queue = self._waiting.get(key, ())
        if job not in queue:
            return False
        self._waiting[key].remove(job)
        self._drop_empty(key)
        return True

    def pop_newest(self) -> T:
        """Remove and return the newest job of the key with the most waiting jobs. Raises ValueError if none waits."""
        key = max(self._waiting, key=lambda key: len(self._waiting[key]))
        job = self._waiting[key].pop()
        self._drop_empty(key)
        return job

    def clear(self) -> None:
        """Forget all waiting and running jobs."""
        self._free += self._running.total()
        self._waiting.clear()
        self._running.clear()

    def _drop_empty(self, key: str) -> None:
        if not self._waiting[key]:
            del self._waiting[key]
