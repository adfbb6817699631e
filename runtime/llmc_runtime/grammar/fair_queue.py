"""Fair scheduling of compilations: tenants take turns, and each has a limit on its concurrent compilations."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue of jobs per tenant. At most `slots` jobs run concurrently, and at most `per_tenant` of one tenant."""

    def __init__(self, slots: int, per_tenant: int) -> None:
        self._slots, self._per_tenant = slots, per_tenant
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # ordered by turn
        self._running: Counter[str] = Counter()

    def add(self, tenant: str, job: T) -> None:
        """Append a job to the tenant's queue."""
        self._waiting.setdefault(tenant, deque()).append(job)

    def next(self) -> tuple[str, T] | None:
        """Return a job that may start, which counts as running until `end`, or None."""
        if self._running.total() >= self._slots:
            return None
        tenant = next((name for name in self._waiting if self._running[name] < self._per_tenant), None)
        if tenant is None:
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
        """Record that a running job of this tenant has ended."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def remove(self, tenant: str, job: T) -> None:
        """Remove a job from the tenant's queue, if it is there."""
        queue = self._waiting.get(tenant)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue:
                del self._waiting[tenant]

    def clear(self) -> None:
        """Forget all waiting and running jobs."""
        self._waiting.clear()
        self._running.clear()
