"""The requests that wait for a row, by tenant: who of them goes next. It plans no step and holds no pages.

Among tenants the one that got the least service goes first (the virtual token counter of Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024). Service is counted in tokens: one for each prompt token that was computed
when its request first got a row, OUTPUT_WEIGHT for each token generated and for each prompt token that is scored, as
both need a row of logits. A tenant that has nothing waiting saves
nothing up: when it comes (back), its count is lifted to the least of those that wait. Requests that ran before and were
preempted go first of all, the oldest of them first, as long as their own tenant has nobody before them. Within a tenant
the order is that of the keys; with one tenant there is no other.

Counts only grow, so the heap of tenants may hold old ones: an entry is put right when it comes to the top.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from operator import attrgetter

from llmc_runtime.sched.request import Account, Request, Status

OUTPUT_WEIGHT = 2
_FORGET = 256  # tenants without requests that are kept at least; only some count among them can matter
_KEY = attrgetter("key")


class Tenant(Account):
    """Whose requests they are, how much service they got, and those that wait, in order of their keys.

    `live` requests have not ended; `turn`: when it began to wait; of two with equal service the first goes first.
    """

    __slots__ = ("_gone", "_queue", "live", "name", "turn")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.live, self.turn = name, 0, 0
        self._queue: list[Request] = []
        self._gone = 0  # at the beginning of the queue, that wait no more: half of it at most

    def __len__(self) -> int:
        return len(self._queue) - self._gone

    def __bool__(self) -> bool:
        return True

    @property
    def head(self) -> Request:
        """Its next request."""
        return self._queue[self._gone]

    @property
    def queue(self) -> list[Request]:
        """All that wait."""
        return self._queue[self._gone :]

    def add(self, request: Request) -> None:
        """It waits, in its place."""
        queue = self._queue
        if not queue or queue[-1].key < request.key:
            queue.append(request)
        else:
            insort(queue, request, lo=self._gone, key=_KEY)

    def remove(self, request: Request) -> None:
        """It waits no more; the first one leaves without moving the others."""
        if self.head is not request:
            del self._queue[bisect_left(self._queue, request.key, lo=self._gone, key=_KEY)]
            return
        self._gone += 1
        if 2 * self._gone > len(self._queue):
            del self._queue[: self._gone]
            self._gone = 0


def prompt_service(request: Request, cached: int) -> int:
    """The service of computing a prompt of which `cached` tokens are in the prefix cache."""
    return (request.num_prompt - cached) * (1 if request.scores is None else OUTPUT_WEIGHT)


class Waiting:
    """All waiting requests. A request is `enter`ed and `leave`s once in its life, and is added and taken in between."""

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self._heap: list[tuple[int, int, Tenant]] = []  # (service, turn) of each tenant with a queue, and past ones
        self._preempted: set[Request] = set()
        self._count = self._live = self._turns = 0
        self._last: Tenant | None = None  # whose queue was the last to become empty
        self._many = _FORGET

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """The requests in order of their keys, whoever's they are."""
        return iter(sorted((r for tenant in self.tenants.values() for r in tenant.queue), key=_KEY))

    def enter(self, request: Request) -> None:
        """A new request: its tenant is known until it leaves."""
        tenant = self.tenants.get(request.tenant)
        if tenant is None:
            if len(self.tenants) >= self._many:
                self._forget()
            tenant = self.tenants[request.tenant] = Tenant(request.tenant)
        tenant.live += 1
        self._live += 1
        request.account = tenant

    def leave(self, request: Request) -> None:
        """It has ended, and waits no more. With the last of all every count is forgotten: nobody is owed anything."""
        self.tenants[request.tenant].live -= 1
        self._live -= 1
        if not self._live:
            self.clear()

    def add(self, request: Request) -> None:
        """It waits, in its place."""
        tenant = self.tenants[request.tenant]
        if not len(tenant):
            self._begin(tenant)
        tenant.add(request)
        self._count += 1
        if request.status is Status.PREEMPTED:
            self._preempted.add(request)

    def remove(self, request: Request) -> None:
        """It waits no more."""
        tenant = self.tenants[request.tenant]
        tenant.remove(request)
        self._count -= 1
        self._preempted.discard(request)
        if not len(tenant):
            self._last = tenant

    def first(self) -> Request | None:
        """Who goes next."""
        if self._preempted:
            heads = [r for r in self._preempted if self.tenants[r.tenant].head is r]
            if heads:
                return min(heads, key=_KEY)
        least = self._least()
        return None if least is None else least.head

    def has_other(self, tenant: str) -> bool:
        """Whether a request of another tenant waits."""
        return self._count > len(self.tenants[tenant])

    def clear(self) -> None:
        """Nobody waits, and nothing is remembered."""
        self.tenants.clear()
        self._heap.clear()
        self._preempted.clear()
        self._count = self._live = 0
        self._last = None

    def _begin(self, tenant: Tenant) -> None:
        """A tenant without waiting requests gets one."""
        least = self._least() or self._last
        if least is not None:
            tenant.service = max(tenant.service, least.service)
        self._turns += 1
        tenant.turn = self._turns
        heappush(self._heap, (tenant.service, tenant.turn, tenant))
        if len(self._heap) > 2 * len(self.tenants) + _FORGET:
            kept = [e for e in self._heap if e[1] == e[2].turn and (len(e[2]) or e[2] is tenant)]
            self._heap[:] = sorted(kept)

    def _least(self) -> Tenant | None:
        """The waiting tenant with the least service."""
        heap = self._heap
        while heap:
            service, turn, tenant = heap[0]
            if turn != tenant.turn or not len(tenant):
                heappop(heap)
            elif service != tenant.service:
                heapreplace(heap, (tenant.service, turn, tenant))
            else:
                return tenant
        return None

    def _forget(self) -> None:
        """Let go of those without requests whose count would be lifted anyway."""
        least = self._least() or self._last
        floor = 0 if least is None else least.service
        for name in [n for n, t in self.tenants.items() if not t.live and t.service <= floor]:
            del self.tenants[name]
        self._many = max(_FORGET, 2 * len(self.tenants))
