"""Targets in absolute form, the scope of API keys, refusals in OpenAI's words, probes that fill no log."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
import httpx  # noqa: E402
from llmc_runtime.server.http.auth import KEY_SCOPES  # noqa: E402
from llmc_runtime.server.http.middleware import seconds_of  # noqa: E402

from tests.runtime.served import Served, served  # noqa: E402

KEY, ADMIN = "a-secret-api-key", "a-secret-admin-key"
MINE, THEIRS = f"Authorization: Bearer {KEY}\r\n", f"Authorization: Bearer {ADMIN}\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(keys=(KEY,), admin_keys=(ADMIN,)) as one:
        yield one


def send(server: Served, target: str, head: str, method: str = "GET", version: str = "1.1") -> tuple[int, Any]:
    """The status and the error's code, or the body, of a request with this target."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as link:
        link.sendall(f"{method} {target} HTTP/{version}\r\n{head}Connection: close\r\n\r\n".encode())
        reply = http.client.HTTPResponse(link, method=method)
        reply.begin()
        body = reply.read()
    result = json.loads(body) if body.startswith(b"{") else body
    return reply.status, result["error"]["code"] if isinstance(result, dict) and "error" in result else result


def test_targets_in_absolute_form_are_the_paths_that_they_name(server: Served) -> None:
    for host in ("localhost", "localhost:8000", "127.0.0.1:80", "[::1]", "LOCALHOST"):
        for head in (f"Host: {host}\r\n", f"Host: {host.lower()}\r\n"):
            assert send(server, f"http://{host}/health", head)[0] == 200, host
            status, body = send(server, f"http://{host}/v1/models?x=/health", head + MINE)
            assert status == 200 and body["data"][0]["id"] == "toy"
    assert send(server, "HTTP://localhost/v1/%6dodels", "Host: localhost\r\n" + MINE)[0] == 200
    assert send(server, "http://localhost", "Host: localhost\r\n" + MINE)[0] == 200  # the page
    assert send(server, "http://localhost/health", "", version="1.0")[0] == 200  # without a Host header
    assert send(server, "http://evil.test/health", "", version="1.0") == (421, "invalid_host")


def test_a_body_that_was_answered_early_is_not_taken_for_a_target(server: Served) -> None:
    """The connection is kept: the rest of the body is skipped, and the next request is answered."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as link:
        common = f"Host: localhost\r\n{MINE}Content-Type: application/json\r\n"
        head = f"POST /v1/completions HTTP/1.1\r\n{common}Content-Encoding: gzip\r\nContent-Length: 40000\r\n\r\n"
        for _ in range(2):
            link.sendall(head.encode())
            reply = http.client.HTTPResponse(link, method="POST")
            reply.begin()
            assert reply.status == 415 and b"Content-Encoding" in reply.read()
            link.sendall(b"x" * 40_000)
            link.sendall(f"GET /v1/models HTTP/1.1\r\n{common}\r\n".encode())
            reply = http.client.HTTPResponse(link, method="GET")
            reply.begin()
            assert reply.status == 200 and b"toy" in reply.read()


def test_long_targets_are_refused_before_they_are_decoded(server: Served) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    long = "/v1/models/" + "%2f" * 3000
    assert send(server, long[:8000], "Host: localhost\r\n" + MINE) == (404, "model_not_found")
    assert send(server, long, "Host: localhost\r\n") == (414, "target_too_long")  # also without a key
    assert send(server, long * 7, "Host: localhost\r\n") == (414, "target_too_long")  # also without its end
    head = f"GET {long} HTTP/1.1\r\nHost: localhost\r\n{MINE}\r\n"
    first = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{MINE}Content-Type: application/json\r\n"
    for before in (
        "",
        f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{MINE}\r\n",
        f"{first}Content-Length: 2\r\n\r\n{{}}",
    ):
        with socket.create_connection((host, int(port)), timeout=20) as link:
            link.sendall((before + head).encode())
            received = b""
            while part := link.recv(1 << 16):
                received += part
        assert received.count(b"HTTP/1.1 414 ") == 1 and b"HTTP/1.1 404" not in received, before


def test_long_queries_are_refused_before_they_are_decoded(server: Served) -> None:
    for path in ("/v1/responses/resp_x", "/v1/responses/resp_x/input_items"):
        assert send(server, f"{path}?x={'%2f' * 300}", "Host: localhost\r\n" + MINE) == (404, "response_not_found")
        assert send(server, f"{path}?{'a=b&' * 300}", "Host: localhost\r\n" + MINE) == (400, "query_too_long")
    assert send(server, f"/admin/trace?{'a=b&' * 300}", "Host: localhost\r\n" + THEIRS) == (400, "query_too_long")


def test_targets_of_other_servers_are_refused(server: Served) -> None:
    for target, head in (
        ("http://evil.test/health", "Host: localhost\r\n"), ("http://localhost/health", "Host: evil.test\r\n"),
        ("http://localhost:1/health", "Host: localhost:2\r\n"), ("http://me@localhost/health", "Host: localhost\r\n"),
        ("http://me@localhost/health", "Host: me@localhost\r\n"), ("http:///health", "Host: localhost\r\n"),
        ("https://localhost/health", "Host: localhost\r\n"), ("ftp://localhost/health", "Host: localhost\r\n"),
        ("ws://localhost/health", "Host: localhost\r\n"), ("http:/health", "Host: localhost\r\n"),
        ("health", "Host: localhost\r\n"), ("localhost:80", "Host: localhost\r\n"),
        ("http%3a//localhost/health", "Host: localhost\r\n"), ("//localhost/health", "Host: localhost\r\n"),
    ):  # fmt: skip
        for sent in ("", MINE):
            status, code = send(server, target, head + sent)
            wanted = (404, "not_found") if target.startswith("//") and sent else (400, "invalid_target")
            assert (status, code) == (wanted if sent or not target.startswith("//") else (401, "invalid_api_key")), (
                target
            )
    assert send(server, "http://evil.test/health", "Host: evil.test\r\n") == (421, "invalid_host")
    assert send(server, "http://a/?x=/health", "Host: a/?x=\r\n")[0] == 400


def test_targets_in_absolute_form_open_nothing(server: Served) -> None:
    host = "Host: localhost\r\n"
    for path in ("/v1/models", "/metrics", "/health/../metrics", "//health", "/health/", "/admin/", "/"):
        assert send(server, f"http://localhost{path}", host)[0] == 401, path
        assert send(server, f"http://localhost{path}", host + THEIRS)[0] in (401, 404), path
    for path in ("/admin/state", "/%61dmin/state"):
        assert send(server, f"http://localhost{path}", host) == (401, "invalid_api_key")
        assert send(server, f"http://localhost{path}", host + MINE) == (403, "admin_key_needed")
        assert send(server, f"http://localhost{path}", host + THEIRS)[0] == 200
    assert send(server, "http://localhost/health", host, "POST") == (401, "invalid_api_key")
    assert send(server, "http://http://localhost/health", "Host: http:\r\n")[0] in (400, 401)


@pytest.mark.parametrize("scope", KEY_SCOPES)
def test_the_scope_of_api_keys(scope: str) -> None:
    with served(keys=(KEY,), admin_keys=(ADMIN,), key_scope=scope) as one:
        free = {"/health", "/ping", "/ready"}
        free |= {"/metrics", "/metrics/"} if scope != "all" else set()
        free |= {"/", "/version", "/openapi.json", "/tokenizer_info", "/version/"} if scope == "v1" else set()
        others = {"/v1/models", "/v1/models/", "/v1/models/toy", "/%76%31/models", "/v1", "/V1/models", "//metrics"}
        others |= {"/metrics/..", "/%6detrics", "/nowhere", "/metrics/../v1/models", "/v1/../metrics", "/metrics;"}
        for path in (*others, "/", "/version", "/openapi.json", "/tokenizer_info", "/metrics", *free):
            assert (send(one, path, "Host: localhost\r\n")[0] == 200) == (path in free), path
            assert send(one, f"http://localhost{path}", "Host: localhost\r\n")[0] == (200 if path in free else 401)
        for path in ("/tokenize", "/detokenize"):
            assert httpx.post(f"{one.url}{path}", json={"prompt": "x", "tokens": [1]}).status_code == (
                200 if scope == "v1" else 401
            )
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/metrics"):
            assert httpx.post(f"{one.url}{path}", json={"prompt": "x"}).status_code == 401
        for path in ("/admin/state", "/%61dmin/state"):
            assert send(one, path, "Host: localhost\r\n")[0] == 401
            assert send(one, path, "Host: localhost\r\n" + MINE)[0] == 403
        head = {"Authorization": f"Bearer {KEY}"}
        assert httpx.get(f"{one.url}/v1/models", headers=head).status_code == 200


def test_refusals_of_keys_are_in_the_words_of_the_api(server: Served) -> None:
    with pytest.raises(openai.AuthenticationError) as error:
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0).models.list()
    assert (error.value.type, error.value.code, error.value.param) == ("invalid_request_error", "invalid_api_key", None)
    reply = httpx.get(f"{server.url}/admin/state", headers={"Authorization": f"Bearer {KEY}"})
    assert reply.status_code == 403 and reply.json()["error"]["type"] == "invalid_request_error"


def test_probes_that_say_no_are_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with served() as one, caplog.at_level(logging.DEBUG, "llmc.serve"):
        one.serving.admission.draining = True
        assert httpx.get(f"{one.url}/ready").status_code == 503
        assert not [record for record in caplog.records if record.name == "llmc.serve"]
        assert httpx.post(f"{one.url}/v1/completions", json={"prompt": "x"}).status_code == 503


def test_seconds_are_decimal_numbers_in_ascii(server: Served) -> None:
    for text, value in (
        ("1", 1.0),
        ("0.5", 0.5),
        (".5", 0.5),
        ("60.", 60.0),
        ("060", 60.0),
        ("1e1", 10.0),
        ("5E-1", 0.5),
    ):
        assert seconds_of(text, 60) == value
    for text in (
        "",
        "0",
        "0.0",
        "61",
        "-1",
        "+1",
        " 1",
        "1 ",
        "1e9",
        "1_0",
        "inf",
        "nan",
        "١٢",
        "１",
        "\xa05",
        "9" * 40,
    ):
        assert seconds_of(text, 60) is None, text
    head = {"Authorization": f"Bearer {KEY}"}
    for text in (b"1_0", b"1e9", b"\xa05", b"nan"):
        sent = {**head, "X-Request-Timeout": text}
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=sent)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "X-Request-Timeout", text
    for text in ("١", "1e9", "1_0", "０"):
        reply = httpx.get(
            f"{server.url}/admin/trace", params={"seconds": text}, headers={"Authorization": f"Bearer {ADMIN}"}
        )
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "seconds", text
