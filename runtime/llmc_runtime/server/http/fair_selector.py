"""A selector that limits how many client connections it reports at a time, so that they do not delay others' streams.

An event loop handles all events of one `select` call before the next call. If hundreds of connections send at once,
that takes tens of milliseconds, during which no tokens are forwarded. Clients' descriptors are therefore watched by
epoll objects of their own, from which few events are taken at a time; the kernel reports those first that were reported
least recently.

While requests are refused, clients are looked at in turns instead of when something arrives: with the next event of
another kind after TURN_SECONDS, and after LONGEST_TURN at the latest. A refusal takes some 30 us of processor time, but
to wake the process for a single one takes several times as much, and interrupts an engine that uses every core.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Iterator, Mapping
from select import EPOLLIN, EPOLLOUT, epoll
from typing import Any

MAX_CLIENTS = 16  # connections reported at a time
MAX_BULK = 4  # of connections in the middle of a body
TURN_SECONDS, LONGEST_TURN = 0.004, 0.010
SOON_SECONDS = 0.001  # until the next turn if a request is about to arrive
PACED_SECONDS = 0.02  # after the last refusal, in which clients are looked at in turns

Events = list[tuple[selectors.SelectorKey, int]]


class FairSelector(selectors.BaseSelector):
    """Reports all ready descriptors, but only a few client connections: those least recently reported."""

    def __init__(self) -> None:
        self._keys = _Keys()
        self._main, self._clients, self._bulk = (epoll() for _ in range(3))
        self._of_clients: dict[int, epoll] = {}  # descriptor -> the object that watches it once registered
        self._inner = frozenset((self._clients.fileno(), self._bulk.fileno()))
        for fd in self._inner:
            self._main.register(fd, EPOLLIN)
        self._refused, self._paced_until = -PACED_SECONDS, 0.0
        self._paced = False
        self._next = self._latest = 0.0  # when clients are looked at again

    def add_client(self, fd: int) -> None:
        """Treat a descriptor as a client connection until `remove_client`."""
        self._move(fd, self._clients)

    def set_bulk(self, fd: int, bulk: bool) -> None:
        """Set whether the client is in the middle of a body."""
        place = self._bulk if bulk else self._clients
        if self._of_clients.get(fd, place) is not place:
            self._move(fd, place)

    def remove_client(self, fd: int) -> None:
        """Treat a descriptor as any other."""
        if fd in self._of_clients:
            self._move(fd, None)

    @property
    def in_turns(self) -> bool:
        """Whether clients are looked at in turns."""
        return self._paced

    def refused(self) -> None:
        """Record that a request was refused. Soon after another one, clients are looked at in turns for a while."""
        now = time.monotonic()
        if now - self._refused < LONGEST_TURN:
            self._paced_until = now + PACED_SECONDS
        self._refused = now

    def expect(self) -> None:
        """Record that a client's request is about to arrive, as of a new connection: the next turn is soon."""
        soon = time.monotonic() + SOON_SECONDS
        self._next, self._latest = min(self._next, soon), min(self._latest, soon)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See selectors.BaseSelector."""
        fd = _fd_of(fileobj)
        if fd in self._keys.by_fd:
            raise KeyError(f"descriptor {fd} is already registered")
        key = selectors.SelectorKey(fileobj, fd, events, data)
        self._of_clients.get(fd, self._main).register(fd, _mask(events))
        self._keys.by_fd[fd] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """See selectors.BaseSelector."""
        key = self._keys.by_fd.pop(_fd_of(fileobj))
        with contextlib.suppress(OSError):  # the descriptor is closed
            self._of_clients.get(key.fd, self._main).unregister(key.fd)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See selectors.BaseSelector."""
        before = self._keys[fileobj]
        key = self._keys.by_fd[before.fd] = before._replace(events=events, data=data)
        if events != before.events:
            self._of_clients.get(key.fd, self._main).modify(key.fd, _mask(events))
        return key

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        """See selectors.BaseSelector."""
        return self._keys[fileobj]

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """See selectors.BaseSelector."""
        return self._keys

    def close(self) -> None:
        """See selectors.BaseSelector."""
        for poll in (self._main, self._clients, self._bulk):
            poll.close()
        self._keys.by_fd.clear()

    def select(self, timeout: float | None = None) -> Events:
        """See selectors.BaseSelector. While clients take turns, it may return early and without events."""
        now = time.monotonic()
        paced = now < self._paced_until
        if paced is not self._paced:
            self._paced = paced
            for fd in self._inner:
                self._main.modify(fd, 0 if paced else EPOLLIN)
        if paced:
            wait = max(0.0, self._latest - now)
            ready = self._main.poll(wait if timeout is None else min(timeout, wait))
            look = time.monotonic() >= self._next
        else:
            ready = self._main.poll(timeout)
            look = not self._inner.isdisjoint([fd for fd, _ in ready])
        return self._events([*ready, *self._ready_clients()] if look else ready)

    def _ready_clients(self) -> list[tuple[int, int]]:
        """Return descriptors of clients with their events. The next turn is at once if others may wait."""
        clients, bulk = self._clients.poll(0, MAX_CLIENTS), self._bulk.poll(0, MAX_BULK)
        now, more = time.monotonic(), bool(bulk) or len(clients) == MAX_CLIENTS
        self._next, self._latest = (now, now) if more else (now + TURN_SECONDS, now + LONGEST_TURN)
        return clients + bulk

    def _events(self, ready: list[tuple[int, int]]) -> Events:
        """Return the keys of registered descriptors with their events; an error is reported as all of them."""
        found = []
        for fd, event in ready:
            if (key := self._keys.by_fd.get(fd)) is not None:
                read = selectors.EVENT_READ if event & ~EPOLLOUT else 0
                write = selectors.EVENT_WRITE if event & ~EPOLLIN else 0
                found.append((key, (read | write) & key.events))
        return found

    def _move(self, fd: int, place: epoll | None) -> None:
        """Have a descriptor watched by another epoll object; None: the one for all that are no clients."""
        before = self._of_clients.get(fd, self._main)
        if place is None:
            del self._of_clients[fd]
        else:
            self._of_clients[fd] = place
        if (key := self._keys.by_fd.get(fd)) is not None:
            before.unregister(fd)
            (place or self._main).register(fd, _mask(key.events))


class _Keys(Mapping[Any, selectors.SelectorKey]):
    """The registered keys by file object or descriptor, and `by_fd`."""

    def __init__(self) -> None:
        self.by_fd: dict[int, selectors.SelectorKey] = {}

    def __getitem__(self, fileobj: Any) -> selectors.SelectorKey:
        return self.by_fd[_fd_of(fileobj)]

    def __iter__(self) -> Iterator[Any]:
        return (key.fileobj for key in self.by_fd.values())

    def __len__(self) -> int:
        return len(self.by_fd)


def _fd_of(fileobj: Any) -> int:
    """Return the descriptor of a file object. Raises ValueError as selectors do for one that is closed."""
    fd = fileobj if isinstance(fileobj, int) else int(fileobj.fileno())
    if fd < 0:
        raise ValueError(f"invalid file descriptor: {fd}")
    return fd


def _mask(events: int) -> int:
    read = EPOLLIN if events & selectors.EVENT_READ else 0
    return read | (EPOLLOUT if events & selectors.EVENT_WRITE else 0)
