"""Access to the server: sockets, routes, keys, hosts, and addresses in requests."""

from __future__ import annotations

import base64
import http.client
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from tests.attacks.conftest import ADMIN
from tests.attacks.target import Target, target
from tests.attacks.wire import CLOSED, Link, head, raw

UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
HOSTS = ("localhost", "127.0.0.1", "a/?x=", "localhost/health?", "evil.test")
OPEN = {"/health", "/ping", "/ready"}  # without a key
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "PATCH", "CONNECT")


def listening(pids: Sequence[int]) -> tuple[set[tuple[str, int]], list[str]]:
    """Addresses that processes listen on, or take datagrams at, and the paths of their unix sockets."""
    found, paths = set(), list[str]()
    for pid in pids:
        for one in psutil.Process(pid).net_connections("all"):
            if one.family == socket.AF_UNIX:
                paths += [str(one.laddr)] if one.laddr else []
            elif one.status == psutil.CONN_LISTEN or (one.type == socket.SOCK_DGRAM and one.laddr):
                found.add((one.laddr.ip, one.laddr.port))
    return found, paths


def test_02_ports(server: Target) -> None:
    """Only the HTTP port on 127.0.0.1 is open; sockets between processes are files that other users cannot access."""
    there, paths = listening(list(server.pids))
    assert there == {("127.0.0.1", server.port)}
    for path in paths:
        assert not path.startswith(("@", "\0")), path  # an abstract name has no permissions
        folder = Path(path).parent
        assert not folder.exists() or folder.stat().st_mode & 0o077 == 0, path
    others = {a.address for all in psutil.net_if_addrs().values() for a in all if a.family == socket.AF_INET}
    for address in others - {"127.0.0.1"}:
        with pytest.raises(OSError):
            socket.create_connection((address, server.port), timeout=2).close()
    with socket.create_server(("0.0.0.0", 0)) as careless:  # what the test would see
        assert ("0.0.0.0", careless.getsockname()[1]) in listening([os.getpid()])[0]


def spellings(path: str, draw: Random) -> list[str]:
    """About 200 ways to write a path that a router, a proxy or a careless guard could take for it."""
    coded = [path[:i] + f"%{ord(c):02x}" + path[i + 1 :] for i, c in enumerate(path)]
    twice = [path[:i] + f"%25{ord(c):02x}" + path[i + 1 :] for i, c in enumerate(path) if i < 8]
    cases = [path.upper(), path.title(), path.swapcase(), "".join(draw.choice((c, c.upper())) for c in path)]
    befores = (
        "/", "//", "/.", "/./", "/x/..", "/health/..", "/ready/..", "/health/../", "/health//..", "/%2e", "/%2e%2e",
        "/..",
        "/health%2f..", "/health/%2e%2e", "/health;", "/health;x", "/ready", "/health", "/health%00", "/health\\..",
        "\\",
        "/health#", "/health/.", "/%2f", "/health%20", "/health%0d%0a", "/static", "/docs", "*", "/.well-known",
        "/HEALTH",
        "http://localhost/health", "http://localhost", "http://evil.test", "https://localhost", "http://health",
        "http:",
        "/health?", "/health?x=", "/ready?/", "/ready#", "/health/?", "/healthz", "/health/%2f..", "/health%252f..",
    )  # fmt: skip
    afters = (
        "/", "//", "/.", "/..", "/../health", "/../../health", "/%2e%2e/health", "?", "?x", "?/health", "#", "#/health",
        ";", ";/health", ";x=/ready", "%00", "%00/health", "%20", "%09", ".", "..", ".json", ".html", "/health",
        "/ready",
        "%2f", "%2f..%2fhealth", "\\", "\\..\\health", "&", "&path=/health", "%3f/health", "%23/health", "/%2e",
        "//health",
        "%0a", "%0d%0aX: y", "?key=x", "?api_key=x", "?access_token=x", "/*", "%c0%af", "%ef%bc%8f", "%u002f", "/;/",
        "/.;/",
    )  # fmt: skip
    made = [path, *coded, *twice, *cases, *(b + path for b in befores), *(path + a for a in afters)]
    made += [b + path + a for b in befores[:24] for a in afters[:4]]
    return list(dict.fromkeys(one for one in made if " " not in one))


def extras(draw: Random) -> str:
    """Headers that have opened other servers."""
    return draw.choice(
        ("",) * 6
        + (
            "X-Original-URL: /health\r\n", "X-Rewrite-URL: /health\r\n", "X-Forwarded-For: 127.0.0.1\r\n",
            "X-Forwarded-Prefix: /health\r\n", "X-HTTP-Method-Override: GET\r\n", "Authorization: \r\n",
            "Authorization: Bearer\r\n", "Authorization: Bearer null\r\n", "Authorization: Basic Og==\r\n",
            "X-Api-Key: another-secret-key\r\n", "Authorization: Bearer x\r\nX-Api-Key: first-secret-key\r\n",
            "X-Api-Key: \r\n", "X-Api-Key: x\r\nX-Api-Key: first-secret-key\r\n",
            "Cookie: key=first-secret-key\r\n", "Forwarded: for=127.0.0.1\r\n",
            "Authorization: Bearer x\r\nAuthorization: Bearer first-secret-key\r\n", "Connection: Authorization\r\n",
            UPGRADE,
        )
    )  # fmt: skip


def intrusions(
    server: Target, draw: Random, most: int | None, sent: str = "", only: Callable[[str], bool] = lambda path: True
) -> list[str]:
    """Requests with a header `sent` that were answered as if a key had opened the routes (`only` some)."""
    got, link = [], Link(server)
    routes = [
        path.replace("{name:path}", "toy").replace("{name}", "toy").replace("{response_id}", "x")
        for path, _ in server.routes
    ]
    routes = [path for path in (*routes, "/nowhere", "/docs", "/v1", "/admin/") if path not in OPEN and only(path)]
    tries = [(m, s) for path in routes for s in spellings(path, draw) for m in METHODS]
    if most is not None:
        tries = [(m, path) for path in routes for m in ("GET", "POST")] + draw.sample(tries, most)
    for method, spelling in tries:
        host = draw.choice(HOSTS) if draw.random() < 0.5 else f"127.0.0.1:{server.port}"
        more = sent or extras(draw)
        line = f"{method} {spelling} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n{more}\r\n"
        reply = link.answer(method) if link.send_some(line.encode()) else CLOSED
        bare = spelling.partition("?")[0].partition("#")[0]
        names = {bare, bare.removesuffix("/")} if sent else {bare}  # a key that was sent opens them with a slash, too
        inert = method in ("GET", "HEAD") and bool(names & set(OPEN)) and not reply.body
        if not inert and reply.status not in (0, 400, 401, 403, 404, 405, 408, 414, 415, 421, 431):
            got.append(f"{line!r}: {reply}")
        if reply.headers.get("connection") == "close" or reply.status in (0, 400, 408):
            link.close()
            link = Link(server)
    link.close()
    return got


def test_03_keys_are_needed(steady: Target, draw: Random, full: bool) -> None:
    """Every route of the application itself, every method, about 200 spellings, hosts and headers: never let in."""
    assert len(steady.routes) > 10
    assert intrusions(steady, draw, 12_000 if full else 250) == []
    for path in OPEN:
        assert steady.ask(path, key="").status == 200 and not steady.ask(path, key="").body
        assert steady.ask(path, b"{}", key="").status == 401


def test_03_a_key_opens_its_own_routes_alone(steady: Target, draw: Random, full: bool) -> None:
    """Ordinary keys open no route under /admin/, admin keys no others, and a browser's password only the page."""
    admins = [path for path, _ in steady.routes if path.startswith("/admin/")]
    assert len(admins) > 3 and steady.ask("/admin/state", key=ADMIN).status == 200
    most = 3000 if full else 60
    mine, theirs = f"Authorization: Bearer {steady.key}\r\n", f"Authorization: Bearer {ADMIN}\r\n"
    assert intrusions(steady, draw, most, mine, lambda path: path in admins) == []
    assert intrusions(steady, draw, most, theirs, lambda path: path not in (*admins, "/admin/")) == []
    for key in (ADMIN, steady.key):
        basic = "Basic " + base64.b64encode(f"anybody:{key}".encode()).decode()
        page = raw(steady, head(steady, "/", "GET", Authorization=basic))
        assert page.status == (200 if key == steady.key else 401)
        sent = f"Authorization: {basic}\r\n"
        assert intrusions(steady, draw, most, sent, lambda path: path != "/") == []
    for method in ("POST", "PUT", "OPTIONS"):
        assert raw(steady, head(steady, "/", method, Authorization=basic)).status == 401


def test_03_targets_in_absolute_form_open_nothing(steady: Target) -> None:
    """A URL as a target is the path that it names, under the same keys; its host is checked as the Host header is."""
    me = f"127.0.0.1:{steady.port}"
    mine, theirs = f"Authorization: Bearer {steady.key}\r\n", f"Authorization: Bearer {ADMIN}\r\n"

    def ask(target: str, host: str, more: str = "") -> int:
        return raw(steady, f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode()).status

    assert ask(f"http://{me}/health", me) == 200
    for path, _ in steady.routes:
        path = path.replace("{name:path}", "toy").replace("{name}", "toy").replace("{response_id}", "x")
        for spelled in (path, path.replace("a", "%61"), f"/health/..{path}", f"/{path}", f"{path}?/health"):
            if path not in OPEN:
                assert ask(f"http://{me}{spelled}", me) in (401, 404), spelled
                assert ask(f"http://{me}{spelled}", me, theirs if "/v1" in path else mine) != 500, spelled
        if path.startswith("/admin/"):
            assert ask(f"http://{me}{path}", me, mine) == 403
    for url, host in (
        ("http://evil.test/health", me), (f"http://{me}/health", "evil.test"), (f"http://x@{me}/health", me),
        (f"http://x@{me}/health", f"x@{me}"), (f"https://{me}/health", me), (f"file://{me}/health", me),
        ("http:///health", me), (f"http:{me}/health", me), (f"HTTP%3A//{me}/health", me),
    ):  # fmt: skip
        assert ask(url, host) == 400, url
    assert ask("http://evil.test/health", "evil.test") == 421


def test_03_without_admin_keys_there_are_no_admin_routes(draw: Random) -> None:
    """Neither with ordinary keys nor without any."""
    for keys in ((), ("first-secret-key",)):
        with target(keys=keys) as server:
            for path in (
                "/admin/state",
                "/admin/trace",
                "/admin/abort",
                "/admin/reset_prefix_cache",
                "/admin/log_level",
                "/admin/restart",
            ):
                for body in (None, {}):
                    assert server.ask(path, body).status in (403, 404), path
                    assert server.ask(path, body, key=ADMIN).status in (401, 403, 404), path


def test_03_the_open_server_is_seen_as_open(draw: Random) -> None:
    """The same search finds a server that has no keys."""
    with target() as careless:
        assert intrusions(careless, draw, 20)


def ranks(one: Sequence[float], other: Sequence[float]) -> float:
    """The two-sided p of Mann and Whitney's U test, by the normal approximation; times are hardly ever equal."""
    both = sorted([(value, 0) for value in one] + [(value, 1) for value in other])
    total = sum(rank for rank, (_, which) in enumerate(both, 1) if which == 0)
    n, m = len(one), len(other)
    z = (total - n * (n + m + 1) / 2) / math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(z) / math.sqrt(2))


def timed(ask: Callable[[str], None], keys: Sequence[str], count: int, draw: Random) -> list[list[float]]:
    """Seconds of `count` calls for each key, in a random order, so that what drifts drifts for all."""
    found: list[list[float]] = [[] for _ in keys]
    order = [i for i in range(len(keys)) for _ in range(count)]
    draw.shuffle(order)
    for i in order:
        began = time.perf_counter()
        ask(keys[i])
        found[i].append(time.perf_counter() - began)
    return found


def distinguished(ask: Callable[[str], None], keys: Sequence[str], count: int, draw: Random) -> bool:
    """Whether the time tells the first key from another, three times in a row: once is chance one time in fifty."""
    for _ in range(3):
        first, *others = timed(ask, keys, count, draw)
        if min(ranks(first, other) for other in others) > 0.01:
            return False
    return True


def test_04_key_timing(steady: Target, draw: Random, times: Callable[[int, int], int]) -> None:
    """Keys with 0, 8 and all but one right first characters are refused in the same time."""
    wrong = ["X" * len(steady.key), steady.key[:8] + "X" * (len(steady.key) - 8), steady.key[:-1] + "X"]
    link = http.client.HTTPConnection(steady.host, steady.port)

    def ask(key: str) -> None:
        link.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        reply = link.getresponse()
        assert reply.read() and reply.status == 401

    assert not distinguished(ask, wrong, times(150, 5000), draw)

    def careless(key: str) -> None:  # a comparison that ends at the first difference, magnified
        same = next((i for i, (a, b) in enumerate(zip(key, steady.key)) if a != b), 0)
        until = time.perf_counter() + 1e-4 + 3e-6 * same
        while time.perf_counter() < until:
            pass

    assert distinguished(careless, wrong, 150, draw)


@pytest.fixture
def canary() -> Iterator[tuple[str, list[Any]]]:
    """An address, and who came to it."""
    came: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(0.1)
        over = threading.Event()

        def watch() -> None:
            while not over.is_set():
                try:
                    link, address = door.accept()
                except TimeoutError:
                    continue
                came.append(address)
                link.close()

        thread = threading.Thread(target=watch)
        thread.start()
        yield f"127.0.0.1:{door.getsockname()[1]}", came
        over.set()
        thread.join()


def test_15_nothing_is_fetched(steady: Target, canary: tuple[str, list[Any]]) -> None:
    """URLs of images, files, tools and schemas: the server does not connect to the address, whatever it responds."""
    address, came = canary
    for url in (f"http://{address}/x", f"//{address}/x", f"ftp://{address}/x", f"http://localhost:{address[-5:]}/x"):
        schema = {"$ref": url, "$schema": url, "$id": url, "type": "object", "properties": {"a": {"$ref": f"{url}#/a"}}}
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        parts = [
            {"type": "image_url", "image_url": {"url": url}}, {"type": "input_audio", "input_audio": {"data": url}},
            {"type": "file", "file": {"file_id": url, "file_data": url}}, {"type": "video_url",
            "video_url": {"url": url}},
        ]  # fmt: skip
        for part in parts:
            body = {**chat, "messages": [{"role": "user", "content": [part]}]}
            assert steady.ask("/v1/chat/completions", body).status == 400
        for more in (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
            {"structured_outputs": {"json": schema}}, {"tools": [{"type": "mcp", "server_url": url}]},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": "required"},
            {"web_search_options": {"url": url}}, {"chat_template": f"{{% include '{url}' %}}"}, {"model": url},
            {"documents": [{"url": url}]}, {"mm_processor_kwargs": {"url": url}}, {"callback_url": url, "webhook": url},
            {"structured_outputs": {"grammar": f'%import "{url}"\nstart: "a"'}},
            {"kv_transfer_params": {"host": address}},
        ):  # fmt: skip
            assert steady.ask("/v1/chat/completions", {**chat, **more}).status in (200, 400, 404), more
    assert came == []
    socket.create_connection(address.split(":")).close()  # whoever comes is seen
    time.sleep(0.3)
    assert len(came) == 1


def test_19_pages_of_others(steady: Target) -> None:
    """A name that leads here is not enough, and no page may read an answer."""
    for host in (
        "evil.test",
        "localhost.evil.test",
        "evil.test:80",
        "127.0.0.1.evil.test",
        "[::2]",
        "0x7f.1",
        "2130706433",
    ):
        assert steady.ask("/v1/models", headers={"Host": host}).status == 421, host
        assert steady.ask("/health", headers={"Host": host}).status == 421, host
    for host in ("", "a/?x=", "localhost/health?", "loc alhost", "localhost@evil.test", "localhost:x", "[::1"):
        line = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {steady.key}\r\n\r\n"
        assert raw(steady, line.encode()).status == 400, host
    two = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.test\r\nAuthorization: Bearer {steady.key}\r\n\r\n"
    assert raw(steady, two.encode()).status in (400, 421)
    for origin in ("http://evil.test", "null", f"http://127.0.0.1:{steady.port}", "http://localhost:3000"):
        for method in ("GET", "OPTIONS"):
            sent = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            reply = steady.ask("/v1/models", method=method, headers=sent)
            assert not any(name.lower().startswith("access-control") for name in reply.headers), (origin, method)
