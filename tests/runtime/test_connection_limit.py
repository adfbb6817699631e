"""Connections that give way: idle ones to new ones, slow readers to the limit on unsent bytes, and a key with many open
requests to others; long trailers and lines before chunks."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from draw import of_test

pytest.importorskip("starlette")
import httpx
from llmc_runtime.server.http.connection_limit import ConnectionLimit, UnsentResponses
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.http.middleware import SHARE, RequestShares

from tests.runtime.fake_core import ROWS
from tests.runtime.served import Served, served, until
from tests.runtime.test_server_load import metric
from tests.runtime.test_server_shed import BODY, KEYS, Link, head, occupy, own_loop

HEAD = "GET /v1/models HTTP/1.1"
OTHER = {"Authorization": f"Bearer {KEYS[1]}"}


class Peer:
    """A connection of the models below."""

    def __init__(self, key: str = "", closed: list[Any] | None = None) -> None:
        self.key, self.closed, self._order = key, False, closed

    def __repr__(self) -> str:
        return f"Peer({self.key!r})"

    def evict(self) -> None:
        """Close it."""
        assert not self.closed
        self.closed = True
        if self._order is not None:
            self._order.append(self)


def test_the_connection_that_gives_way() -> None:
    """Random connections that open, ask, rest and close, against a list that is searched."""
    rng = random.Random(of_test())
    limit, idle, busy, closed = ConnectionLimit(rng.randint(1, 8)), list[Peer](), list[Peer](), list[Peer]()

    def expected() -> Peer | None:
        return next((one for one in idle if not one.key), idle[0] if idle else None)

    for _ in range(3000):
        deed = rng.randrange(5)
        if deed < 2:
            new, victim = Peer(), expected() if len(idle) + len(busy) >= limit.maximum else None
            over = limit.enter(new)
            assert (over > 0) == (victim is None and len(idle) + len(busy) >= limit.maximum)
            if victim is not None:
                assert victim.closed
                idle.remove(victim)
                closed.append(victim)
            if over > 0:
                limit.leave(new)
            else:
                idle.append(new)
        elif deed == 2 and idle:
            one = idle.pop(rng.randrange(len(idle)))
            limit.begin(one)
            busy.append(one)
        elif deed == 3 and busy:
            one = busy.pop(rng.randrange(len(busy)))
            one.key = rng.choice(["", "a"])
            limit.rest(one)
            idle.append(one)
        elif deed == 4:
            if closed and rng.random() < 0.7:
                limit.leave(closed.pop())
            elif idle:
                limit.leave(idle.pop(rng.randrange(len(idle))))
        assert limit.open == len(idle) + len(busy) + len(closed)
        assert not any(one.closed for one in (*idle, *busy))


def test_the_heaviest_key_reads_too_slowly() -> None:
    """Random responses that wait for their clients, against sums over all of them."""
    rng = random.Random(of_test())
    unsent, waiting, gone = UnsentResponses(1000), dict[Peer, int](), list[Peer]()
    for _ in range(3000):
        gone.clear()
        if rng.random() < 0.6:
            new, size = Peer(rng.choice(["", "a", "b"]), gone), rng.randint(1, 400)
            sums = Counter[str]()
            for one, held in [*waiting.items(), (new, size)]:
                sums[one.key] += held
            unsent.add(new, size)
            waiting[new] = size
            for one in gone:  # as long as it is too much, the first of the key that had the most
                assert sums.total() > 1000 and sums[one.key] == max(sums.values())
                assert one is next(other for other in waiting if other.key == one.key)
                sums[one.key] -= waiting.pop(one)
            assert sums.total() <= 1000
        elif waiting:
            one = rng.choice(list(waiting))
            del waiting[one]
            unsent.remove(one)
            unsent.remove(one)
        assert unsent.used == sum(waiting.values())


def test_outputs_that_are_not_written_yet_count_while_their_client_is_slow() -> None:
    """Of a request that is complete, until its response was written or its connection is closed."""
    gone = list[Peer]()
    unsent, slow, fast, other = UnsentResponses(1000), Peer("a", gone), Peer("a", gone), Peer("b", gone)
    unsent.hold(fast, 5000)
    assert unsent.used == 0 and not gone, "a client that reads as fast as it is written to"
    unsent.add(slow, 100)
    unsent.hold(slow, 300)
    assert unsent.used == 400
    unsent.remove(slow)
    assert unsent.used == 0
    unsent.add(slow, 50)
    unsent.add(other, 600)
    assert unsent.used == 950 and not gone, "again with what is held"
    unsent.hold(slow, 300)
    assert gone == [slow] and unsent.used == 600, "the key with the most"
    unsent.release(slow)
    unsent.add(slow, 50)
    assert unsent.used == 650
    limit = ConnectionLimit(unsent=unsent)
    limit.open = 2
    unsent.hold(slow, 100)
    limit.rest(slow)
    unsent.hold(other, 100)
    limit.leave(other)
    unsent.add(slow, 60)
    unsent.add(other, 70)
    assert unsent.used == 130
    closed = Peer("c", gone)
    limit.open = 1
    limit.leave(closed)
    unsent.hold(closed, 100)
    before = len(unsent._held)
    del closed
    assert len(unsent._held) == before - 1, "its request ended after the connection was closed"


def test_a_key_with_many_open_requests_leaves_connections() -> None:
    async def main() -> None:
        free, statuses = asyncio.Event(), Counter[tuple[str, int]]()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await free.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        def refusal() -> ApiError:
            return ApiError("too many", status=429)

        shares = RequestShares(app, 100, refusal)

        async def one(key: str) -> None:
            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses[key, message["status"]] += 1

            await shares({"type": "http", "path": "/", "llmc.key": key}, None, send)  # type: ignore[arg-type]

        tasks = [asyncio.create_task(one(key)) for key in ["a"] * 100 + ["b"] * 5 + [""] * 3]
        await asyncio.sleep(0.1)
        most = 100 * SHARE // (SHARE + 1)
        assert statuses == {("a", 429): 100 - most}  # "b" is served, and requests without a key are not limited
        free.set()
        await asyncio.gather(*tasks)
        assert statuses["a", 200] == most and statuses["b", 200] == 5 and statuses["", 200] == 3
        await one("a")
        assert statuses["a", 200] == most + 1 and not shares._by_key

    asyncio.run(main())


def state(link: Link) -> str:
    """Whether the server has closed a connection on which nothing is expected."""
    link.socket.settimeout(0.02)
    try:
        return "open" if link.socket.recv(1) else "closed"
    except TimeoutError:
        return "open"
    except ConnectionError:
        return "closed"


@own_loop
def test_idle_connections_give_way(own_loop: bool) -> None:
    with served(connections=6, keys=KEYS, own_loop=own_loop, keep_alive=60) as server:
        known = Link(server)
        known.send(head(line=HEAD))
        assert known.answer()[0] == 200
        wrong = Link(server)
        wrong.send(head(line=HEAD, key="unknown"))
        assert wrong.answer()[0] == 401
        silent = [Link(server) for _ in range(20)]
        silent[-1].send(b"GET /health HTTP/1.1\r\nHost: loc")
        until(lambda: [state(link) for link in silent] == ["closed"] * 15 + ["open"] * 5)
        assert state(wrong) == "closed" and state(known) == "open"
        for _ in range(10):
            assert (
                httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {KEYS[1]}"}).status_code == 200
            )
        assert state(known) == "open" and metric(server, "admission_rejections_total", ',reason="connections"') == 0
        for link in (known, wrong, *silent):
            link.close()


def test_light_connections_give_way() -> None:
    """While requests are refused, silent connections are light ones."""
    with busy() as server:
        silent = [Link(server) for _ in range(40)]
        time.sleep(0.2)
        assert sum(state(link) == "open" for link in silent) <= 20
        for _ in range(5):
            reply = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "x"}, headers={"Authorization": f"Bearer {KEYS[1]}"}
            )
            assert reply.status_code in (429, 503) and reply.json()["error"]["code"] != "too_many_connections"
        for link in silent:
            link.close()


@contextmanager
def busy() -> Iterator[Served]:
    """A server that refuses requests, and has light connections."""
    with served(pace=0.2, sequences=ROWS, keys=KEYS, own_loop=True, connections=ROWS + 20) as server:
        server.serving.admission.keys = 1
        links = [occupy(server) for _ in range(ROWS)]
        until(lambda: server.serving.admission.full)
        yield server
        for link in links:
            link.close()


def chunked(after: bytes = b"", before: bytes = b"") -> bytes:
    """A completion in one chunk, with an extension and trailers."""
    body = b"%x%b\r\n%b\r\n0\r\n%b\r\n" % (len(BODY), before, BODY, after)
    return head(None, "Transfer-Encoding: chunked") + body


def test_long_trailers_and_lines_before_chunks() -> None:
    with served(keys=KEYS) as server:
        for fine in (chunked(), chunked(b"A: b\r\n" * 100), chunked(before=b";" + b"x" * 1500)):
            link = Link(server)
            link.send(fine)
            assert link.answer()[0] == 200
            link.send(head(line=HEAD))  # the connection stays in use
            assert link.answer()[0] == 200
            link.close()
        for long in (chunked(b"a:b\r\n" * 12_000), chunked(b"A: " + b"x" * 9000), chunked(before=b";" + b"x" * 9000)):
            link = Link(server)
            link.send(long)
            status, headers, answer = link.answer()
            assert status == 431 and headers["connection"] == "close" and "2048 bytes" in answer["error"]["message"]
            assert link.ended()
            link.close()
        server.rest()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the kernel's table of sockets")
def test_little_is_kept_for_clients_that_read_nothing() -> None:
    """Neither in the kernel, which would keep megabytes of each connection, nor in the server."""
    with served() as server:
        port = int(server.url.rpartition(":")[2])
        links = []
        for _ in range(20):
            link = socket.socket()
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect(("127.0.0.1", port))
            link.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60)  # 6 MB of responses
            links.append(link)
        until(lambda: max(unsent(port)) > 50_000)
        time.sleep(0.3)
        assert max(unsent(port)) < 600_000, unsent(port)
        for link in links:
            link.close()


def unsent(port: int) -> list[int]:
    """The bytes in the send queue of each connection of a server on this port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[4].partition(":")[0], 16) for row in rows if row[1].endswith(f":{port:04X}")] or [0]
