"""An event loop that accepts and serves few connections per iteration, so that they do not delay others' streams.

A loop handles all events of one `select` call before the next call. If hundreds of connections send at once, that takes
tens of milliseconds, during which no tokens are forwarded.
"""

from __future__ import annotations

import asyncio
import resource
import selectors
from collections.abc import Iterable
from typing import Any

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


class ServerLoop(asyncio.SelectorEventLoop):
    """An event loop that accepts and serves few connections per iteration.

    Connections over the limit are thus detected before descriptors run out, and many clients that send at once do not
    delay the engine's tokens. TLS handshakes have a time limit; connections do not count before their handshake ends.
    """

    handshake_seconds = 10.0
    tls_buffer = 16 << 10  # bytes decrypted at a time
    at_once = 32  # connections accepted per turn; their heads are parsed in turns (see read_turns)

    def __init__(self) -> None:
        self.fair = FairSelector()
        super().__init__(self.fair)

    async def create_server(self, *args: Any, **options: Any) -> Any:
        """Extend asyncio's method for a bound `sock`; `backlog` is the length of the accept queue."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = self.handshake_seconds
        waiting, (soft, _) = options.pop("backlog", 100), resource.getrlimit(resource.RLIMIT_NOFILE)
        few = self.at_once if soft == resource.RLIM_INFINITY else max(1, min(self.at_once, soft // 16))
        server = await super().create_server(*args, **options, backlog=few)
        options["sock"].listen(waiting)  # asyncio uses one number for both
        return server

    def _make_ssl_transport(self, *args: Any, **options: Any) -> Any:
        """Create the transport with a smaller buffer than asyncio's 256 KiB per connection, to save memory and time."""
        transport = super()._make_ssl_transport(*args, **options)  # type: ignore[misc]
        protocol = transport._ssl_protocol
        protocol.max_size = self.tls_buffer
        protocol._ssl_buffer = bytearray(self.tls_buffer)
        protocol._ssl_buffer_view = memoryview(protocol._ssl_buffer)
        return transport
