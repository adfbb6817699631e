"""A selector that limits how many client connections it reports at a time, so that they do not delay others' streams.

An event loop handles all events of one `select` call before the next call. If hundreds of connections send at once,
that takes tens of milliseconds, during which no tokens are forwarded.
"""

from __future__ import annotations

import selectors
from collections.abc import Iterable

MAX_CLIENTS = 16  # connections reported at a time
MAX_BULK = 4  # of connections in the middle of a body

Events = list[tuple[selectors.SelectorKey, int]]


class FairSelector(selectors.DefaultSelector):
    """Reports all ready descriptors, but only a few client connections: those least recently reported."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[int, int] = {}  # client descriptor -> number of the last call that reported it
        self._bulk: set[int] = set()
        self._calls = 0

    def add_client(self, fd: int) -> None:
        """Register a descriptor as a client connection until `remove_client`."""
        self._last[fd] = 0

    def set_bulk(self, fd: int, bulk: bool) -> None:
        """Set whether the client is in the middle of a body."""
        if bulk and fd in self._last:
            self._bulk.add(fd)
        else:
            self._bulk.discard(fd)

    def remove_client(self, fd: int) -> None:
        """Unregister a closed connection."""
        self._last.pop(fd, None)
        self._bulk.discard(fd)

    def select(self, timeout: float | None = None) -> Events:
        """See selectors.BaseSelector."""
        ready: Events = super().select(timeout)
        if len(ready) <= MAX_BULK:
            return ready
        self._calls += 1
        events = [event for event in ready if event[0].fd not in self._last]
        clients = [event for event in ready if event[0].fd in self._last]
        events += self._longest((event for event in clients if event[0].fd not in self._bulk), MAX_CLIENTS)
        return events + self._longest((event for event in clients if event[0].fd in self._bulk), MAX_BULK)

    def _longest(self, ready: Iterable[tuple[selectors.SelectorKey, int]], count: int) -> Events:
        """Return the events of the connections that were reported least recently."""
        events = sorted(ready, key=lambda event: self._last[event[0].fd])[:count]
        for key, _ in events:
            self._last[key.fd] = self._calls
        return events
