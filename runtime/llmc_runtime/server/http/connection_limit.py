"""The limit on connections: descriptors for them, which connection gives way when they are too many, unsent responses.

At the limit, a new connection takes the place of one without an open request, so that clients who send nothing cannot
keep others out. Light connections are closed first, then those that have never sent a request with a valid API key, and
then the others; of the same kind, the one that has waited longest.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from llmc_runtime.fair_queue import KeyCounts
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.http import read_turns
from llmc_runtime.server.http.event_loop import MIN_HANDSHAKES
from llmc_runtime.server.http.lingering_close import LingerCount
from llmc_runtime.server.http.parser_limits import HeadBudget, SliceTurns
from llmc_runtime.server.http.read_turns import BodyTurns, HeadTurns

MAX_CONNECTIONS = 4096  # default maximum number of connections
MAX_UNSENT = 128 << 20  # bytes of responses that wait for slow clients
MAX_UNCOUNTED = 16 << 10  # bytes of a connection's response that may wait without counting; asyncio's TLS has 512 KiB
MAX_UNSENT_KERNEL = 128 << 10  # bytes per connection in the kernel that have never been sent
_RESERVED, _MIN_RESERVED = 128, 40  # descriptors reserved for the server, open files, handshakes, and their minimum
_MAX_REFUSED = 64  # connections over the limit that receive an error response; further ones are closed at once


class Connection(read_turns.Connection, Protocol):
    """A connection that counts towards the limits."""

    @property
    def key(self) -> str:
        """The API key of its latest request; "" for none."""

    def evict(self) -> None:
        """Close the connection at once."""


class UnsentResponses:
    """The bytes of responses that wait because their clients read slowly, at most `maximum`.

    Beyond it, the key with the most bytes gives way: its connection that has waited longest is closed. The bytes of a
    connection include those that `hold` has added: its response is complete, and a part of it is not written yet.
    """

    def __init__(self, maximum: int = MAX_UNSENT) -> None:
        self.maximum, self.used = maximum, 0
        self._by_key = KeyCounts()
        self._waiting: dict[Connection, tuple[str, int]] = {}  # the longest waiting first
        self._held = WeakKeyDictionary[Connection, int]()  # a request may end after its connection was closed

    def hold(self, connection: Connection, size: int) -> None:
        """Count `size` bytes whenever the client of this connection is slow, until `release`."""
        self._held[connection] = self._held.get(connection, 0) + size
        if connection in self._waiting:
            self._count(connection, size)

    def release(self, connection: Connection) -> None:
        """Forget what `hold` has added: the response of this connection was written."""
        self._held.pop(connection, None)

    def add(self, connection: Connection, size: int) -> None:
        """Count `size` bytes that wait for the client of this connection."""
        self.remove(connection)
        self._waiting[connection] = connection.key, 0
        self._count(connection, size + self._held.get(connection, 0))

    def _count(self, connection: Connection, size: int) -> None:
        """Count `size` more bytes of a waiting connection."""
        key, before = self._waiting[connection]
        self._waiting[connection] = key, before + size
        self._by_key.change(key, size)
        self.used += size
        while self.used > self.maximum:
            heaviest = self._by_key.heaviest
            longest = next(connection for connection, (key, _) in self._waiting.items() if key == heaviest)
            self.remove(longest)
            longest.evict()

    def remove(self, connection: Connection) -> None:
        """Forget a connection whose client has read its response, or which is closed."""
        key, size = self._waiting.pop(connection, ("", 0))
        self.used -= size
        self._by_key.change(key, -size)


@dataclass
class ConnectionLimit:
    """The limit on connections, and the state that the connections of a server share.

    `on_refused` is called for each connection over the limit that finds no place. The first `max_refused` of these
    receive an error response. `evict_light` closes a light connection and returns True, or returns False without one.
    """

    maximum: int = MAX_CONNECTIONS
    on_refused: Callable[[], None] = lambda: None
    open: int = 0
    max_refused: int = _MAX_REFUSED
    lingering: LingerCount = field(default_factory=LingerCount)
    body_turns: BodyTurns = field(default_factory=BodyTurns)
    head_turns: HeadTurns = field(default_factory=HeadTurns)
    slice_turns: SliceTurns = field(default_factory=SliceTurns)
    evict_light: Callable[[], bool] = lambda: False
    unsent: UnsentResponses = field(default_factory=UnsentResponses)
    heads: HeadBudget = field(default_factory=HeadBudget)
    _unknown: OrderedDict[Connection, None] = field(default_factory=OrderedDict)  # idle, never with a valid key
    _known: OrderedDict[Connection, None] = field(default_factory=OrderedDict)  # idle after a request with one
    _evicted: set[Connection] = field(default_factory=set)  # closed, but still counted as open

    @classmethod
    def within_descriptors(cls, maximum: int, on_refused: Callable[[], None]) -> ConnectionLimit:
        """Return a limit with as many error responses as the process's descriptors allow."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(
            maximum, on_refused, max_refused=_MAX_REFUSED if soft == resource.RLIM_INFINITY else allowed(soft)[1]
        )

    def handshakes(self) -> int:
        """Return how many connections may be in a TLS handshake: these do not count yet, but have descriptors."""
        return max(MIN_HANDSHAKES, self.maximum - self.open)

    def enter(self, connection: Connection) -> int:
        """Count a new connection, for which an idle one may be closed. Returns by how many the limit is exceeded."""
        self.open += 1
        excess = self.open - len(self._evicted) - self.maximum
        if excess > 0 and self._evict():
            excess -= 1
        if excess <= 0:
            self._unknown[connection] = None
        return excess

    def _evict(self) -> bool:
        """Close an idle connection. Returns False without one."""
        if self.evict_light():
            return True
        idle = self._unknown or self._known
        if not idle:
            return False
        victim, _ = idle.popitem(last=False)
        self._evicted.add(victim)
        victim.evict()
        return True

    def begin(self, connection: Connection) -> None:
        """Record that a request has begun, so that the connection is not idle."""
        self._unknown.pop(connection, None)
        self._known.pop(connection, None)

    def rest(self, connection: Connection) -> None:
        """Record that the connection is idle after a request."""
        self.unsent.release(connection)
        if connection not in self._evicted:
            (self._known if connection.key else self._unknown)[connection] = None

    def leave(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self.open -= 1
        self.begin(connection)
        self._evicted.discard(connection)
        self.unsent.remove(connection)
        self.unsent.release(connection)
        self.body_turns.leave(connection)
        self.head_turns.leave(connection)


def set_descriptor_limit(requested: int | None) -> int:
    """Return the maximum number of connections: `requested`, or MAX_CONNECTIONS and at most what the system allows.

    The process's soft limit of file descriptors is raised if necessary. Raises LlmcError E667 if `requested`
    connections need more descriptors than the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (requested or MAX_CONNECTIONS) + _MAX_REFUSED + _RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed and requested is not None:
            cause = f"{requested} connections need {needed} file descriptors, the limit is {hard}"
            raise LlmcError("E667", cause, f"use --max-connections {allowed(hard)[0]}, or a higher ulimit -n")
        return min(requested or MAX_CONNECTIONS, allowed(soft)[0])
    return requested or MAX_CONNECTIONS


def allocate_descriptors(connections: int) -> None:
    """Grow the kernel's table of this process's descriptors to the size that `connections` need.

    Linux doubles a full table, and the thread that opens the descriptor then waits 10 to 25 ms for the other processors
    (an RCU grace period). In the event loop, that would delay the tokens of all streams.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _MAX_REFUSED + _RESERVED
    last = (needed if soft == resource.RLIM_INFINITY else min(needed, soft)) - 1
    with open(os.devnull, "rb") as null:
        os.close(fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, last))


def allowed(soft: int) -> tuple[int, int]:
    """Split `soft` descriptors into connections to serve and connections over the limit to answer with an error.

    If there are few descriptors, half of them are reserved for the server, and a quarter of the rest is for errors.
    """
    available = soft - min(_RESERVED, max(_MIN_RESERVED, soft // 2))
    refused = min(_MAX_REFUSED, max(1, available // 4))
    return max(1, available - refused), refused


def limit_unsent(transport: asyncio.Transport, seconds: float) -> None:
    """Have the kernel drop a connection whose peer does not acknowledge data, even after it was closed here.

    The kernel keeps at most MAX_UNSENT_KERNEL bytes that the peer has no room for; by default it keeps megabytes. The
    transport reports that it is full with MAX_UNCOUNTED bytes.
    """
    transport.set_write_buffer_limits(MAX_UNCOUNTED)
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_KERNEL)
