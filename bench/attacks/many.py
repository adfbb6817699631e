"""Attacks by number: bursts of new connections, and floods of small requests."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections import Counter

from llmc_runtime.bench.http_client import Pool, WireError

from bench.attacks.link import Answer, Door
from bench.attacks.watch import request

BURST = 4000  # connections
_SPARE = 200  # further file descriptors of this process
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def burst(door: Door, data: bytes, count: int = BURST, hold: float = 2.0) -> list[Answer]:
    """Open `count` connections as fast as possible, and send `data` on each; hold them, and close them unread.

    The first answer is from /health, on a connection that is opened after all others.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count + _SPARE, hard)), hard))
    began, links = time.monotonic(), list[socket.socket]()
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            links.append(link := stack.enter_context(socket.socket()))
            link.setblocking(False)
            link.connect_ex((door.host, door.port))
            with contextlib.suppress(OSError):
                link.send(data)
        connected = time.monotonic() - began
        health = door.ask("/health after them", "/health")
        time.sleep(max(0.0, min(hold, door.remaining)))
        statuses = Counter(map(_status, links))
    seconds = time.monotonic() - began
    ends = [Answer(f"{number} of {count} connections", status, seconds) for status, number in statuses.items()]
    return [Answer(f"{count} connections", 0, connected, "opened"), health, *ends]


def _status(link: socket.socket) -> int:
    """Return the status of the response that has arrived; 0 without one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(link.recv(64).split(b" ")[1])
    return 0


def head_without_body(key: str) -> bytes:
    """Return the head of a completion whose body does not follow."""
    return _HEAD + f"Authorization: Bearer {key}\r\nContent-Length: 3000\r\n\r\n".encode()


def pipeline(host: str, key: str, path: str, count: int) -> bytes:
    """Return `count` requests in a row."""
    return request(host, key, path) * count


def flood(door: Door, data: bytes, clients: int, seconds: float = 4.0) -> list[Answer]:
    """Send one request again and again from `clients` connections; return the number of each status."""
    return asyncio.run(_flood(door, data, clients, min(seconds, door.remaining)))


async def _flood(door: Door, data: bytes, clients: int, seconds: float) -> list[Answer]:
    pool, statuses, slowest = Pool(door.host, door.port, None), Counter[int](), Counter[int]()
    end = time.monotonic() + seconds

    async def client() -> None:
        while (began := time.monotonic()) < end:
            status = 0
            with contextlib.suppress(OSError, WireError):
                link = await pool.acquire()
                reply = await link.send(data, lambda _, body: None)
                status = reply.status
                pool.release(link, reply)
            statuses[status] += 1
            slowest[status] = max(slowest[status], round(1e6 * (time.monotonic() - began)))

    await asyncio.gather(*(client() for _ in range(clients)))
    pool.close()
    return [Answer(f"{number / seconds:.0f}/s", status, slowest[status] / 1e6) for status, number in statuses.items()]
