"""The load generator of `bench.overload`: sends requests over many connections of one thread, and times each."""

from __future__ import annotations

import errno
import itertools
import re
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

TIMEOUT = 60.0  # seconds after which a request without an answer counts as lost
LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
MOST_OPEN = 3000  # connections of the client


@dataclass
class Log:
    """Outcomes of requests: (time of the end, seconds it took) by kind; `late`: seconds behind schedule."""

    done: list[tuple[float, float]] = field(default_factory=list)
    refused: list[tuple[float, float]] = field(default_factory=list)
    late: list[tuple[float, float]] = field(default_factory=list)
    failed: int = 0

    def within(self, begin: float, end: float) -> Log:
        """Return the outcomes between two times; failures are counted at any time."""
        kinds = (self.done, self.refused, self.late)
        parts = ([event for event in events if begin <= event[0] < end] for events in kinds)
        return Log(*parts, self.failed)


class Link:
    """A connection with at most one request in flight."""

    def __init__(self, port: int) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.connect_ex(("127.0.0.1", port))
        self.began = 0.0
        self.unsent = b""
        self.got = b""

    def start(self, request: bytes, now: float) -> None:
        """Start to send a request."""
        self.began, self.unsent, self.got = now, request, b""

    def send(self) -> bool:
        """Send as much as the socket accepts; return whether all bytes were sent."""
        try:
            self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            pass
        except OSError as e:
            if e.errno not in (errno.ENOTCONN, errno.EAGAIN):
                raise
        return not self.unsent

    def receive(self) -> int | None:
        """Return the status of the response once it is complete. Raises OSError if the connection ends before."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        self.got += data
        head, separator, body = self.got.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not separator or len(body) < (int(length[1]) if length else 0):
            return None
        return int(head[9:12])


class Client:
    """Sends requests to one server over kept connections, or a new one each; one thread, sockets and epoll alone, so
    that it takes little of a machine that the server shares. With `spin` it never sleeps, see overload.py."""

    def __init__(self, port: int, keep: bool, requests: Sequence[bytes], spin: bool = False) -> None:
        self._port, self._keep, self._requests, self._spin = port, keep, itertools.cycle(requests), spin
        self._poll = select.epoll()
        self._idle: list[Link] = []
        self._busy: dict[int, Link] = {}

    def start(self, due: float, log: Log) -> None:
        """Send a request; `due` is the scheduled time."""
        now = time.perf_counter()
        log.late.append((now, max(0.0, now - due)))
        if len(self._busy) >= MOST_OPEN:
            log.failed += 1
            return
        link, events = self._idle.pop() if self._idle else None, select.EPOLLIN
        fresh = link is None
        link = link or Link(self._port)
        link.start(next(self._requests), now)
        try:
            events |= 0 if link.send() else select.EPOLLOUT
        except OSError:
            log.failed += 1
            link.socket.close()
            return
        fd = link.socket.fileno()
        self._busy[fd] = link
        if fresh:
            self._poll.register(fd, events)
        elif events != select.EPOLLIN:
            self._poll.modify(fd, events)

    def wait(self, seconds: float, log: Log) -> int:
        """Process responses for `seconds`; return how many requests have ended."""
        ended = 0
        for fd, events in self._events(max(0.0, seconds)):
            link = self._busy.get(fd)
            if link is None:  # the server closed an idle connection
                self._drop(next(idle for idle in self._idle if idle.socket.fileno() == fd))
                continue
            try:
                if link.unsent and events & select.EPOLLOUT and link.send():
                    self._poll.modify(fd, select.EPOLLIN)
                status = link.receive() if events & ~select.EPOLLOUT else None
            except OSError:
                self._busy.pop(fd).socket.close()
                log.failed += 1
                ended += 1
                continue
            if status is not None:
                ended += 1
                self._end(fd, link, status, log)
        return ended

    def _events(self, seconds: float) -> list[tuple[int, int]]:
        """Return the next events, waiting up to `seconds` for the first."""
        if not self._spin:
            return self._poll.poll(seconds)
        end = time.perf_counter() + seconds
        while not (events := self._poll.poll(0)) and time.perf_counter() < end:
            pass
        return events

    def _end(self, fd: int, link: Link, status: int, log: Log) -> None:
        now = time.perf_counter()
        where = log.done if status == 200 else log.refused if status in (429, 503) else None
        if where is None:
            log.failed += 1
        else:
            where.append((now, now - link.began))
        del self._busy[fd]
        if self._keep and b"onnection: close" not in link.got:
            self._idle.append(link)
        else:
            link.socket.close()

    def _drop(self, link: Link) -> None:
        self._idle.remove(link)
        link.socket.close()

    def rest(self, log: Log) -> None:
        """Wait for open requests; those that do not end within TIMEOUT count as failed."""
        end = time.perf_counter() + TIMEOUT
        while self._busy and time.perf_counter() < end:
            self.wait(0.1, log)
        log.failed += len(self._busy)
        for link in (*self._busy.values(), *self._idle):
            link.socket.close()
        self._busy.clear()
        self._idle.clear()
