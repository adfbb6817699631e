"""Calls on the sockets of light connections, none of which blocks."""

from __future__ import annotations

import re
import socket

_READ_BODY = 14 << 10  # bytes of a body read together with its head: it has to arrive before a connection is closed
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,10})[ \t]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
_LAST_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_MORE", 0)


def accept_waiting(listener: socket.socket, count: int) -> tuple[list[tuple[socket.socket, object]], bool]:
    """Return up to `count` waiting connections with their addresses, and whether accepting failed."""
    accepted: list[tuple[socket.socket, object]] = []
    family, kind = int(listener.family), int(listener.type)
    try:
        while len(accepted) < count:  # the method `accept` looks up enumerations, which takes as long as accepting
            fd, address = listener._accept()  # type: ignore[attr-defined]
            accepted.append((socket.socket(family, kind, listener.proto, fd), address))
    except (BlockingIOError, InterruptedError, ConnectionAbortedError):
        pass
    except OSError:  # asyncio's method reports it, and tries again later
        return accepted, True
    return accepted, False


def missing_body(data: bytes) -> int:
    """Return how many bytes of a body of known length are to be read after `data`, which begins with its head."""
    end = data.find(b"\r\n\r\n") + 4
    found = _LENGTH.search(data, 0, max(0, end))
    if end < 4 or found is None or _CHUNKED.search(data, 0, end):
        return 0
    return min(_READ_BODY, max(0, end + int(found[1]) - len(data)))


def receive_now(sock: socket.socket, size: int) -> bytes:
    """Return up to `size` bytes that have arrived. Errors are left to the next read."""
    try:
        return sock.recv(size, socket.MSG_DONTWAIT)
    except OSError:
        return b""


def send_now(sock: socket.socket, data: bytes, last: bool = False) -> bool:
    """Send without blocking. Returns False if the client does not take it.

    The `last` data leaves together with the end of the connection, when the socket is closed.
    """
    try:
        return sock.send(data, _LAST_FLAGS if last else socket.MSG_DONTWAIT) == len(data)
    except OSError:
        return False
