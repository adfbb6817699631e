"""Attacks that repeat small valid or invalid requests of one API key, each with little work for the sender."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from llmc_runtime.bench.http_client import Pool, WireError

from bench.attacks.link import Answer, Door
from bench.attacks.watch import request

SECONDS = 4.0  # duration of an attack
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
CHAIN = 60  # responses
_OPEN = 2.0  # seconds that a slow reader keeps a stream
_STATUS = re.compile(rb"HTTP/1.1 (\d\d\d)")

Client = Callable[["Senders", int], Awaitable[None]]
Body = Callable[[random.Random, int], tuple[str, Any]]


class Senders:
    """The clients of an attack: their shared connections, the end, and the number of each status."""

    def __init__(self, door: Door) -> None:
        self.door, self.began = door, time.monotonic()
        self.end = self.began + min(SECONDS, door.remaining)
        self.pool = Pool(door.host, door.port, None)
        self.statuses: Counter[int] = Counter()

    @property
    def over(self) -> bool:
        """Whether the attack is to end."""
        return time.monotonic() >= self.end

    async def send(self, data: bytes) -> bytes:
        """Send a request on a kept connection, count its status, and return the body of its response."""
        heard: list[bytes] = []
        status = 0
        with contextlib.suppress(OSError, WireError):
            link = await self.pool.acquire()
            try:
                reply = await link.send(data, lambda _, body: heard.append(body))
            except asyncio.CancelledError:
                link.transport.abort()
                raise
            status = reply.status
            self.pool.release(link, reply)
        self.statuses[status] += 1
        return b"".join(heard)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a separate connection, which reads at most 4 KiB ahead."""
        return await asyncio.open_connection(self.door.host, self.door.port, limit=4096)


def clients(count: int, client: Client) -> Callable[[Door], list[Answer]]:
    """Return an attack by `count` clients at the same time."""

    async def attack(door: Door) -> list[Answer]:
        senders = Senders(door)
        tasks = [asyncio.create_task(client(senders, i)) for i in range(count)]
        _, late = await asyncio.wait(tasks, timeout=door.remaining)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        senders.pool.close()
        seconds = time.monotonic() - senders.began
        return [Answer(f"{n / seconds:.0f}/s", status, seconds) for status, n in sorted(senders.statuses.items())]

    return lambda door: asyncio.run(attack(door))


def repeat(body: Body) -> Client:
    """Return a client that sends one request after another; `body` returns the path and the body of the next one."""

    async def client(senders: Senders, number: int) -> None:
        draw, count = random.Random(number), 0
        while not senders.over:
            path, data = body(draw, count)
            await senders.send(request(senders.door.host, senders.door.key, path, data))
            count += 1

    return client


def fixed(path: str, data: Any) -> Body:
    """Return the same request each time, serialized once, for the first one."""

    @cache
    def body() -> bytes | None:
        return data if data is None or isinstance(data, bytes) else json.dumps(data).encode()

    return lambda draw, count: (path, body())


async def chain(senders: Senders, number: int) -> None:
    """Store responses that each continue the one before it."""
    while not senders.over:
        before: dict[str, Any] = {}
        for i in range(CHAIN):
            body = {"input": f"{number} {i} and so on", "max_output_tokens": 1, "store": True, **before}
            answer = await senders.send(request(senders.door.host, senders.door.key, RESPONSES, body))
            with contextlib.suppress(ValueError, KeyError):
                before = {"previous_response_id": json.loads(answer)["id"]}
            if senders.over or not before:
                break


def dropped(body: Body, wait: float, every: float) -> Client:
    """Return a client that opens a request every `every` seconds and drops the connection after `wait` seconds."""

    async def client(senders: Senders, number: int) -> None:
        draw, count = random.Random(number), 0
        while not senders.over:
            path, data = body(draw, count)
            count += 1
            with contextlib.suppress(OSError):
                _, link = await senders.open()
                link.write(request(senders.door.host, senders.door.key, path, data))
                await asyncio.sleep(wait)
                link.transport.abort()
                senders.statuses[0] += 1
            await asyncio.sleep(every)

    return client


def slow(body: Body, pause: float = 0.05) -> Client:
    """Return a client that reads one byte of its stream at a time, with pauses."""

    async def client(senders: Senders, number: int) -> None:
        draw = random.Random(number)
        while not senders.over:
            path, data = body(draw, number)
            with contextlib.suppress(OSError):
                reader, link = await senders.open()
                link.write(request(senders.door.host, senders.door.key, path, data))
                until = min(senders.end, time.monotonic() + _OPEN)
                while time.monotonic() < until and await reader.read(1):
                    await asyncio.sleep(pause)
                link.transport.abort()
                senders.statuses[0] += 1

    return client


def raw(make: Callable[[Door], bytes], responses: int = 1) -> Client:
    """Return a client that sends the same bytes on a new connection each time and reads `responses` responses."""

    async def client(senders: Senders, number: int) -> None:
        data = make(senders.door)
        while not senders.over:
            with contextlib.suppress(OSError):
                reader, link = await senders.open()
                link.write(data)
                try:
                    await _responses(senders, reader, responses)
                finally:
                    link.transport.abort()

    return client


async def _responses(senders: Senders, reader: asyncio.StreamReader, count: int) -> None:
    """Count the status lines of up to `count` responses."""
    tail = b""
    while count > 0:
        if not (data := await reader.read(1 << 16)):
            senders.statuses[0] += 1
            return
        lines = _STATUS.findall(tail + data)
        tail = (tail + data)[-11:]
        senders.statuses.update(map(int, lines))
        count -= len(lines)
