"""Few clients' connections are served in one turn of the server's loop, and nothing else waits for them."""

from __future__ import annotations

import selectors
import socket

from llmc_runtime.server.listen import ServerLoop
from llmc_runtime.server.selector import MOST, FairSelector


def test_clients_take_turns_and_others_are_always_reported() -> None:
    pairs = [socket.socketpair() for _ in range(3 * MOST)]
    fair = FairSelector()
    own, clients = pairs[:2], pairs[2:]
    for left, right in pairs:
        right.send(b"x")
        fair.register(left, selectors.EVENT_READ)
    fair.limited.update((left.fileno(), 0) for left, _ in clients)
    seen: list[int] = []
    for _ in range(3):
        found = [key.fd for key, _ in fair.select(0)]
        assert {left.fileno() for left, _ in own} <= set(found)
        reported = [fd for fd in found if fd in fair.limited]
        assert len(reported) == MOST and len(set(reported)) == MOST
        seen += reported
    assert set(seen) == {left.fileno() for left, _ in clients}, "each has had its turn"
    fair.close()
    for pair in pairs:
        for one in pair:
            one.close()


def test_few_are_reported_at_once() -> None:
    fair = FairSelector()
    left, right = socket.socketpair()
    fair.register(left, selectors.EVENT_READ)
    fair.limited[left.fileno()] = 0
    assert fair.select(0) == []
    right.send(b"x")
    assert len(fair.select(0)) == 1
    fair.close()
    left.close()
    right.close()


def test_a_closed_connection_is_forgotten() -> None:
    loop = ServerLoop()
    end = loop.limit(99)
    assert 99 in loop._fair.limited
    end()
    assert not loop._fair.limited
    loop.close()
