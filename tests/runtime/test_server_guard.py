"""Invalid keys, paths, hosts and bodies: a clear error each time, and no effect on the next request."""

from __future__ import annotations

import http.client
import json
import random
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llmc_runtime import LlmcError

pytest.importorskip("starlette")
import httpx
from llmc_runtime.server.config import read_keys
from llmc_runtime.server.http.auth import Keys, Limits, key_id

from tests.runtime.served import Served, served

KEYS = ("first-secret-key", "second-secret-key")
LIMITS = Limits(body=20_000, headers=8_000, header_count=40, body_seconds=0.5)
ROUTES = (
    "/v1/models", "/v1/models/toy", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize",
    "/v1/embeddings", "/metrics", "/version", "/openapi.json", "/nowhere", "/",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(keys=KEYS, limits=LIMITS) as one:
        yield one
        one.rest()


def raw(server: Served, data: bytes) -> tuple[int, bytes]:
    """The status and all that came for bytes as they are."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as link:
        link.sendall(data)
        reply = http.client.HTTPResponse(link, method=data.split()[0].decode())
        reply.begin()
        return reply.status, reply.read()


def spellings(path: str) -> list[str]:
    coded = path.replace("v1", "%761") if "v1" in path else path[:1] + f"%{ord(path[1:2] or '.'):02x}" + path[2:]
    return [
        path, f"/{path}", f"{path}/", path.upper(), f"/x/..{path}", f"/.{path}", f"/health/..{path}", f"/ready{path}",
        f"/health%2f..{path}", f"/health;{path}", f"/health?x={path}&", f"{path}?/health", f"{path}#/health", coded,
        f"{path}%00", f"/health%00{path}", f"http://localhost/health{path}",
    ]  # fmt: skip


def test_without_a_key_nothing_but_health_and_readiness_is_there(server: Served) -> None:
    seen = set()
    for path in ROUTES:
        for spelling in spellings(path):
            for method in ("GET", "POST", "HEAD", "OPTIONS", "TRACE", "PUT", "CONNECT"):
                for host in ("localhost", "127.0.0.1:8000"):
                    line = f"{method} {spelling} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
                    status, body = raw(server, (line + "Content-Length: 0\r\n\r\n").encode())
                    bare = spelling.partition("?")[0].partition("#")[0]
                    if bare == "/health" and method in ("GET", "HEAD"):
                        assert status == 200 and not body
                        continue
                    assert status in (400, 401, 404, 405), (method, spelling, status)
                    seen.add(status)
    assert 401 in seen
    for path in ("/health", "/ready", "/ping"):
        assert httpx.get(server.url + path).status_code == 200
        assert httpx.post(server.url + path).status_code == 401


def test_keys_open_every_route_and_other_keys_none(server: Served) -> None:
    for key in KEYS:
        assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    for given in (
        "Bearer first-secret-ke", "Bearer first-secret-keys", "Bearer", "Basic first-secret-key", "x",
        "first-secret-key", "Bearer FIRST-SECRET-KEY", "Bearer first-secret-key second-secret-key",
    ):  # fmt: skip
        reply = httpx.get(f"{server.url}/v1/models", headers={"Authorization": given})
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key", given
        assert reply.headers["www-authenticate"] == "Bearer"


def test_a_key_is_found_by_its_digest_alone() -> None:
    """Comparing it with each of thousands of keys would hold the event loop for every head, valid or not."""
    keys = Keys([f"secret-key-{number}" for number in range(5000)])
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        names = [keys.name_of(b"Bearer secret-key-%d" % number) for number in (0, 4999, 5000)]
    finally:
        sys.setprofile(None)
    assert names == [key_id("secret-key-0"), key_id("secret-key-4999"), None] and calls["c_call"] < 100
    assert keys.name_of(b"Basic secret-key-0") is None and "secret-key" not in str(vars(keys))
    others = Keys(["secret-key-0"])
    assert not vars(keys)["_names"].keys() & vars(others)["_names"].keys(), "digests depend on a secret"


def test_keys_from_files_and_named_variables(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team\nabcdefgh1\n\n  abcdefgh2  \n")
    assert list(read_keys([file], ["K"], {"K": "abcdefgh3, abcdefgh4"})) == [f"abcdefgh{i}" for i in range(1, 5)]
    assert read_keys([], [], {"K": "abcdefgh3"}) == {}
    named = read_keys([], ["K"], {"K": "team-a: abcdefgh1, team-a:abcdefgh2,abcdefgh3,team-a: abcdefgh4,abcdefgh1"})
    assert named == {"abcdefgh1": "team-a", "team-a:abcdefgh2": "key-2", "abcdefgh3": "key-3", "abcdefgh4": "team-a"}
    for files, names, environment in (
        ([tmp_path / "none"], [], {}), ([], ["K"], {}), ([], ["K"], {"K": "short"}), ([], ["K"], {"K": "clé-secrète"}),
    ):  # fmt: skip
        with pytest.raises(LlmcError, match="E647"):
            read_keys(files, names, environment)


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=20) as one:
        yield one


@pytest.fixture
def golden(client: httpx.Client) -> Iterator[None]:
    """After each test, the next request has the same answer, and no engine was replaced."""

    def ask() -> Any:
        body = {"prompt": "The kernel", "temperature": 0, "max_tokens": 12, "seed": 7}
        return client.post("/v1/completions", json=body).json()["choices"]

    before = ask()
    yield
    assert ask() == before and client.get("/health").status_code == 200


def refused(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, (reply.status_code, reply.text[:300])
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and isinstance(error["code"], str)
    assert not any(word in reply.text for word in ("Traceback", " 0x", ".py", "site-packages", "runtime/"))
    return str(error["code"])


def test_bodies_that_are_no_requests(client: httpx.Client, golden: None) -> None:
    kind = {"Content-Type": "application/json"}
    deep = b'{"prompt": ' + b"[" * 100_000
    for body in (
        b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', deep[:19_000],
        b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": 1e400}', b'\xef\xbb\xbf\xef\xbb\xbf{}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", b'{"x": ' + b"[" * 70 + b"]" * 70 + b', "prompt": "x"}',
    ):  # fmt: skip
        assert refused(client.post("/v1/completions", content=body, headers=kind), 400) == "invalid_json", body[:40]
    assert client.post("/v1/completions", content=b"", headers=kind).json()["error"]["message"].endswith("it is empty")
    big = b'{"prompt": "' + b"x" * 30_000 + b'"}'
    assert refused(client.post("/v1/completions", content=big, headers=kind), 413) == "body_too_large"
    assert refused(client.post("/v1/completions", content=iter([big[:9000]] * 4), headers=kind), 413)
    assert refused(client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}), 415)
    assert refused(client.post("/v1/completions", content=b"x", headers={**kind, "Content-Encoding": "gzip"}), 415)


def test_numbers_and_lists_at_and_past_every_edge(client: httpx.Client, golden: None) -> None:
    odd: list[Any] = [
        -(2**63), -1, 0, 1, 2**31, 2**63, 2**64, 1e308, -1e308, 0.5, "", "x", [], {}, True, [None], [[]], {"": ""},
        [2**70], ["x" * 2000] * 5, list(range(3000)), {str(i): 1 for i in range(1100)},
    ]  # fmt: skip
    names = (
        "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids",
        "bad_words", "prompt_logprobs", "logprobs", "echo", "priority", "cache_salt", "best_of", "structured_outputs",
        "response_format", "stream_options", "prompt", "model", "add_special_tokens",
    )  # fmt: skip
    for name in names:
        for value in random.sample(odd, 3):
            body = {"prompt": "x", "max_tokens": 2, "temperature": 1.0, name: value}
            reply = client.post(
                "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
            )
            if reply.status_code != 200:
                refused(reply, 404 if name == "model" and isinstance(value, str) else 400)


def test_headers_that_are_too_many_or_too_long(client: httpx.Client, golden: None) -> None:
    assert refused(client.get("/v1/models", headers={f"x-{i}": "y" for i in range(50)}), 431) == "headers_too_large"
    assert refused(client.get("/v1/models", headers={"x-long": "y" * 9000}), 431) == "headers_too_large"


def test_a_body_that_never_comes_is_not_waited_for(server: Served, golden: None) -> None:
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\n"
    status, body = raw(server, (head + "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{").encode())
    assert status == 408 and json.loads(body)["error"]["code"] == "timeout"


def test_heads_that_never_end_or_are_none(server: Served, golden: None) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for before, data in ((b"", b""), (b"", b"GET /v1/models HTTP/1.1\r\nHost: loc"), (first, b"GET /heal")):
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as link:
            link.sendall(before)
            received = link.recv(4096) if before else b""
            link.sendall(data)
            while part := link.recv(4096):
                received += part
        assert b"HTTP/1.1 408 " in received and b'"code":"timeout"' in received
        assert received.count(b"HTTP/1.1 200 ") == bool(before)
    for data in (b"hello\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000):
        status, body = raw(server, data)
        assert status == 400 and json.loads(body)["error"]["code"] == "invalid_http"


def test_pages_of_others_reach_nothing(client: httpx.Client, golden: None) -> None:
    for host, status in (("evil.test", 421), ("localhost.evil.test", 421), ("a/?x=", 400), ("localhost/health?", 400)):
        assert refused(client.get("/v1/models", headers={"Host": host}), status) == "invalid_host"
    reply = client.get("/v1/models", headers={"Origin": "http://evil.test"})
    assert not any(name.startswith("access-control") for name in reply.headers)
    assert client.options("/v1/models", headers={"Origin": "http://evil.test"}).status_code == 405


def test_request_ids_are_echoed_and_never_used(client: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 2, "request_id": "mine"}
    replies = [client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}) for _ in range(2)]
    assert all(reply.headers["x-request-id"] == "mine" for reply in replies)
    assert len({reply.json()["id"] for reply in replies} - {"mine"}) == 2
    odd = client.get("/v1/models", headers={"X-Request-Id": "a b<script>"})
    assert odd.headers["x-request-id"] not in ("", "a b<script>")


def test_prefixes_are_shared_only_within_a_key(server: Served) -> None:
    def cached(key: str, **more: Any) -> int:
        body = {"prompt": list(range(100, 140)), "max_tokens": 1, **more}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEYS[0]) == 0 and cached(KEYS[0]) > 30
    assert cached(KEYS[1]) == 0 and cached(KEYS[1]) > 30
    assert cached(KEYS[0], cache_salt="a") == 0 and cached(KEYS[0], cache_salt="a") > 30
