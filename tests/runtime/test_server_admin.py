"""The routes under /admin/: authorization, and their effects on a busy server."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import threading
import time
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx

from tests.runtime.served import served, until
from tests.runtime.test_server_load import LONG

ADMIN, KEY = "the-admin-key-1", "an-ordinary-key-1"
ROUTES = (
    ("GET", "/admin/state"), ("GET", "/admin/trace"), ("POST", "/admin/reset_prefix_cache"), ("POST", "/admin/abort"),
    ("POST", "/admin/log_level"), ("POST", "/admin/restart"),
)  # fmt: skip


SPELLINGS = (
    "/%61dmin/state", "/admin/%73tate", "//admin/state", "/admin//state", "/Admin/state", "/admin/state/", "/admin",
    "/admin/../admin/state", "/x/../admin/state", "/admin;/state", "/admin%2fstate", "/admin/state%00",
    "/./admin/state", "/health/../admin/state", "/%2561dmin/state",
)  # fmt: skip


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_only_the_admin_key_opens_admin_routes(keys: tuple[str, ...]) -> None:
    with served(keys=keys, admin_keys=(ADMIN,)) as server, httpx.Client(base_url=server.url) as client:
        for method, path in ROUTES:
            for head, status in (({}, 401), (bearer("no-such-key-1"), 401), (bearer(KEY), 403 if keys else 401)):
                reply = client.request(method, path, headers=head)
                assert reply.status_code == status, (path, head, reply.text)
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert client.get("/admin/state", headers=bearer(ADMIN)).status_code == 200
        # The admin key is no API key.
        assert client.get("/v1/models", headers=bearer(ADMIN)).status_code == (401 if keys else 200)
        link = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
        for path in SPELLINGS:
            for head in ({}, bearer(KEY)):
                link.request("GET", path, headers=head)
                reply = link.getresponse()
                reply.read()
                assert reply.status in (401, 403, 404), path
        link.close()


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_without_an_admin_key_there_are_no_such_routes(keys: tuple[str, ...]) -> None:
    with served(keys=keys) as server, httpx.Client(base_url=server.url) as client:
        for method, path in ROUTES:
            assert client.request(method, path, headers=bearer(KEY)).status_code == 404
            assert client.request(method, path).status_code == (401 if keys else 404)


class Streams:
    """Requests that run, each read to its end in a thread."""

    def __init__(self, url: str, count: int, secret: int) -> None:
        self.ends: list[Any] = []
        self._threads = [threading.Thread(target=self._one, args=(url, secret), daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _one(self, url: str, secret: int) -> None:
        body = {**LONG, "prompt": [secret, 30, 40], "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            self.ends.append([line for line in reply.iter_lines() if line][-1])

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)


def test_the_state_a_trace_and_an_abort_of_a_server_at_work() -> None:
    with served(pace=0.02, admin_keys=(ADMIN,)) as server, httpx.Client(headers=bearer(ADMIN)) as admin:
        streams = Streams(server.url, 3, random.randrange(10, 400))
        until(lambda: server.llm.stats().get("num_requests_running") == 3)
        state = admin.get(f"{server.url}/admin/state").json()
        assert (
            state["state"] == "ready" and state["open_sequences"] == 3 and state["stats"]["num_requests_running"] == 3
        )
        assert [one["prompt_tokens"] for one in state["requests"]] == [3, 3, 3]
        assert all(set(one) == {"id", "prompt_tokens", "output_tokens", "outputs", "age"} for one in state["requests"])

        began = time.monotonic()
        reply = admin.get(f"{server.url}/admin/trace?seconds=0.3")
        assert 0.3 <= time.monotonic() - began < 5
        events = [e for e in reply.json()["traceEvents"] if e["ph"] == "X"]
        assert reply.headers["content-type"] == "application/json" and {e["name"] for e in events} >= {"plan", "launch"}
        assert max(e["args"]["rows"] for e in events) == 3

        assert admin.post(f"{server.url}/admin/reset_prefix_cache").status_code == 409
        name = state["requests"][1]["id"].rpartition("-")[0]
        reply = admin.post(f"{server.url}/admin/abort", json={"id": name})
        assert reply.json() == {"aborted": 1}
        assert admin.post(f"{server.url}/admin/abort", json={"id": name}).status_code == 404
        streams.join()
        ends = sorted(streams.ends)
        assert ends[:2] == ["data: [DONE]"] * 2 and json.loads(ends[2][6:])["error"]["code"] == "aborted"
        server.rest()
        assert admin.post(f"{server.url}/admin/reset_prefix_cache").json() == {"reset": True}


def test_one_trace_at_a_time_of_a_bounded_time_and_bodies_that_make_no_sense() -> None:
    with served(pace=0.01, admin_keys=(ADMIN,)) as server, httpx.Client(headers=bearer(ADMIN)) as admin:
        for seconds in ("0", "-1", "61", "nan", "inf", "x", "", "1e999"):
            wrong = admin.get(f"{server.url}/admin/trace", params={"seconds": seconds})
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "seconds", seconds
        first = asyncio.run_coroutine_threadsafe(server.llm.record(0.6), server.loop)  # asked before the next one
        assert admin.get(f"{server.url}/admin/trace").status_code == 409
        assert isinstance(first.result(20), list)
        for body in ({}, {"id": 7}, {"id": "cmpl-none"}):
            reply = admin.post(f"{server.url}/admin/abort", json=body)
            assert reply.status_code == (404 if body == {"id": "cmpl-none"} else 400)
        assert admin.post(f"{server.url}/admin/log_level", json={"level": "loud"}).status_code == 400
        assert admin.post(f"{server.url}/admin/log_level", json={"level": "info"}).json() == {"level": "info"}
