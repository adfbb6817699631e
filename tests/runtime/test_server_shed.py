"""Requests refused from their heads: keys first, bodies skipped, connections kept, refusals counted and logged."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.server import load_shedding
from llmc_runtime.server.http.auth import Guard, Keys, Limits
from llmc_runtime.server.http.request_log import RefusalLog
from llmc_runtime.server.load_shedding import MAX_SKIPPED, LoadShedder
from llmc_runtime.server.requests import parse
from starlette.applications import Starlette

from tests.runtime.fake_core import ROWS
from tests.runtime.served import Quick, Served, served, until
from tests.runtime.test_server_load import LONG

KEYS = ("first-secret-key", "second-secret-key")
PATH = "/v1/completions"


class Link:
    """A connection, and the answers on it."""

    def __init__(self, server: Served) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self.file = self.socket.makefile("rb")

    def send(self, *parts: bytes) -> None:
        """Send bytes."""
        self.socket.sendall(b"".join(parts))

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """The next answer: status, headers and JSON."""
        status = int(self.file.readline().split()[1])
        headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = self.file.read(int(headers.get("content-length", 0)))
        return status, headers, json.loads(body) if body else None

    def close(self) -> None:
        """End the connection."""
        self.file.close()
        self.socket.close()

    def ended(self) -> bool:
        """Whether the server has closed it."""
        return self.file.read(1) == b""


def head(length: int | None = None, *more: str, key: str = KEYS[0], line: str = f"POST {PATH} HTTP/1.1") -> bytes:
    """A request's head."""
    fields = ["Host: localhost", "Content-Type: application/json", f"Authorization: Bearer {key}", *more]
    if length is not None:
        fields.append(f"Content-Length: {length}")
    return "\r\n".join((line, *fields, "", "")).encode()


BODY = json.dumps({"prompt": "x", "max_tokens": 1}).encode()


def occupy(server: Served) -> Link:
    """A connection whose long answer is on its way."""
    link, body = Link(server), json.dumps(LONG).encode()
    link.send(head(len(body)), body)
    return link


own_loop = pytest.mark.parametrize("own_loop", [False, True])


@contextmanager
def full(own_loop: bool = False, **options: Any) -> Iterator[Served]:
    """A server whose queue is full; with `own_loop` it has light connections."""
    with served(pace=0.2, sequences=ROWS, keys=KEYS, own_loop=own_loop, **options) as server:
        server.serving.admission.keys = 1  # a single key may take all
        links = [occupy(server) for _ in range(ROWS)]
        until(lambda: server.serving.admission.full)
        yield server
        for link in links:
            link.close()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of requests that reached the middleware."""
    found: list[str] = []
    call = Guard.__call__

    async def seen(self: Guard, scope: Any, receive: Any, send: Any) -> None:
        found.append(scope.get("path", ""))
        await call(self, scope, receive, send)

    monkeypatch.setattr(Guard, "__call__", seen)
    return found


@own_loop
def test_keys_are_checked_first_and_answers_are_those_of_the_parser(parsed: list[str], own_loop: bool) -> None:
    with full(own_loop) as server:
        parsed.clear()
        link = Link(server)
        answers = []
        for more in ((), ("Expect: nothing",)):  # the second goes by the parser
            link.send(head(len(BODY), "X-Request-Id: mine", *more), BODY)
            answers.append(link.answer())
            if more:
                assert link.ended()
        (status, headers, body), (same, others, text) = answers
        assert (status, body) == (same, text) and status == 503 and body["error"]["code"] == "server_overloaded"
        assert headers.pop("x-request-id") == "mine" and others.pop("connection") == "close"
        assert headers.keys() | {"x-request-id"} == others.keys()
        assert headers["content-type"] == "application/json" and int(headers["retry-after"]) >= 1
        assert parsed == [PATH]
        for key in ("", "wrong-secret-key"):
            for more in ((), ("Expect: nothing",)):
                link = Link(server)
                link.send(head(len(BODY), *more, key=key), BODY)
                status, headers, body = link.answer()
                assert status == 401 and headers["www-authenticate"] == "Bearer", body
        assert httpx.post(f"{server.url}{PATH}", json={}, headers={"Host": "evil.test"}).status_code == 421
        assert httpx.get(f"{server.url}/health").status_code == 200


@own_loop
def test_refusals_are_counted_and_a_connection_serves_on(parsed: list[str], own_loop: bool) -> None:
    with full(own_loop) as server:
        refused, link = server.serving.metrics._refused, Link(server)
        for _ in range(50):
            link.send(head(len(BODY)), BODY)
            status, headers, _ = link.answer()
            assert status == 503 and "connection" not in headers
        assert refused["queue_full"] == 50
        assert parsed.count(PATH) == ROWS
        link.send(head(None, line="GET /v1/models HTTP/1.1"))
        assert link.answer()[0] == 200
        link.send(head(len(BODY), line="POST /v1/nothing HTTP/1.1"), BODY)
        assert link.answer()[0] == 404
        server.serving.admission.sequences += 1
        link.send(head(2), b"{}")
        assert link.answer()[0] == 400, "there is room, and its body is read"
        server.serving.admission.sequences -= 1
        link.send(head(0, "Connection: close"))
        assert link.answer()[0] == 503 and link.ended()


@own_loop
def test_bytes_behind_a_refused_body_are_the_next_request(own_loop: bool) -> None:
    with full(own_loop) as server:
        link = Link(server)
        link.send(*(head(len(BODY), f"X-Request-Id: r{i}") + BODY for i in range(20)))
        link.send(head(None, line="GET /v1/models HTTP/1.1"), head(len(BODY), "X-Request-Id: r20"), BODY)
        for i in range(20):
            status, headers, _ = link.answer()
            assert status == 503 and headers["x-request-id"] == f"r{i}"
        assert link.answer()[0] == 200
        assert link.answer()[1]["x-request-id"] == "r20"
        smuggled = head(len(BODY), "X-Request-Id: inner") + BODY  # a body that looks like a request is a body
        link.send(head(len(smuggled), "X-Request-Id: outer"))
        assert link.answer()[1]["x-request-id"] == "outer"
        for byte in smuggled:
            link.send(bytes([byte]))
        link.send(head(len(BODY), "X-Request-Id: last"), BODY)
        assert link.answer()[1]["x-request-id"] == "last"


@pytest.mark.parametrize(
    "more",
    [("Transfer-Encoding: chunked",), ("Transfer-Encoding: chunked", "X-Pad: " + "x" * 200)],
)
def test_chunked_bodies_are_refused_and_read_past(more: tuple[str, ...]) -> None:
    with full() as server:
        link = Link(server)
        for _ in range(3):
            link.send(head(None, *more))
            status, _, body = link.answer()
            assert status == 503 and body["error"]["code"] == "server_overloaded"
            link.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        link.send(head(None, line="GET /v1/models HTTP/1.1"))
        assert link.answer()[0] == 200


@own_loop
def test_a_client_that_waits_to_send_its_body_is_refused_without_it(own_loop: bool) -> None:
    with full(own_loop) as server:
        link = Link(server)
        link.send(head(10_000_000, "Expect: 100-continue"))
        status, headers, _ = link.answer()
        assert status == 503 and headers["connection"] == "close" and link.ended()


@own_loop
def test_a_long_body_ends_the_connection_and_its_sender_reads_the_answer(own_loop: bool) -> None:
    with full(own_loop) as server:
        link = Link(server)
        link.send(head(MAX_SKIPPED + 1))
        link.send(b" " * (MAX_SKIPPED // 2))
        status, headers, _ = link.answer()
        assert status == 503 and headers["connection"] == "close" and link.ended()
        link = Link(server)
        link.send(head(MAX_SKIPPED))
        assert link.answer()[0] == 503
        link.send(b" " * MAX_SKIPPED, head(None, line="GET /v1/models HTTP/1.1"))
        assert link.answer()[0] == 200


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 3\r\nContent-Length: 3\r\n", b"Content-Length: +3\r\n", b"Content-Length: 3, 3\r\n",
        b"Content-Length : 3\r\n", b" folded: 1\r\nContent-Length: 3\r\n", b"Content-Length: 3\r\nX\x00: 1\r\n",
        b"Content-Length: 3\nX: 1\r\n", b"Content-Length: 99999999999\r\n", b"Content-Length: \xb3\r\n",
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", b"Content-Length: 3\r\nContent-Length: 4\r\n",
    ],
)  # fmt: skip
def test_heads_that_are_not_plain_go_to_the_parser(fields: bytes) -> None:
    start = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\n".encode()
    with full() as server:
        shed = LoadShedder(server.serving)
        assert not shed.active
        shed.check = Guard(Starlette(), Keys(KEYS), Limits(), None).check
        assert shed.active
        assert shed.answer(start + fields + b"\r\n", []) is None
        plain = shed.answer(start + b"Content-Length: 3\r\n\r\n", [])
        assert plain is not None and plain.length == 3 and not plain.closes


def test_each_key_is_refused_when_its_own_share_is_used_up(parsed: list[str]) -> None:
    with served(pace=0.2, sequences=64, per_key=2, keys=KEYS) as server:
        links = [occupy(server) for _ in range(2)]
        until(lambda: server.serving.admission.open_sequences == 2)
        parsed.clear()
        link = Link(server)
        link.send(head(len(BODY)), BODY)
        status, _, body = link.answer()
        assert status == 429 and body["error"]["code"] == "rate_limit_exceeded" and not parsed
        link.send(head(len(BODY), key=KEYS[1]), BODY)
        assert link.answer()[0] == 200
        for one in links:
            one.close()


def test_a_turn_refuses_each_key_for_itself() -> None:
    with served(pace=0.2, sequences=64, per_key=2, keys=KEYS) as server:
        links = [occupy(server) for _ in range(2)]
        until(lambda: server.serving.admission.open_sequences == 2)
        shed = LoadShedder(server.serving)
        shed.check = Guard(Starlette(), Keys(KEYS), Limits(), None).check
        refused, answer = server.serving.metrics._refused, shed.turn([])
        before = refused["key_limit"]
        first, second = (answer(head(2, "X-Request-Id: same"), False) for _ in range(2))
        assert first == second and first is not None and first.data.startswith(b"HTTP/1.1 429")
        assert refused["key_limit"] == before + 2, "each is counted"
        last = answer(head(2, "X-Request-Id: same"), True)
        assert last is not None and last.closes and not first.closes and b"\r\nconnection: close\r\n" in last.data
        messages = answer(head(2, line="POST /v1/messages HTTP/1.1"), False)
        assert messages is not None and b'"type":"error"' in messages.data, "an error of the other API"
        assert answer(head(2, key=KEYS[1]), False) is None
        wrong = answer(head(2, key="wrong-secret-key"), False)
        assert wrong is not None and wrong.data.startswith(b"HTTP/1.1 401")
        for one in links:
            one.close()


def test_while_it_drains_heads_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "document", None)  # no body is decoded
    with served() as server:
        server.serving.admission.draining = True
        reply = httpx.post(f"{server.url}/v1/chat/completions", content=b"{", headers={"Content-Type": "text/plain"})
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "shutting_down"
        server.serving.admission.draining = False


def test_ten_refusals_a_second_have_lines_and_the_others_one(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[bool]:
        refusals = RefusalLog()
        own = [refusals.take("queue_full") for _ in range(30)] + [refusals.take("key_limit") for _ in range(5)]
        await asyncio.sleep(1.2)
        assert refusals.take("queue_full")  # another second
        assert not any(RefusalLog(lines=False).take("draining") for _ in range(3))
        return own

    with caplog.at_level(logging.INFO, "llmc.request"):
        logging.getLogger("llmc.request").propagate = True
        own = asyncio.run(main())
    assert own == [True] * 10 + [False] * 25
    assert [record.fields for record in caplog.records] == [{"requests": 25, "queue_full": 20, "key_limit": 5}]


def test_the_answer_has_no_field_of_the_request_but_its_id() -> None:
    with full() as server:
        link = Link(server)
        link.send(head(len(BODY), "X-Request-Id: bad id\t!", "X-Other: secret"), BODY)
        _, headers, body = link.answer()
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"]) and "secret" not in json.dumps([headers, body])


class Clock:
    """A time that the test turns."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def shedder(server: Served, monkeypatch: pytest.MonkeyPatch) -> tuple[LoadShedder, Clock]:
    shed, clock = LoadShedder(server.serving), Clock()
    shed.check = Guard(Starlette(), Keys(KEYS), Limits(), None).check
    monkeypatch.setattr(load_shedding, "time", clock)
    return shed, clock


def test_a_prepared_refusal_is_sent_again_for_a_moment_and_only_for_its_key_and_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with full() as server:
        admission, common = server.serving.admission, [(b"date", b"today")]
        shed, clock = shedder(server, monkeypatch)
        waits, counts = iter((2.0, 30.0, 40.0, 50.0)), server.serving.metrics._refused

        def answered(key: str = KEYS[0]) -> tuple[bytes, str]:
            answer = shed.answer(head(2, key=key), common)
            assert answer is not None
            start, _, name = answer.data.partition(b"x-request-id: ")
            return start, name[:32].decode()

        monkeypatch.setattr(type(admission), "retry", property(lambda self: next(waits)))
        before = counts["queue_full"]
        (first, one), (second, other) = answered(), answered()
        assert first == second and b"retry-after: 2\r\n" in first and b"date: today" in first and one != other
        assert counts["queue_full"] == before + 2, "each is counted"
        assert b"retry-after: 30\r\n" in answered(KEYS[1])[0]
        clock.now += 0.06
        assert b"retry-after: 40\r\n" in answered()[0]
        common = [(b"date", b"tomorrow")]
        assert re.search(rb"date: tomorrow\r\nretry-after: 50\r\n", answered()[0])
        assert shed.answer(head(2, key="wrong-secret-key"), common).data.startswith(b"HTTP/1.1 401")  # type: ignore[union-attr]
        monkeypatch.setattr(type(admission), "full", False)
        assert shed.answer(head(2), common) is None, "there is room, whatever was answered before"


def test_under_overload_free_slots_go_to_one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with full() as server:
        shed, clock = shedder(server, monkeypatch)
        server.serving.admission.sequences += 2
        assert [shed.answer(head(2), []) for _ in range(5)] == [None] * 5, "without overload, all may try"
        shed.overloaded = lambda: True
        answers = [shed.answer(head(2), []) for _ in range(5)]
        assert answers[:2] == [None, None] and all(one is not None and b" 503 " in one.data for one in answers[2:])
        clock.now += 0.1
        assert shed.answer(head(2), []) is not None, "those have not been parsed yet"
        for _ in range(2):
            shed.refuse({"method": "POST", "path": PATH, "headers": [], "llmc.key": shed._passed[0][1]})
        assert shed.answer(head(2), []) is not None, "nor reserved anything"
        clock.now += 0.006
        assert shed.answer(head(2), []) is None, "those have had their turn"
        clock.now += 1.1
        assert [shed.answer(head(2), []) for _ in range(2)] == [None, None], "one has been lost"
        server.serving.admission.sequences -= 2


def test_a_connection_that_was_passed_on_meets_no_second_check(parsed: list[str]) -> None:
    with full() as server:
        parsed.clear()
        Quick.passed = True
        try:
            link = Link(server)
            for _ in range(2):
                link.send(head(len(BODY)), BODY)
                assert link.answer()[0] == 503, "the first by the middleware, if all is taken meanwhile"
        finally:
            Quick.passed = False
        assert parsed == [PATH]
