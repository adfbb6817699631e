"""Paths and hosts as clients and proxies spell them: slashes at the end, a path in front, no Host, other names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.server.app import application
from llmc_runtime.server.http.auth import LOOPBACK
from llmc_runtime.server.http.middleware import normalize_root

from tests.runtime.served import Served, served

KEY = "first-secret-key"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one


def raw(server: Served, text: str) -> bytes:
    """Return the response to these bytes until the connection ends."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as link:
        link.sendall(text.encode())
        found = b""
        while part := link.recv(65536):
            found += part
        return found


def test_a_slash_at_the_end_changes_nothing() -> None:
    with served(keys=(KEY,)) as server:
        head = {"Authorization": f"Bearer {KEY}"}
        assert httpx.get(f"{server.url}/v1/models/", headers=head).json() == httpx.get(
            f"{server.url}/v1/models", headers=head
        ).json()  # fmt: skip
        reply = httpx.post(f"{server.url}/v1/completions/", json={"prompt": "x"}, headers=head)
        assert reply.status_code == 200 and not reply.history
        for path in ("/v1/models/", "/v1/completions/", "/health/", "/ready/"):
            assert httpx.get(server.url + path).status_code == 401
        assert httpx.get(f"{server.url}/v1/models/toy/", headers=head).status_code == 404
        assert httpx.get(f"{server.url}/v1/completions/", headers=head).status_code == 405


def test_requests_without_a_host_are_allowed_and_wrong_hosts_refused(server: Served) -> None:
    assert raw(server, "GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert raw(server, "OPTIONS / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 405")
    for host, status in (("localhost:8000", 200), ("evil.test", 421), ("", 400)):
        text = raw(server, f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
        assert text.startswith(f"HTTP/1.1 {status}".encode()), text
        assert status != 421 or b"--allowed-hosts" in text


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "send a Host header"), ("Host: localhost\r\nHost: localhost\r\n", "send one Host header"),
        ("Host: localhost\r\nContent-Length: -1\r\n", "Content-Length has to be the number of bytes"),
        ("Host: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n", "send one Content-Length header"),
        ("Host: localhost\r\nTransfer-Encoding: gzip\r\n", "of Transfer-Encoding, only chunked is supported"),
        ("Host: localhost\r\n" + "Transfer-Encoding: chunked\r\n" * 2, "send one Transfer-Encoding header"),
        ("Host: localhost\r\nno colon\r\n", "this is not an HTTP/1.1 request"),
    ],
)  # fmt: skip
def test_malformed_heads_are_refused_with_their_cause(server: Served, lines: str, says: str) -> None:
    text = raw(server, f"POST /v1/completions HTTP/1.1\r\n{lines}\r\n")
    assert text.startswith(b"HTTP/1.1 400") and f'"message":"{says}'.encode() in text, text


def get(app: Any, path: str, raw_path: bytes | None = None, host: bytes = b"localhost") -> tuple[int, bytes]:
    """Status and body of a GET, without a network."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": raw_path or path.encode(), "query_string": b"",
        "headers": [(b"host", host)], "http_version": "1.1", "root_path": "", "scheme": "http",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@pytest.mark.parametrize("root", ["/llm", "llm/", "/a/b"])
def test_a_path_in_front_may_be_there_or_not(server: Served, root: str) -> None:
    app = application(server.serving, (KEY,), None, LOOPBACK, root)
    assert get(app, "/health", host=b"0.0.0.0:8000")[0] == 200 and get(app, "/health", host=b"evil")[0] == 421
    under = normalize_root(root)
    for path in ("/health", "/ping", "/ready"):
        assert get(app, path)[0] == get(app, under + path)[0] == 200
    assert (
        f'"servers":[{{"url":"{under}"}}]'.encode()
        in get(application(server.serving, root_path=root), "/openapi.json")[1]
    )
    for path in ("/v1/models", "/v1/models/toy", "/"):
        assert get(app, under + path)[0] == get(app, path)[0] == 401
    open_app = application(server.serving, root_path=root)
    assert get(open_app, under + "/v1/models") == get(open_app, "/v1/models")
    assert get(open_app, under + "/")[0] == 200
    assert get(app, "/health", b"//health")[0] == get(app, under + "/health", under.encode() + b"%2fhealth")[0] == 401
    for path in (under * 2 + "/health", under + "x/health", under):
        assert get(app, path)[0] == 401
