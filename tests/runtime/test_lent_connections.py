"""Connections on which a request was refused are lent to the light ones until a request may be served."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")
from llmc_runtime.server.http.event_loop import ServerLoop
from llmc_runtime.server.load_shedding import MAX_SKIPPED

from tests.runtime.served import Served, served, until
from tests.runtime.test_server_shed import BODY, KEYS, Link, full, head, occupy

MODELS = head(None, line="GET /v1/models HTTP/1.1")


def lent(server: Served) -> int:
    """How many connections are lent."""
    assert isinstance(server.loop, ServerLoop) and server.loop.light is not None
    return sum(light.lent for light in list(server.loop.light._watched.values()))


def lend(server: Served) -> Link:
    """An ordinary connection, lent after a refusal."""
    link, before = Link(server), lent(server)
    link.send(MODELS)
    assert link.answer()[0] == 200
    link.send(head(len(BODY)), BODY)
    assert link.answer()[0] == 503
    until(lambda: lent(server) == before + 1)
    return link


def test_a_lent_connection_refuses_and_serves() -> None:
    with full(own_loop=True) as server:
        link, refused = lend(server), server.serving.metrics._refused
        before = refused["queue_full"]
        for i in range(20):
            link.send(head(len(BODY), f"X-Request-Id: r{i}"), BODY)
            status, headers, body = link.answer()
            assert status == 503 and headers["x-request-id"] == f"r{i}" and "connection" not in headers
            assert body["error"]["code"] == "server_overloaded" and int(headers["retry-after"]) >= 1
        assert refused["queue_full"] == before + 20 and lent(server) == 1
        link.send(head(len(BODY), key="wrong-secret-key"), BODY)
        assert link.answer()[0] == 401 and lent(server) == 1
        link.send(MODELS)
        assert link.answer()[0] == 200
        link.send(head(len(BODY)), BODY)
        assert link.answer()[0] == 503
        until(lambda: lent(server) == 1)
        server.serving.admission.sequences += 1
        link.send(head(2), b"{}")
        assert link.answer()[0] == 400, "there is room, and its body is read"
        server.serving.admission.sequences -= 1


def test_a_served_connection_is_lent_while_requests_are_refused() -> None:
    with full(own_loop=True) as server:
        other, link = lend(server), Link(server)
        for _ in range(100):  # refusals must follow one another within 100 ms
            for _ in range(3):
                other.send(head(len(BODY)), BODY)
                assert other.answer()[0] == 503
            link.send(MODELS)
            assert link.answer()[0] == 200
            if lent(server) == 2:
                break
        else:
            pytest.fail("it was never lent")
        link.send(head(len(BODY)), BODY)
        assert link.answer()[0] == 503 and lent(server) == 2


def test_requests_of_one_packet_are_answered_in_order() -> None:
    with served(pace=0.02, sequences=64, per_key=2, keys=KEYS, own_loop=True) as server:
        links = [occupy(server) for _ in range(2)]
        until(lambda: server.serving.admission.open_sequences == 2)
        link = Link(server)
        for _ in range(3):
            refused = head(len(BODY)) + BODY
            link.send(refused, head(len(BODY), key=KEYS[1]), BODY, refused, refused)
            assert [link.answer()[0] for _ in range(4)] == [429, 200, 429, 429]
            link.send(refused)
            assert link.answer()[0] == 429
            until(lambda: lent(server) == 1)
        for one in (link, *links):
            one.close()


def test_a_refused_body_that_arrives_later_is_no_request() -> None:
    with full(own_loop=True) as server:
        link = lend(server)
        smuggled = head(len(BODY), "X-Request-Id: inner") + BODY
        link.send(head(len(smuggled), "X-Request-Id: outer"))
        assert link.answer()[1]["x-request-id"] == "outer"
        for byte in smuggled:
            link.send(bytes([byte]))
        link.send(head(len(BODY), "X-Request-Id: last"), BODY)
        assert link.answer()[1]["x-request-id"] == "last" and lent(server) == 1


def test_lent_connections_end() -> None:
    with full(own_loop=True, keep_alive=1) as server:
        gone, asked, long, idle, left = (lend(server) for _ in range(5))
        gone.close()
        until(lambda: lent(server) == 4)
        asked.send(head(len(BODY), "Connection: close"), BODY)
        assert asked.answer()[0] == 503 and asked.ended()
        long.send(head(MAX_SKIPPED + 1), b" " * (MAX_SKIPPED // 2))
        status, headers, _ = long.answer()
        assert status == 503 and headers["connection"] == "close" and long.ended()
        assert idle.ended(), "after the keep-alive time"
        assert left.ended()
        until(lambda: not lent(server))
        last = lend(server)
    assert last.ended(), "with the server"
