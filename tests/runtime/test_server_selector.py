"""Few clients' connections are served in one turn of the server's loop, and nothing else waits for them."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import pytest
from llmc_runtime.server.http.fair_selector import MAX_BULK, MAX_CLIENTS, FairSelector

Pairs = list[tuple[socket.socket, socket.socket]]


@pytest.fixture
def ready() -> Iterator[tuple[FairSelector, Pairs]]:
    """A selector with many sockets that can be read."""
    fair, pairs = FairSelector(), [socket.socketpair() for _ in range(3 * MAX_CLIENTS)]
    for left, right in pairs:
        right.send(b"x")
        fair.register(left, selectors.EVENT_READ)
    yield fair, pairs
    fair.close()
    for pair in pairs:
        for one in pair:
            one.close()


def test_clients_take_turns_and_others_are_always_reported(ready: tuple[FairSelector, Pairs]) -> None:
    fair, pairs = ready
    own, clients = pairs[:2], {left.fileno() for left, _ in pairs[2:]}
    for fd in clients:
        fair.add_client(fd)
    seen: set[int] = set()
    for _ in range(3):
        found = [key.fd for key, _ in fair.select(0)]
        assert {left.fileno() for left, _ in own} <= set(found) and len(found) == len(set(found)) == MAX_CLIENTS + 2
        seen |= set(found) & clients
    assert seen == clients, "each has had its turn"
    for fd in clients:
        fair.remove_client(fd)
    assert len(fair.select(0)) == len(pairs)


def test_bodies_have_fewer_turns(ready: tuple[FairSelector, Pairs]) -> None:
    fair, pairs = ready
    fds = [left.fileno() for left, _ in pairs]
    for fd in fds:
        fair.add_client(fd)
    for fd in fds[2:]:
        fair.set_bulk(fd, True)
    for _ in range(3):
        found = [key.fd for key, _ in fair.select(0)]
        assert set(fds[:2]) <= set(found) and len(found) == 2 + MAX_BULK
    fair.set_bulk(fds[5], False)
    assert fds[5] in [key.fd for key, _ in fair.select(0)]


def test_few_are_reported_at_once(ready: tuple[FairSelector, Pairs]) -> None:
    fair, pairs = ready
    for left, _ in pairs[1:]:
        left.recv(1)
    assert [key.fd for key, _ in fair.select(0)] == [pairs[0][0].fileno()]
