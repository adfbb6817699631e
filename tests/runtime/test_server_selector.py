"""The selector of the server reports few client connections per call, and all other descriptors."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import pytest
from llmc_runtime.server.http import fair_selector
from llmc_runtime.server.http.fair_selector import (
    BATCH_SECONDS,
    BATCHING_SECONDS,
    EXPECTED_SECONDS,
    LONG_SECONDS,
    MAX_BATCH_CLIENTS,
    MAX_BATCH_SECONDS,
    MAX_BODIES,
    MAX_CLIENTS,
    MAX_HANDSHAKES,
    MAX_PROBES,
    FairSelector,
)

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


def test_fewer_bodies_than_heads_are_read_per_call_and_one_after_a_long_one(
    ready: tuple[FairSelector, Pairs], clock: Clock
) -> None:
    fair, pairs = ready
    fds = [left.fileno() for left, _ in pairs]
    for fd in fds:
        fair.add_client(fd)
    for fd in fds[2:]:
        fair.set_sending_body(fd, True)
    for took, most in ((0.0, MAX_BODIES), (0.0, MAX_BODIES), (2 * LONG_SECONDS, 1), (2 * LONG_SECONDS, 1), (0.0, 2)):
        clock.now += took
        found = [key.fd for key, _ in fair.select(0)]
        assert set(fds[:2]) <= set(found) and len(found) == 2 + most
    fair.set_sending_body(fds[5], False)
    assert fds[5] in [key.fd for key, _ in fair.select(0)]


def test_clients_that_probe_are_reported_before_all_others(ready: tuple[FairSelector, Pairs]) -> None:
    fair, pairs = ready
    fds = [left.fileno() for left, _ in pairs]
    for fd in fds:
        fair.add_client(fd)
    probing = fds[-2 * MAX_PROBES :]
    for fd in probing:
        fair.set_probing(fd)
    fair.set_probing(10**6)  # not a client
    for _ in range(2):
        found = [key.fd for key, _ in fair.select(0)]
        assert len(found) == MAX_PROBES + MAX_CLIENTS and set(found[:MAX_PROBES]) <= set(probing)
        assert not set(found[MAX_PROBES:]) & set(probing)
    for fd in probing:
        fair.set_sending_body(fd, False)
    assert len(fair.select(0)) == MAX_CLIENTS, "they are clients like others again"
    fair.set_probing(fds[0])
    fair.batches.refused(2)
    fair.batches.polled(more=False)
    assert [key.fd for key, _ in fair.select(0)] == [fds[0]], "and do not wait for a batch"


def test_few_handshakes_are_reported_per_call_until_they_end(ready: tuple[FairSelector, Pairs]) -> None:
    fair, pairs = ready
    fds = [left.fileno() for left, _ in pairs]
    for fd in fds:
        fair.add_handshake(fd)
    found = [key.fd for _ in fds for key, _ in fair.select(0)]
    assert MAX_HANDSHAKES == 1 and sorted(found) == sorted(fds), "one per call, and each has had its turn"
    fair.add_client(fds[0])
    for fd in fds[:3]:
        fair.end_handshake(fd)
    assert set(fds[:3]) <= {key.fd for key, _ in fair.select(0)} and len(fair.select(0)) == 3 + MAX_HANDSHAKES
    fair.set_sending_body(fds[0], True)
    assert fair._client_epolls[fds[0]] is fair._bodies, "the first one is a client"
    assert fds[1] not in fair._client_epolls


def test_input_of_watched_clients_is_reported_together(ready: tuple[FairSelector, Pairs]) -> None:
    fair, pairs = ready
    registered, (plain, peer) = pairs[0][0], socket.socketpair()
    found: list[int] = []
    fair.on_input = found.extend
    fair.add_client(registered.fileno())
    peer.send(b"x")
    for sock in (registered, plain):
        fair.watch(sock.fileno())
    rest = {left.fileno() for left, _ in pairs[1:]}
    assert {key.fd for key, _ in fair.select(0)} == rest
    assert set(found) == {registered.fileno(), plain.fileno()}
    for sock in (registered, plain):
        fair.unwatch(sock.fileno())
    found.clear()
    assert {key.fd for key, _ in fair.select(0)} == rest | {registered.fileno()} and not found
    for sock in (plain, peer):
        sock.close()


def test_outputs_may_wait_for_the_next_batch(ready: tuple[FairSelector, Pairs], clock: Clock) -> None:
    fair, pairs = ready
    for left, _ in pairs:
        fair.add_client(left.fileno())
    assert fair.batches.remaining() == 0
    fair.batches.refused(2)
    assert len(fair.select(0)) == MAX_BATCH_CLIENTS and fair.batches.remaining() == 0, "more clients are ready"
    for left, _ in pairs:
        left.recv(1)
    assert fair.select(0) == [] and fair.batches.remaining() == pytest.approx(MAX_BATCH_SECONDS)
    clock.now += BATCH_SECONDS
    assert fair.batches.remaining() == pytest.approx(MAX_BATCH_SECONDS - BATCH_SECONDS)
    clock.now += BATCHING_SECONDS
    assert fair.batches.remaining() == 0


def test_few_are_reported_at_once(ready: tuple[FairSelector, Pairs]) -> None:
    fair, pairs = ready
    for left, _ in pairs[1:]:
        left.recv(1)
    assert [key.fd for key, _ in fair.select(0)] == [pairs[0][0].fileno()]


class Clock:
    """A clock in place of time.monotonic."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(fair_selector, "time", found)
    return found


def test_clients_are_polled_in_batches_while_requests_are_refused(
    ready: tuple[FairSelector, Pairs], clock: Clock
) -> None:
    fair, pairs = ready
    for left, _ in pairs[5:]:
        left.recv(1)
    own, *clients = (left.fileno() for left, _ in pairs[:5])

    def found() -> set[int]:
        return {key.fd for key, _ in fair.select(0)}

    for fd in clients:
        fair.add_client(fd)
    fair.batches.refused()
    assert found() == {own, *clients}, "one refusal alone changes nothing"
    clock.now += BATCH_SECONDS
    fair.batches.refused()
    assert found() == {own, *clients}, "the first batch"
    clock.now += BATCH_SECONDS / 2
    assert found() == {own}
    clock.now += BATCH_SECONDS
    assert found() == {own, *clients}
    clock.now += BATCH_SECONDS / 2
    assert found() == {own}
    fair.batches.expect()
    clock.now += EXPECTED_SECONDS
    assert found() == {own, *clients}, "a new connection has sent nothing yet"
    clock.now += BATCHING_SECONDS
    assert found() == found() == {own, *clients}, "there were no further refusals"


def test_a_batch_needs_no_other_event_and_the_next_is_at_once_while_many_wait(
    ready: tuple[FairSelector, Pairs],
) -> None:
    fair, pairs = ready
    for left, _ in pairs:
        fair.add_client(left.fileno())
    for _ in range(2):
        fair.batches.refused()
    batches = [fair.select(0) for _ in range(3)]
    assert len({key.fd for batch in batches for key, _ in batch}) == len(pairs), "each has had its turn"
    for left, _ in pairs[1:]:
        left.recv(1)
    fair.select(0)
    for _ in range(2):
        fair.batches.refused()
    while not (events := fair.select(None)):
        pass
    assert [key.fd for key, _ in events] == [pairs[0][0].fileno()]


def test_registrations_follow_a_descriptor_that_becomes_a_client_and_back(
    ready: tuple[FairSelector, Pairs],
) -> None:
    fair, pairs = ready
    for left, _ in pairs[1:]:
        fair.unregister(left)
    left, fd = pairs[0][0], pairs[0][0].fileno()
    for change in (
        lambda: fair.add_client(fd), lambda: fair.set_sending_body(fd, True), lambda: fair.set_sending_body(fd, False),
        lambda: fair.remove_client(fd), lambda: fair.set_sending_body(fd, True), lambda: fair.remove_client(fd),
    ):  # fmt: skip
        change()
        assert [(key.fd, events) for key, events in fair.select(0)] == [(fd, selectors.EVENT_READ)]
        fair.modify(left, selectors.EVENT_READ | selectors.EVENT_WRITE, "data")
        assert [(key.data, events) for key, events in fair.select(0)] == [("data", 3)]
        fair.modify(left, selectors.EVENT_READ)
        assert fair.get_key(fd) is fair.get_map()[left] and len(fair.get_map()) == 1
    with pytest.raises(KeyError):
        fair.register(fd, selectors.EVENT_READ)
    fair.add_client(fd)
    left.close()
    fair.unregister(fd)
    fair.remove_client(fd)
    assert fair.get_map().get(fd) is None and fair.select(0) == []
    with pytest.raises(KeyError):
        fair.get_key(fd)
    with pytest.raises(ValueError):
        fair.register(left, selectors.EVENT_READ)
