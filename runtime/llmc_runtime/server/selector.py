"""A selector that reports few clients' connections at a time, so that many of them do not hold up the others' streams.

An event loop handles everything that one call of `select` reports before it calls again. With hundreds of connections
that send at once, that takes tens of milliseconds, in which no token of the engine is passed on.
"""

from __future__ import annotations

import selectors

MOST = 16  # connections that are reported at a time


class FairSelector(selectors.DefaultSelector):
    """Reports every descriptor that is ready, but of those in `limited` at most MOST: the longest not reported ones."""

    def __init__(self) -> None:
        super().__init__()
        self.limited: dict[int, int] = {}  # by descriptor: the call that reported it last
        self._calls = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See selectors.BaseSelector."""
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        if len(ready) <= MOST:
            return ready
        self._calls += 1
        last = self.limited
        found = [one for one in ready if one[0].fd not in last]
        clients = sorted((one for one in ready if one[0].fd in last), key=lambda one: last[one[0].fd])[:MOST]
        for key, _ in clients:
            last[key.fd] = self._calls
        return found + clients
