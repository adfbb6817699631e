"""Health probes are answered from their heads: neither the parser nor the middleware sees them."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import pytest

pytest.importorskip("starlette")
from llmc_runtime.server import load_shedding
from llmc_runtime.server.http.auth import Guard

from tests.runtime.served import served
from tests.runtime.test_server_shed import KEYS, Link, head


def probe(*more: str, path: str = "/health", version: str = "1.1", host: str = "Host: localhost") -> bytes:
    return "\r\n".join((f"GET {path} HTTP/{version}", *filter(None, (host, *more)), "", "")).encode()


def test_probes_are_answered_from_their_heads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the parser nor the middleware sees them, so that thousands do not delay one another."""
    checked: list[str] = []
    inner = Guard.__call__

    async def call(self: Guard, scope: Any, receive: Any, send: Any) -> None:
        checked.append(scope["path"])
        await inner(self, scope, receive, send)

    monkeypatch.setattr(Guard, "__call__", call)
    with served(keys=KEYS) as server:
        light, ordinary = Link(server), Link(server)
        ordinary.send(head(None, line="GET /v1/models HTTP/1.1"))
        assert ordinary.answer()[0] == 200 and checked == ["/v1/models"]
        for link in (light, ordinary):
            for path in ("/health", "/ping", "/ready"):
                link.send(probe("X-Request-Id: mine", path=path))
                status, headers, _ = link.answer()
                assert status == 200 and headers["x-request-id"] == "mine" and headers["content-length"] == "0"
            link.send(probe() * 40)
            assert [link.answer()[0] for _ in range(40)] == [200] * 40
        assert checked == ["/v1/models"]
        light.send(probe("Origin: http://localhost"))
        status, headers, _ = light.answer()
        assert status == 200 and checked[1:] == ["/health"], "what is not plain takes the other path"
        ordinary.send(probe())
        assert ordinary.answer()[1].keys() == headers.keys(), "and has the same headers"
        for link in (light, ordinary, *(old := [Link(server), Link(server)])):
            link.send(probe(version="1.0", host="" if link in old else "Host: localhost"))
            assert link.answer()[0] == 200 and link.ended()
            link.close()
        with contextlib.closing(Link(server)) as link:
            link.send(probe(host="Host: evil.example"), head(None, line="GET /v1/models HTTP/1.1"))
            assert link.answer()[2]["error"]["code"] == "invalid_host" and link.answer()[0] == 200
            link.send(probe(path="/health/"))
            assert link.answer()[0] == 401, "not the path that needs no key"
            caplog.set_level(logging.DEBUG, "llmc.request")
            seen = len(checked)
            link.send(probe())
            assert link.answer()[0] == 200 and len(checked) == seen + 1, "it is logged"
            caplog.set_level(logging.INFO, "llmc.request")
            link.send(probe(host=""))
            assert link.answer()[0] == 400 and link.ended()


def test_probes_see_what_happens_to_the_server() -> None:
    with served(keys=KEYS) as server, contextlib.closing(Link(server)) as link:
        for draining, ready in ((False, 200), (True, 503), (False, 200)):
            server.serving.admission.draining = draining
            time.sleep(2 * load_shedding._FRESH_SECONDS)
            link.send(probe(), probe(path="/ready"))
            assert link.answer()[0] == 200
            status, headers, body = link.answer()
            assert status == ready and (ready == 200 or ("retry-after" in headers and body["error"]["code"]))
