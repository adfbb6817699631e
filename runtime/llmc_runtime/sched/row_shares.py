"""Row shares: which running request loses its row and its pages, so that tenants get equal service.

Admission is fair, but a tenant may hold every row when another one arrives, for as long as its outputs are long. A
waiting request therefore takes a row after ROW_WAIT_SECONDS, if its tenant has fewer rows and has received less service
than the tenant that gives it. If pages run out, the tenant that has received most gives some. The request that loses
its row waits like any other, and is computed again later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llmc_runtime.sched.request import Request

ROW_WAIT_SECONDS = 1.0


def row_to_share(running: Sequence[Request], waiting: Request) -> Request | None:
    """Return the running request whose row goes to `waiting`, or None if there is none.

    Of the tenant with the most rows it is the last one in the order of `running`. The tenant keeps at least as many
    rows as the other one then has, so that two tenants never take the same row from each other in turns. Priorities
    order the requests of a tenant, and are no claim against another one: a client may send any number.
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
