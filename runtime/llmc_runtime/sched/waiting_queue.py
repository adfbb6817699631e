"""WaitingQueue: the requests that wait for a row, and which of them is admitted next.

The tenant that has received the least service is next (the virtual token counter of Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024). Service is counted in tokens: 1 for each prompt token that was computed when its
request first received a row, OUTPUT_WEIGHT for each generated token and each scored prompt token, as both need a row
of logits. A tenant without waiting requests accumulates no credit: when it gets one, its count is raised to the
minimum of the waiting tenants. Within a tenant, requests are ordered by their keys, so that those that were preempted
come before those that arrived later.

Counts only grow, so entries of the tenants' heap may be outdated: they are corrected when they reach the top.

Admission is fair, but a tenant may hold every row when another one arrives, for as long as its outputs are long. A
waiting request therefore takes a row after ROW_WAIT_SECONDS, if its tenant has fewer rows and has received less service
than the tenant that gives it (`row_to_share`). If pages run out, the tenant that has received most gives some. The
request that loses its row waits like any other, and is computed again later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from operator import attrgetter

from llmc_runtime.sched.request import Account, Request

OUTPUT_WEIGHT = 2
_MIN_KEPT = 256  # tenants without requests that are remembered at least
_KEY = attrgetter("key")
ROW_WAIT_SECONDS = 1.0
# Tokens of the requests that a step admits, cached ones included, after which no further one is admitted: finding and
# sharing the pages of a cached prefix takes the host about 0.1 us per token.
MAX_ADMITTED_TOKENS = 1 << 16


class Tenant(Account):
    """A tenant: its service and its waiting requests in order of their keys.

    live:  number of its requests that have not ended
    turn:  order in which tenants began to wait, which decides between equal service
    """

    __slots__ = ("_num_removed", "_queue", "live", "name", "turn")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.live, self.turn = name, 0, 0
        self._queue: list[Request] = []
        self._num_removed = 0  # number of removed requests at the start of the queue: at most half of it

    def __len__(self) -> int:
        return len(self._queue) - self._num_removed

    def __bool__(self) -> bool:
        return True

    @property
    def head(self) -> Request:
        """Its first waiting request."""
        return self._queue[self._num_removed]

    @property
    def queue(self) -> list[Request]:
        """Its waiting requests."""
        return self._queue[self._num_removed :]

    def add(self, request: Request) -> None:
        """Insert a request by its key."""
        queue = self._queue
        if not queue or queue[-1].key < request.key:
            queue.append(request)
        else:
            insort(queue, request, lo=self._num_removed, key=_KEY)

    def remove(self, request: Request) -> None:
        """Remove a request; the first one in O(1) amortized."""
        if self.head is not request:
            del self._queue[bisect_left(self._queue, request.key, lo=self._num_removed, key=_KEY)]
            return
        self._num_removed += 1
        if 2 * self._num_removed > len(self._queue):
            del self._queue[: self._num_removed]
            self._num_removed = 0


def prompt_service(request: Request, cached: int) -> int:
    """Return the service of computing a prompt of which `cached` tokens are in the prefix cache."""
    return (request.num_prompt - cached) * (1 if request.scores is None else OUTPUT_WEIGHT)


class WaitingQueue:
    """The waiting requests of all tenants (a tenant is an API key; without keys there is one).

    `enter` and `leave` are called once for each request, when it arrives and ends; in between it may be added and
    removed several times.
    """

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self._heap: list[tuple[int, int, Tenant]] = []  # (service, turn) of each waiting tenant, and outdated entries
        self.num_tokens = 0  # prompt tokens of all requests in the queue
        self._count = self._live = self._turns = 0
        self._last: Tenant | None = None  # the last one whose queue became empty
        self._max_tenants = _MIN_KEPT

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests of all tenants in order of their keys."""
        return iter(sorted((r for tenant in self.tenants.values() for r in tenant.queue), key=_KEY))

    def enter(self, request: Request) -> None:
        """Register a new request with its tenant."""
        tenant = self.tenants.get(request.tenant)
        if tenant is None:
            if len(self.tenants) >= self._max_tenants:
                self._forget()
            tenant = self.tenants[request.tenant] = Tenant(request.tenant)
        tenant.live += 1
        self._live += 1
        request.account = tenant

    def leave(self, request: Request) -> None:
        """Unregister a request that has ended. After the last live one the fairness counters are reset."""
        self.tenants[request.tenant].live -= 1
        self._live -= 1
        if not self._live:
            self.clear()

    def add(self, request: Request) -> None:
        """Insert a request by its key."""
        tenant = self.tenants[request.tenant]
        if not len(tenant):
            self._start_waiting(tenant)
        tenant.add(request)
        self._count += 1
        self.num_tokens += request.num_prompt

    def remove(self, request: Request) -> None:
        """Remove a request."""
        tenant = self.tenants[request.tenant]
        tenant.remove(request)
        self._count -= 1
        self.num_tokens -= request.num_prompt
        if not len(tenant):
            self._last = tenant

    def first(self) -> Request | None:
        """Return the request that is admitted next, None if none waits."""
        next_tenant = self._least()
        return None if next_tenant is None else next_tenant.head

    def has_other(self, tenant: str) -> bool:
        """Whether a request of another tenant waits."""
        return self._count > len(self.tenants[tenant])

    def clear(self) -> None:
        """Remove all requests and tenants."""
        self.tenants.clear()
        self._heap.clear()
        self.num_tokens = self._count = self._live = 0
        self._last = None

    def _start_waiting(self, tenant: Tenant) -> None:
        """Enter a tenant that gets its first waiting request into the order of tenants, without saved-up credit."""
        least_served = self._least() or self._last
        if least_served is not None:
            tenant.service = max(tenant.service, least_served.service)
        self._turns += 1
        tenant.turn = self._turns
        heappush(self._heap, (tenant.service, tenant.turn, tenant))
        if len(self._heap) > 2 * len(self.tenants) + _MIN_KEPT:
            entries = [e for e in self._heap if e[1] == e[2].turn and (len(e[2]) or e[2] is tenant)]
            self._heap[:] = sorted(entries)

    def _least(self) -> Tenant | None:
        """Return the waiting tenant with the least service."""
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
        """Remove tenants without requests whose counts would be raised when they return, so that nothing is lost."""
        least_served = self._least() or self._last
        floor = 0 if least_served is None else least_served.service
        for name in [n for n, t in self.tenants.items() if not t.live and t.service <= floor]:
            del self.tenants[name]
        self._max_tenants = max(_MIN_KEPT, 2 * len(self.tenants))


def row_to_share(running: Sequence[Request], waiting: Request) -> Request | None:
    """Return the running request whose row goes to `waiting`, or None if there is none.

    Of the tenant with the most rows it is the last one in the order of `running`. The tenant keeps at least as many
    rows as the other one then has, so that two tenants never take the same row from each other in turns. Priorities
    order the requests of a tenant, not those of different tenants: a client may send any number.
    """
    rows = Counter(request.tenant for request in running)
    tenant, num_rows = max(rows.items(), key=lambda item: item[1], default=("", 0))
    if num_rows < rows[waiting.tenant] + 2:
        return None
    victim = next(request for request in reversed(running) if request.tenant == tenant)
    return victim if victim.account.service > waiting.account.service else None


def last_of_most_served(running: Sequence[Request]) -> Request:
    """Return the last request of the tenant that has received the most service, of these in order of their keys."""
    return max(reversed(running), key=lambda request: request.account.service)
