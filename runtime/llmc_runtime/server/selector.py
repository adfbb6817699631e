"""A selector that reports few clients' connections at a time, so that many of them do not hold up the others' streams.

An event loop handles everything that one call of `select` reports before it calls again. With hundreds of connections
that send at once, that takes tens of milliseconds, in which no token of the engine is passed on.
"""

from __future__ import annotations

import selectors
from collections.abc import Iterable

MOST = 16  # connections that are reported at a time
MOST_BULK = 4  # and that are in the midst of a body

Events = list[tuple[selectors.SelectorKey, int]]


class FairSelector(selectors.DefaultSelector):
    """Reports every descriptor that is ready, but of clients' connections few: those that were not for the longest."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[int, int] = {}  # of each client's connection: the call that reported it last
        self._bulk: set[int] = set()
        self._calls = 0

    def add_client(self, fd: int) -> None:
        """This descriptor is a client's connection, until `remove_client`."""
        self._last[fd] = 0

    def set_bulk(self, fd: int, bulk: bool) -> None:
        """Whether the client is in the midst of a body."""
        if bulk and fd in self._last:
            self._bulk.add(fd)
        else:
            self._bulk.discard(fd)

    def remove_client(self, fd: int) -> None:
        """The connection is closed."""
        self._last.pop(fd, None)
        self._bulk.discard(fd)

    def select(self, timeout: float | None = None) -> Events:
        """See selectors.BaseSelector."""
        ready: Events = super().select(timeout)
        if len(ready) <= MOST_BULK:
            return ready
        self._calls += 1
        found = [one for one in ready if one[0].fd not in self._last]
        clients = [one for one in ready if one[0].fd in self._last]
        found += self._longest((one for one in clients if one[0].fd not in self._bulk), MOST)
        return found + self._longest((one for one in clients if one[0].fd in self._bulk), MOST_BULK)

    def _longest(self, ready: Iterable[tuple[selectors.SelectorKey, int]], most: int) -> Events:
        """Those that were not reported for the longest."""
        found = sorted(ready, key=lambda one: self._last[one[0].fd])[:most]
        for key, _ in found:
            self._last[key.fd] = self._calls
        return found
