"""The server's event loop, which accepts and serves few connections per iteration, and forwards tokens first.

Many clients that send at the same time make iterations long. The tokens of open streams do not wait for the end of an
iteration: the engine's socket is looked at before the first callback of an iteration and between the others, and what
it wakes runs at once.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from select import EPOLLIN, epoll
from typing import Any

from llmc_runtime.server.http.fair_selector import Events, FairSelector
from llmc_runtime.server.http.light_connections import LightConnections

_TLS_AT_ONCE = 2  # TLS connections accepted per iteration: each takes 0.3 ms before its handshake
MIN_HANDSHAKES = 64  # TLS handshakes that may be open even if there are as many connections as allowed
_LOOK_CALLBACKS = 2  # callbacks between two looks at the clock in an iteration
_LOOK_SECONDS = 0.0003  # interval at which an iteration checks the first readers


class ServerLoop(asyncio.SelectorEventLoop):
    """An event loop that accepts and serves few connections per iteration.

    Readers that are added by `add_reader`, which asyncio itself does not use, are those of engines. They come first:
    they, and the callbacks that they schedule, run between the other callbacks of an iteration.

    Connections over the limit are thus detected before descriptors run out, and many clients that send at once do not
    delay the engine's tokens. TLS handshakes have a time limit; connections do not count before their handshake ends.
    `handshakes_allowed` returns how many may be open; beyond that, the oldest is aborted.
    """

    handshake_seconds = 10.0
    # Time for a client to end TLS after the server; asyncio's default of 30 s would hold descriptors.
    tls_shutdown_seconds = 2.0
    tls_buffer = 4 << 10  # bytes decrypted at a time: as new keys they take 4 ms, see tls.BoundedTls
    max_accepted = 256  # light connections accepted per iteration, within their time; 8 that asyncio has to accept
    light: LightConnections | None = None  # takes new connections without TLS

    _ready: deque[asyncio.Handle]  # asyncio's callbacks to run

    def __init__(self) -> None:
        self.fair = FairSelector()
        self._first, self._first_ready = set[int](), epoll()  # descriptors of the first readers
        self._look_at = 0.0  # when to look at them next
        self.handshakes_allowed: Callable[[], int] = lambda: MIN_HANDSHAKES
        self._handshakes = OrderedDict[Any, None]()  # transports, the oldest first
        super().__init__(self.fair)
        self._look = asyncio.Handle(self.run_first, (), self)

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        """Extend asyncio's method: the reader is one of the first."""
        super().add_reader(fd, callback, *args)
        if fd not in self._first:
            self._first.add(fd)
            self._first_ready.register(fd, EPOLLIN)

    def remove_reader(self, fd: int) -> bool:  # type: ignore[override]
        """Extend asyncio's method."""
        if fd in self._first:
            self._first.remove(fd)
            self._first_ready.unregister(fd)
        return super().remove_reader(fd)

    def close(self) -> None:
        """Extend asyncio's method."""
        super().close()
        self._first_ready.close()

    def _process_events(self, event_list: Events) -> None:
        """Extend asyncio's method, which schedules the callbacks of an iteration, by looks at the first readers."""
        others = [event for event in event_list if event[0].fd not in self._first]
        super()._process_events(others)  # type: ignore[misc]
        if len(others) == len(event_list) and (not self._first or len(self._ready) <= _LOOK_CALLBACKS):
            return
        callbacks, self._look_at = [self._ready.popleft() for _ in range(len(self._ready))], 0.0
        self._ready.append(self._look)
        for begin in range(0, len(callbacks), _LOOK_CALLBACKS):
            self._ready.extend(callbacks[begin : begin + _LOOK_CALLBACKS])
            self._ready.append(self._look)

    def run_first(self) -> None:
        """Run the first readers that have something to read, if it is time to look. Long callbacks call it."""
        began = time.monotonic()
        if began < self._look_at:
            return
        for fd, _ in self._first_ready.poll(0):
            if fd in self._first:  # an earlier one has not removed it
                self._run_with_woken(self.fair.get_key(fd).data[0])
        now = time.monotonic()
        self._look_at = now + max(_LOOK_SECONDS, now - began)  # half of the time is left to other callbacks

    def _run_with_woken(self, callback: asyncio.Handle) -> None:
        """Run a callback, and then those that it has scheduled."""
        before = len(self._ready)
        callback._run()
        woken = [self._ready.pop() for _ in range(len(self._ready) - before)]
        while woken:
            handle = woken.pop()
            if not handle.cancelled():
                handle._run()

    async def create_server(self, *args: Any, **options: Any) -> Any:
        """Extend asyncio's method for a bound `sock`; `backlog` is the length of the accept queue."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = self.handshake_seconds
            options["ssl_shutdown_timeout"] = self.tls_shutdown_seconds
        backlog, (soft, _) = options.pop("backlog", 100), resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = self.max_accepted if soft == resource.RLIM_INFINITY else max(1, min(8, soft // 16))
        limit = limit if options.get("ssl") is None else min(limit, _TLS_AT_ONCE)
        self.fair.add_client(options["sock"].fileno())
        server = await super().create_server(*args, **options, backlog=limit)
        options["sock"].listen(backlog)  # asyncio uses one number for both
        return server

    def _accept_connection(
        self, factory: Any, sock: socket.socket, sslcontext: Any = None, server: Any = None, *args: Any, **options: Any
    ) -> None:
        """Extend asyncio's method, which accepts waiting connections, by light connections."""
        promote = partial(self._promote, factory, server)
        light = self.light if sslcontext is None else None
        if light is None or not light.accept(sock, promote, self.max_accepted, self.run_first):
            super()._accept_connection(factory, sock, sslcontext, server, *args, **options)  # type: ignore[misc]

    def _stop_serving(self, sock: socket.socket) -> None:
        """Extend asyncio's method."""
        fd = sock.fileno()
        super()._stop_serving(sock)  # type: ignore[misc]
        self.fair.remove_client(fd)

    def _promote(self, factory: Any, server: Any, sock: socket.socket, address: Any, data: bytes, passed: bool) -> None:
        """Make an accepted socket an ordinary connection, which begins with `data`.

        Its protocol gets the attribute `granted`, and `passed` if that is true.
        """

        def created() -> Any:
            protocol = factory()
            protocol.granted, protocol.passed = True, passed
            self.call_soon(self.call_soon, begin, protocol)  # after `connection_made`, before the first read
            return protocol

        def begin(protocol: Any) -> None:
            if data and not protocol.transport.is_closing():
                protocol.data_received(data)

        sock.setblocking(False)
        extra = {"peername": address}
        self.create_task(self._accept_connection2(created, sock, extra, None, server))  # type: ignore[attr-defined]

    def _make_ssl_transport(self, sock: socket.socket, *args: Any, **options: Any) -> Any:
        """Create the transport with a smaller buffer than asyncio's 256 KiB per connection, to save memory and time."""
        fd = sock.fileno()
        self.fair.add_handshake(fd)
        transport = super()._make_ssl_transport(sock, *args, **options)  # type: ignore[misc]
        _use_weak_callback(self._transports[fd])  # type: ignore[attr-defined]
        self._handshakes[transport] = None
        options["waiter"].add_done_callback(partial(self._end_handshake, transport, fd))
        while len(self._handshakes) > self.handshakes_allowed():
            self._handshakes.popitem(last=False)[0].abort()
        protocol = transport._ssl_protocol
        protocol.max_size = self.tls_buffer
        protocol._ssl_buffer = bytearray(self.tls_buffer)
        protocol._ssl_buffer_view = memoryview(protocol._ssl_buffer)
        return transport

    def _make_socket_transport(self, sock: socket.socket, *args: Any, **options: Any) -> Any:
        """Extend asyncio's method."""
        transport = super()._make_socket_transport(sock, *args, **options)  # type: ignore[misc]
        _use_weak_callback(transport)
        return transport

    def _end_handshake(self, transport: Any, fd: int, waiter: asyncio.Future[None]) -> None:
        self._handshakes.pop(transport, None)
        self.fair.end_handshake(fd)
        if not waiter.cancelled() and (error := waiter.exception()) is not None:
            self.call_soon(_release, error)  # after it was raised where the loop waits for the handshake


def _use_weak_callback(transport: Any) -> None:
    """Make a socket transport's callback a weak one: asyncio's is a method of the transport, also after an abort."""
    method = weakref.WeakMethod(transport._read_ready_cb)

    def read_ready() -> None:
        if (callback := method()) is not None:
            callback()

    transport._read_ready_cb = read_ready


def _release(error: BaseException) -> None:
    """Forget the frames of an error, which refer to it: 70 KiB of its connection would stay until a full collection."""
    error.__traceback__ = error.__context__ = None
