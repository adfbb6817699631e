"""Calls on the sockets of light connections, none of which blocks."""

from __future__ import annotations

import socket

_READ_BODY = 14 << 10  # bytes of a body read together with its head: it has to arrive before a connection is closed
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


def receive_now(sock: socket.socket, size: int) -> bytes:
    """Return up to `size` bytes of a body that have arrived, at most _READ_BODY. Errors are left to the next read."""
    try:
        return sock.recv(min(size, _READ_BODY), socket.MSG_DONTWAIT)
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
