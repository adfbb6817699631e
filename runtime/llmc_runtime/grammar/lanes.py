"""Whose compilation begins next: tenants take turns, and none has more than its lane of what runs at a time."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Lanes(Generic[T]):
    """Waiting jobs by tenant. At most `slots` run at a time, and at most `lane` of one tenant."""

    def __init__(self, slots: int, lane: int) -> None:
        self._slots, self._lane = slots, lane
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # whose turn is next comes first
        self._running: Counter[str] = Counter()

    def add(self, tenant: str, job: T) -> None:
        """The job waits behind those of its tenant."""
        self._waiting.setdefault(tenant, deque()).append(job)

    def next(self) -> tuple[str, T] | None:
        """A job that may begin now, which counts as running until `end`; None where none may."""
        if self._running.total() >= self._slots:
            return None
        for tenant in self._waiting:
            if self._running[tenant] < self._lane:
                break
        else:
            return None
        queue = self._waiting[tenant]
        job = queue.popleft()
        if queue:
            self._waiting.move_to_end(tenant)
        else:
            del self._waiting[tenant]
        self._running[tenant] += 1
        return tenant, job

    def end(self, tenant: str) -> None:
        """A job of this tenant runs no more."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def remove(self, tenant: str, job: T) -> None:
        """The job waits no more, if it did."""
        queue = self._waiting.get(tenant)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue:
                del self._waiting[tenant]

    def clear(self) -> None:
        """Nothing waits and nothing runs."""
        self._waiting.clear()
        self._running.clear()
