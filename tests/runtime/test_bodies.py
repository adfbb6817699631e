"""The budget of request bodies: accounting, evictions and the minimum rate, also over real connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest
from llmc_runtime.server.http import body_budget
from llmc_runtime.server.http.body_budget import FREE_BYTES, Body, BodyBudget

from tests.runtime.served import Served, served, until

KEYS = ("first-secret-key", "second-secret-key")
KB = 1 << 10


class Full(Exception):
    pass


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def grown(budget: BodyBudget, key: str, size: int) -> Body:
    body = Body(budget, key)
    body.take(b"x" * size)
    return body


def test_small_bodies_are_never_counted_and_dropped_ones_no_more() -> None:
    budget = BodyBudget(Full, maximum=64 * KB)
    small = [grown(budget, "a", FREE_BYTES) for _ in range(10)]
    assert budget.used == 0
    large = grown(budget, "a", 60 * KB)
    assert budget.used == 60 * KB
    with pytest.raises(Full):
        grown(budget, "a", 17 * KB)
    assert budget.used == 60 * KB
    large.drop()
    assert budget.used == 0 and len(large) == 0
    grown(budget, "a", 64 * KB)
    assert all(len(body) == FREE_BYTES for body in small)


def test_the_heaviest_key_gives_way_with_its_largest_body() -> None:
    async def reading(budget: BodyBudget, key: str, size: int) -> Body:
        body = Body(budget, key)
        async with body.evictable(10):
            body.take(b"x" * size)
            await asyncio.sleep(5)
        return body

    async def main() -> None:
        budget = BodyBudget(Full, maximum=200 * KB)
        tasks = [asyncio.ensure_future(reading(budget, "a", size * KB)) for size in (50, 80, 40)]
        await asyncio.sleep(0.01)
        other = grown(budget, "b", 60 * KB)
        await asyncio.sleep(0.01)
        assert [task.done() for task in tasks] == [False, True, False]
        assert isinstance(tasks[1].exception(), Full) and budget.used == 150 * KB
        with pytest.raises(Full):  # of the heaviest key itself
            grown(budget, "a", 100 * KB)
        assert budget.used == 150 * KB and len(other) == 60 * KB
        for task in tasks:
            task.cancel()

    run(main())


def test_a_body_that_comes_slowly_ends_and_a_small_one_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "STEP_SECONDS", 0.1)

    async def read(size: int, more: int) -> int:
        body = Body(BodyBudget(Full), "a")
        async with body.evictable(10):
            body.take(b"x" * size)
            for _ in range(3):
                await asyncio.sleep(0.08)
                body.take(b"x" * more)
        return len(body)

    async def main() -> None:
        assert await read(100, 10) == 130
        assert await read(20 * KB, body_budget.STEP_BYTES) == 20 * KB + 3 * body_budget.STEP_BYTES
        with pytest.raises(TimeoutError):
            await read(20 * KB, 10)

    run(main())


def half_sent(server: Served, key: str, size: int, whole: int) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    link = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {whole}\r\n\r\n"
    link.sendall(head.encode() + b" " * size)
    return link


def test_unfinished_bodies_of_one_key_leave_room_for_others_and_for_its_small_ones() -> None:
    with served(keys=KEYS) as server:
        budget = server.serving.bodies
        budget.maximum = 512 * KB
        links = [half_sent(server, KEYS[0], 100 * KB, 200 * KB) for _ in range(5)]
        until(lambda: budget.used == 500 * KB)
        more = half_sent(server, KEYS[0], 100 * KB, 200 * KB)
        refusal = more.recv(4000)
        assert refusal.startswith(b"HTTP/1.1 503") and b"retry-after" in refusal.lower(), refusal
        assert b"connection: close" in refusal.lower()
        padding = {"unknown": "x" * (100 * KB)}
        for key, body in ((KEYS[1], padding), (KEYS[0], {})):
            head = {"Authorization": f"Bearer {key}"}
            sent = {"prompt": "x", "max_tokens": 1, **body}
            reply = httpx.post(f"{server.url}/v1/completions", json=sent, headers=head, timeout=60)
            assert reply.status_code == 200, reply.text
        until(lambda: budget.used <= 500 * KB)
        lines = server.serving.metrics.text().decode().splitlines()
        assert any(line.startswith("llmc:admission_rejections_total") and 'reason="bodies"' in line
                   and float(line.split()[-1]) >= 2 for line in lines)  # fmt: skip
        for link in (*links, more):
            link.close()
        until(lambda: budget.used == 0)


def test_a_body_that_comes_slowly_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "STEP_SECONDS", 0.2)
    with served() as server:
        link = half_sent(server, "none", 20 * KB, 100 * KB)
        reply = link.recv(4000).partition(b"\r\n\r\n")
        assert reply[0].startswith(b"HTTP/1.1 408"), reply
        assert "slower" in json.loads(reply[2] or link.recv(4000))["error"]["message"]
        link.close()
        until(lambda: server.serving.bodies.used == 0)


def test_heads_of_many_lines_are_refused_and_chunks_of_a_byte_are_read() -> None:
    with served() as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as link:
            link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 1000)
            reply = link.recv(4000)
            assert reply.startswith(b"HTTP/1.1 431") and b"256 lines" in reply, reply
        body = json.dumps({"prompt": "x", "max_tokens": 1, "unknown": "y" * 20_000}).encode()
        with socket.create_connection((host, int(port))) as link:
            link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            link.sendall(b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % one for one in body))
            link.sendall(b"0\r\n\r\n")
            assert link.recv(4000).startswith(b"HTTP/1.1 200")
        server.rest()
