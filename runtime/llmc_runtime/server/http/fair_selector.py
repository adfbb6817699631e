"""A selector that limits how many client connections it reports per call, so that they do not delay others' streams.

An event loop handles all events of one `select` call before the next call. If hundreds of connections send at the same
time, that takes tens of milliseconds, during which no tokens are forwarded. The selector therefore has five epoll
objects:

- `_probes` watches clients whose last request was a health probe; `select` takes at most MAX_PROBES of its events.
- `_clients` watches other client connections; `select` takes at most MAX_CLIENTS of its events, or MAX_BATCH_CLIENTS.
- `_bodies` watches clients that are sending a body; `select` takes at most MAX_BODIES of its events.
- `_handshakes` watches connections in a TLS handshake, each of which takes 1 to 5 ms of processor time; `select` takes
  at most MAX_HANDSHAKES of its events.
- `_main` watches all other descriptors, and the four objects above.

An epoll object reports the descriptors first that it reported least recently, so all clients are served equally often.
Clients of light connections are not reported one by one, but together to `on_input`.

While requests are refused at a high rate, clients are polled in batches (see `BatchTimer`) instead of when data
arrives: a refusal takes about 20 us of processor time, but waking the process for each one takes several times as much
and interrupts an engine that uses every core.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from select import EPOLLIN, EPOLLOUT, epoll
from typing import Any

MAX_PROBES = 16  # events of `_probes` per call
MAX_CLIENTS = 16  # events of `_clients` per call, except in batches
MAX_BATCH_CLIENTS = 32  # events of `_clients` per batch
MAX_BODIES = 4  # events of `_bodies` per call; one after an iteration of the event loop that took LONG_SECONDS
MAX_HANDSHAKES = 1  # events of `_handshakes` per call
LONG_SECONDS = 0.002  # a body in chunks of a byte takes 3 ms to parse for each read
BATCH_SECONDS = 0.008  # minimum time between two batches
MAX_BATCH_SECONDS = 0.012  # maximum time between two batches
EXPECTED_SECONDS = 0.001  # maximum time until the next batch when a request is about to arrive
BATCHING_SECONDS = 0.1  # time after a refusal in which another one starts batching, and after the last which ends it

Events = list[tuple[selectors.SelectorKey, int]]


class BatchTimer:
    """Decides when clients are polled while requests are refused at a high rate.

    The next batch is polled with the first event of another descriptor after `_earliest`, and at `_latest` without one.
    All times are those of time.monotonic(), in seconds.
    """

    def __init__(self) -> None:
        self._last_refusal = -math.inf
        self._until = 0.0  # end of batching
        self._earliest = self._latest = 0.0

    def refused(self, count: int = 1) -> None:
        """Record refused requests. Batching starts, or continues, with several, or one shortly after another."""
        now = time.monotonic()
        if count > 1 or now - self._last_refusal < BATCHING_SECONDS:
            self._until = now + BATCHING_SECONDS
        self._last_refusal = now

    def expect(self) -> None:
        """Move the next batch forward, because a request is about to arrive on a new connection."""
        soon = time.monotonic() + EXPECTED_SECONDS
        self._earliest, self._latest = min(self._earliest, soon), min(self._latest, soon)

    def polled(self, *, more: bool) -> None:
        """Set the time of the next batch; it is at once if `more` clients may be ready."""
        now = time.monotonic()
        self._earliest, self._latest = (now, now) if more else (now + BATCH_SECONDS, now + MAX_BATCH_SECONDS)

    def active(self) -> bool:
        """Return whether clients are polled in batches now."""
        return time.monotonic() < self._until

    def due(self) -> bool:
        """Return whether the next batch may be polled now."""
        return time.monotonic() >= self._earliest

    def remaining(self) -> float:
        """Return the seconds until the next batch, at most; 0 while clients are not polled in batches."""
        return max(0.0, self._latest - time.monotonic()) if self.active() else 0.0

    def limit(self, timeout: float | None) -> float:
        """Return the timeout of a `select` call that must not miss the next batch."""
        remaining = max(0.0, self._latest - time.monotonic())
        return remaining if timeout is None else min(timeout, remaining)


class FairSelector(selectors.BaseSelector):
    """Reports all ready descriptors except clients, of which it reports a few per call, the least recently reported."""

    def __init__(self) -> None:
        self._keys = _Keys()
        self._main, self._clients, self._bodies, self._probes, self._handshakes = (epoll() for _ in range(5))
        self._client_epolls: dict[int, epoll] = {}  # by descriptor of a client, registered or not
        self._nested = frozenset((self._clients.fileno(), self._bodies.fileno()))
        for fd in (*self._nested, self._probes.fileno(), self._handshakes.fileno()):
            self._main.register(fd, EPOLLIN)
        self._returned = math.inf  # time at which the last `select` call returned
        self._most_bodies = MAX_BODIES  # limit for the next call
        self.batches = BatchTimer()
        self.batching = False  # whether the last `select` call polled clients in batches
        self._watched: dict[int, epoll] = {}  # descriptors whose input is reported to `on_input`, and what watches them
        self.on_input: Callable[[list[int]], object] = lambda fds: None

    def add_client(self, fd: int) -> None:
        """Treat a descriptor as a client connection until `remove_client`."""
        self._move(fd, self._clients)

    def add_handshake(self, fd: int) -> None:
        """Treat a descriptor as a connection in a TLS handshake until `end_handshake` or `add_client`."""
        self._move(fd, self._handshakes)

    def end_handshake(self, fd: int) -> None:
        """Stop treating a descriptor as a connection in a TLS handshake. Those that are clients by now stay so."""
        if self._client_epolls.get(fd) is self._handshakes:
            self._move(fd, None)

    def set_sending_body(self, fd: int, sending: bool) -> None:
        """Set whether the client is sending a body. Descriptors that are not clients are ignored."""
        self._set_kind(fd, self._bodies if sending else self._clients)

    def set_probing(self, fd: int, probing: bool = True) -> None:
        """Set whether the client is served first. Descriptors that are neither clients nor watched are ignored."""
        target = self._probes if probing else self._clients
        if fd in self._watched and fd not in self._keys.by_fd:
            if self._watched[fd] is not target:
                self._watched[fd].unregister(fd)
                target.register(fd, EPOLLIN)
                self._watched[fd] = target
        else:
            self._set_kind(fd, target)

    def remove_client(self, fd: int) -> None:
        """Stop treating a descriptor as a client connection."""
        if fd in self._client_epolls:
            self._move(fd, None)

    def watch(self, fd: int) -> None:
        """Report input of a client to `on_input`, and not to the event loop, until `unwatch`."""
        self._watched[fd] = self._clients
        if fd not in self._keys.by_fd:
            self._clients.register(fd, EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Report to the event loop again what happens on a descriptor that is registered."""
        source = self._watched.pop(fd, self._clients)
        if fd not in self._keys.by_fd:
            with contextlib.suppress(OSError):
                source.unregister(fd)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See selectors.BaseSelector."""
        fd = _fd_of(fileobj)
        if fd in self._keys.by_fd:
            raise KeyError(f"descriptor {fd} is already registered")
        key = selectors.SelectorKey(fileobj, fd, events, data)
        self._client_epolls.get(fd, self._main).register(fd, _mask(events))
        self._keys.by_fd[fd] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """See selectors.BaseSelector."""
        key = self._keys.by_fd.pop(_fd_of(fileobj))
        with contextlib.suppress(OSError):  # the descriptor is closed
            self._client_epolls.get(key.fd, self._main).unregister(key.fd)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See selectors.BaseSelector."""
        before = self._keys[fileobj]
        key = self._keys.by_fd[before.fd] = before._replace(events=events, data=data)
        if events != before.events:
            self._client_epolls.get(key.fd, self._main).modify(key.fd, _mask(events))
        return key

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        """See selectors.BaseSelector."""
        return self._keys[fileobj]

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """See selectors.BaseSelector."""
        return self._keys

    def close(self) -> None:
        """See selectors.BaseSelector."""
        for poll in (self._main, self._clients, self._bodies, self._probes, self._handshakes):
            poll.close()
        self._keys.by_fd.clear()

    def select(self, timeout: float | None = None) -> Events:
        """See selectors.BaseSelector. While clients are polled in batches, it may return early and without events."""
        slow = time.monotonic() - self._returned > LONG_SECONDS
        self._most_bodies = 1 if slow else min(MAX_BODIES, self._most_bodies + 1)
        self._set_batching(self.batches.active())
        if self.batching:
            ready = self._main.poll(self.batches.limit(timeout))
            poll_clients = self.batches.due()
        else:
            ready = self._main.poll(timeout)
            poll_clients = not self._nested.isdisjoint([fd for fd, _ in ready])
        if (self._probes.fileno(), EPOLLIN) in ready:
            ready += self._probes.poll(0, MAX_PROBES)
        if (self._handshakes.fileno(), EPOLLIN) in ready:
            ready += self._handshakes.poll(0, MAX_HANDSHAKES)
        events = self._events([*ready, *self._ready_clients()] if poll_clients else ready)
        self._returned = time.monotonic()
        return events

    def _set_batching(self, batching: bool) -> None:
        """Set whether data of clients wakes `select`: only while they are not polled in batches."""
        if batching is not self.batching:
            self.batching = batching
            for fd in self._nested:
                self._main.modify(fd, 0 if batching else EPOLLIN)

    def _ready_clients(self) -> list[tuple[int, int]]:
        """Return descriptors of clients with their events, up to the limits of one call."""
        limit = MAX_BATCH_CLIENTS if self.batching else MAX_CLIENTS
        clients, bodies = self._clients.poll(0, limit), self._bodies.poll(0, self._most_bodies)
        self.batches.polled(more=bool(bodies) or len(clients) == limit)
        return clients + bodies

    def _events(self, ready: list[tuple[int, int]]) -> Events:
        """Convert epoll events to those of selectors. An error is reported as all registered events of its key."""
        events, watched = [], []
        for fd, event in ready:
            if fd in self._watched:
                watched.append(fd)
            elif (key := self._keys.by_fd.get(fd)) is not None:
                read = selectors.EVENT_READ if event & ~EPOLLOUT else 0
                write = selectors.EVENT_WRITE if event & ~EPOLLIN else 0
                events.append((key, (read | write) & key.events))
        if watched:
            self.on_input(watched)
        return events

    def _set_kind(self, fd: int, target: epoll) -> None:
        if self._client_epolls.get(fd, target) is not target:
            self._move(fd, target)

    def _move(self, fd: int, target: epoll | None) -> None:
        """Move a descriptor to the epoll object of clients `target`, or, if it is None, to `_main`."""
        source = self._client_epolls.get(fd, self._main)
        if target is None:
            del self._client_epolls[fd]
        else:
            self._client_epolls[fd] = target
        if (key := self._keys.by_fd.get(fd)) is not None:
            source.unregister(fd)
            (target or self._main).register(fd, _mask(key.events))


class _Keys(Mapping[Any, selectors.SelectorKey]):
    """The registered keys, as a mapping from file objects or descriptors; `by_fd` maps only descriptors."""

    def __init__(self) -> None:
        self.by_fd: dict[int, selectors.SelectorKey] = {}

    def __getitem__(self, fileobj: Any) -> selectors.SelectorKey:
        return self.by_fd[_fd_of(fileobj)]

    def __iter__(self) -> Iterator[Any]:
        return (key.fileobj for key in self.by_fd.values())

    def __len__(self) -> int:
        return len(self.by_fd)


def _fd_of(fileobj: Any) -> int:
    """Return the descriptor of a file object. Raises ValueError if it is closed, like the selectors module."""
    fd = fileobj if isinstance(fileobj, int) else int(fileobj.fileno())
    if fd < 0:
        raise ValueError(f"invalid file descriptor: {fd}")
    return fd


def _mask(events: int) -> int:
    """Convert events of selectors to epoll's."""
    read = EPOLLIN if events & selectors.EVENT_READ else 0
    return read | (EPOLLOUT if events & selectors.EVENT_WRITE else 0)
