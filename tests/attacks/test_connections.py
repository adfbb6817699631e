"""Clients that hold connections: silent, slow, or not reading, with a key or without one. Others are served."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.target import Target, target, until
from tests.attacks.wire import Link, head

KEYS = ("neighbour-secret-key", "attacker-secret-key")
MOST = 120  # connections


@pytest.fixture(scope="module")
def small() -> Iterator[Target]:
    """A server with few connections and two keys."""
    with target("--max-num-seqs", "8", "--max-connections", str(MOST), keys=KEYS) as server:
        server.steady()
        yield server


def occupied(server: Target, sent: bytes, count: int = 2 * MOST) -> list[Link]:
    """Connections that each send some bytes, and then nothing."""
    links = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            links.append(link := Link(server))
            link.send_some(sent)
    time.sleep(0.5)
    return links


def others_are_served(server: Target) -> None:
    """A key that no attacker has gets answers on new connections, and so do probes."""
    for _ in range(20):
        with Link(server) as link:
            link.send_some(head(server, "/v1/models", "GET"))
            assert link.answer().status == 200
        with Link(server) as link:
            link.send_some(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert link.answer().status == 200


def test_25_connections_without_a_key(small: Target) -> None:
    """Silent ones, and halves of heads, twice as many as there are places."""
    for sent in (b"", b"GET /health HTTP/1.1\r\nHost: loc", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        links = occupied(small, sent)
        others_are_served(small)
        for link in links:
            link.close()
    small.steady("silent connections")


def test_25_descriptors_are_allocated_at_the_start(small: Target) -> None:
    """Doubling the table of descriptors while connections arrive would stop the event loop for up to 25 ms."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the size of the table is read from /proc")

    def table_size() -> int:
        status = Path(f"/proc/{small.process.pid}/status").read_text()
        return int(status.partition("FDSize:")[2].split()[0])

    before = table_size()
    links = occupied(small, b"", 2 * MOST)
    assert table_size() == before >= MOST + 192  # as set_descriptor_limit needs
    for link in links:
        link.close()
    small.steady("the table of descriptors")


def test_25_large_heads_that_do_not_end(small: Target) -> None:
    """Together, they have a limit in bytes, beyond which the one that grows is refused; small heads are not."""
    links = occupied(small, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 60_000, MOST - 10)
    others_are_served(small)
    statuses = list[int]()
    for link in links:
        link.settimeout(0.01)
        with contextlib.suppress(TimeoutError):
            statuses.append(link.answer().status)
    assert 503 in statuses and set(statuses) <= {0, 503} and 30 < len(statuses) < 80, statuses
    for link in links:
        link.close()
    with Link(small) as link:
        link.send_some(head(small, "/v1/models", "GET", Cookie="y" * 10_000))
        assert link.answer().status == 200
    small.steady("large heads")


def test_25_connections_with_a_key(small: Target) -> None:
    """Bodies that do not arrive, and long streams: the attacker's key gets 429, the others their answers."""
    attacker = head(small, Authorization=f"Bearer {KEYS[1]}", Content_Length=8000) + b"{"
    links = occupied(small, attacker)
    others_are_served(small)
    statuses = set()
    for link in links[-20:]:
        with contextlib.suppress(TimeoutError):
            link.settimeout(0.2)
            statuses.add(link.answer().status)
    assert statuses <= {0, 429}, statuses
    for link in links:
        link.close()
    small.steady("bodies that do not arrive")


def test_25_clients_that_do_not_read(small: Target) -> None:
    """Pipelined responses that the client does not read: memory is limited, and others are served."""
    before = small.memory()
    sent = head(small, "/openapi.json", "GET", Authorization=f"Bearer {KEYS[1]}") * 40
    links = []
    for _ in range(MOST):
        link = socket.socket()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(20)
        with contextlib.suppress(OSError):
            link.connect((small.host, small.port))
            link.sendall(sent)
        links.append(link)
    time.sleep(0.5)
    others_are_served(small)
    assert small.memory() - before < 200 << 20
    for link in links:
        link.close()
    small.steady("clients that do not read")


def test_25_clients_that_do_not_read_what_is_generated(small: Target) -> None:
    """Their sequences leave the queue when they are generated, not when they are read."""
    long = {"prompt": "x", "n": 8, "max_tokens": 240, "ignore_eos": True, "stream": True, "logprobs": 20}
    body = json.dumps(long).encode()
    sent = head(small, Authorization=f"Bearer {KEYS[1]}", Content_Length=len(body)) + body
    links = []
    for _ in range(2):
        links.append(link := socket.socket())
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect((small.host, small.port))
        link.sendall(sent)
    until(lambda: small.ask("/load").json["server_load"] > 0)
    until(lambda: small.ask("/load").json["server_load"] == 0, 60)
    until(lambda: small.figure("num_requests_open") == 2, 10)
    for link in links:
        link.close()
    small.at_rest()
    small.steady("clients that do not read what is generated")
