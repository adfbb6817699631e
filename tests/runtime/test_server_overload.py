"""An overloaded server: refusals and their latency, deadlines, connections, stalled readers, shares of keys, and the
abort of requests within two steps after their client has disconnected."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.cli import main_serve
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.http.connection_limit import allowed, set_descriptor_limit
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.serving import MAX_TEXTS

from tests.runtime.fake_core import ROWS
from tests.runtime.served import Quick, Served, served, until
from tests.runtime.test_server_load import LONG, Command, metric, post_head

LIMITED = """
import resource, runpy, sys
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
KEYS = ("first-secret-key", "second-secret-key")
HEADS = [{"Authorization": f"Bearer {key}"} for key in KEYS]


def post(server: Served, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30)


def test_refusals_come_before_tokenizing_and_say_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(pace=0.05, sequences=ROWS + 20) as server:
        links = [post_head(server, LONG) for _ in range(ROWS + 20)]
        lanes = server.serving.text_threads.slots
        until(lambda: server.serving.admission.full and not lanes.waiting and not lanes._queue._running)

        async def never(*args: Any) -> Any:
            raise AssertionError("it was tokenized")

        monkeypatch.setattr(server.serving.text_threads, "_in_thread", never)
        with httpx.Client(base_url=server.url) as client:
            took = []
            for _ in range(20):
                began = time.monotonic()
                reply = client.post("/v1/completions", json={"prompt": "many words " * 5000})
                took.append(time.monotonic() - began)
                assert reply.status_code == 503, reply.text
            assert statistics.median(took) < 2, took
            assert reply.headers["retry-after"] == str(-(-int(reply.headers["retry-after-ms"]) // 1000))
        for link in links:
            link.close()
        until(lambda: not server.serving.admission.open_sequences)
        server.rest()


def test_a_queue_that_moves_slowly_refuses_who_would_wait_too_long() -> None:
    with served(pace=0.02, sequences=200, max_wait=2.0) as server:
        links = [post_head(server, {**LONG, "max_tokens": 50}) for _ in range(ROWS + 150)]
        until(lambda: (server.serving.admission.wait() or 0) > 2.0)
        reply = post(server, {"prompt": "x"})
        assert reply.status_code == 503 and "would wait about" in reply.json()["error"]["message"]
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert metric(server, "admission_rejections_total", ',reason="queue_wait"') >= 1
        for link in links:
            link.close()
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        assert post(server, {"prompt": "x"}).status_code == 200


def test_a_request_ends_when_its_time_is_over_running_or_waiting() -> None:
    with served(pace=0.05, timeout=1.0) as server:
        began = time.monotonic()
        reply = post(server, LONG)
        assert 0.9 < time.monotonic() - began < 30
        assert reply.status_code == 504 and reply.headers["x-should-retry"] == "false"
        assert reply.json()["error"]["code"] == "deadline_exceeded" and "1 s" in reply.json()["error"]["message"]
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert len(lines) > 3 and json.loads(lines[-1][6:])["error"]["code"] == "deadline_exceeded"
        links = [post_head(server, LONG) for _ in range(ROWS)]
        until(lambda: server.llm.stats().get("num_requests_running") == ROWS)
        began = time.monotonic()
        reply = post(server, LONG, **{"X-Request-Timeout": "0.2"})
        assert reply.status_code == 504 and time.monotonic() - began < 0.9 and "0.2 s" in reply.text
        stats = server.rest()
        assert stats["kv_cache_usage_perc"] == 0 and metric(server, "request_timeouts_total") == ROWS + 3
        for link in links:
            link.close()
        for wrong in ("soon", "-1", "nan", "inf", "0", "1" * 40):
            reply = post(server, LONG, **{"X-Request-Timeout": wrong})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "X-Request-Timeout"
        assert post(server, {**LONG, "max_tokens": 2}, **{"X-Request-Timeout": "100"}).status_code == 200


def test_one_keys_queue_is_not_anothers() -> None:
    async def main(url: str) -> tuple[float, int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            body = {**LONG, "max_tokens": 20}
            long = {**LONG, "max_tokens": 100}  # so long that clients on a busy machine send more than is served
            many = [
                asyncio.ensure_future(client.post("/v1/completions", json=long, headers=HEADS[0])) for _ in range(200)
            ]
            async with asyncio.timeout(30):
                while not server.llm.num_waiting:
                    await asyncio.sleep(0.01)
            began = time.monotonic()
            reply = await client.post("/v1/completions", json=body, headers=HEADS[1])
            took, left = time.monotonic() - began, sum(not task.done() for task in many)
            assert reply.status_code == 200
            for task in many:
                task.cancel()
            await asyncio.gather(*many, return_exceptions=True)
            return took, left

    with served(pace=0.03, sequences=400, keys=KEYS) as server:
        took, left = asyncio.run(main(server.url))
        assert left > 30, f"{left} of 200 were left after {took:.1f} s"  # first come, first served: a batch, at most


def test_a_key_leaves_room_for_others() -> None:
    with served(pace=0.05, sequences=20, keys=KEYS) as server:
        body = {**LONG, "n": 16, "temperature": 1, "max_tokens": 2}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=HEADS[0], timeout=30)
        assert reply.status_code == 200, "alone it may have nearly all"

        async def main() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                send = [client.post("/v1/completions", json=LONG, headers=HEADS[0]) for _ in range(20)]
                many = [asyncio.ensure_future(one) for one in send]
                done, _ = await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
                assert all(task.result().status_code == 429 for task in done)
                other = await client.post("/v1/completions", json={**LONG, "max_tokens": 2}, headers=HEADS[1])
                assert other.status_code == 200
                for task in many:
                    task.cancel()
                await asyncio.gather(*many, return_exceptions=True)

        asyncio.run(main())
        heads = {"Authorization": f"Bearer {KEYS[1]}"}
        assert (
            b'admission_rejections_total{model_name="toy",reason="key_share"} 0'
            not in httpx.get(f"{server.url}/metrics", headers=heads).content
        )


@pytest.mark.parametrize("stream", [False, True])
def test_the_pages_of_a_client_that_leaves_are_free_within_two_steps(stream: bool) -> None:
    """Steps are counted, not time: each takes a quarter of a second, and clients leave in the midst of one, first one
    that waits, then one that runs. A heartbeat may be a step old."""
    with served(pace=0.25) as server:
        links = [post_head(server, {**LONG, "stream": stream}) for _ in range(ROWS + 1)]
        until(lambda: server.llm.num_waiting == 1 and server.llm.stats()["num_steps"])
        for link, name, left in (
            (links.pop(), "num_requests_waiting", 0),
            (links.pop(0), "num_requests_running", ROWS - 1),
        ):
            before = server.llm.stats()["num_steps"]
            link.close()
            until(lambda name=name, left=left: server.llm.stats()[name] == left)  # type: ignore[misc]
            assert server.llm.stats()["num_steps"] <= before + 2 + 1
        before = server.llm.stats()["num_steps"]
        for link in links:
            link.close()
        stats = server.rest()
        assert stats["kv_cache_usage_perc"] == 0 and stats["num_steps"] <= before + 2 + 1


def test_connections_are_bounded_and_who_is_too_many_is_reported() -> None:
    with served(connections=3, pace=0.05) as server:
        links = [post_head(server, LONG) for _ in range(2)]
        assert httpx.get(f"{server.url}/health").status_code == 200
        links.append(post_head(server, LONG))
        until(lambda: server.llm.stats().get("num_requests_running") == 3)
        with httpx.Client(base_url=server.url) as client:
            reply = client.post("/v1/completions", json={"prompt": "x"})
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "too_many_connections"
        assert reply.headers["connection"] == "close" and reply.headers["retry-after"] == "1"
        for link in links:
            link.close()
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        assert metric(server, "admission_rejections_total", ',reason="connections"') >= 1


def test_the_limit_of_descriptors_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        assert set_descriptor_limit(200) == 200 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 392
        assert 1 <= set_descriptor_limit(None) <= 4096
        if hard != resource.RLIM_INFINITY:
            with pytest.raises(LlmcError, match="E667") as refusal:
                set_descriptor_limit(hard)
            assert str(hard) in refusal.value.cause
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_few_descriptors_are_shared_and_requested_limits_fit() -> None:
    for soft in (random.randrange(80, 300), 64, 256, 1024, 1 << 20):
        most, polite = allowed(soft)
        assert most >= 1 and 1 <= polite <= 64 and most + polite + 24 <= soft, (soft, most, polite)  # its own are 24
    assert allowed(256) == (96, 32) and allowed(4096 + 64 + 128) == (4096, 64)


def test_descriptors_never_run_out_however_many_come_at_once() -> None:
    """As many connections at a time as may wait for a while, to a server that may open 64 files."""
    command = Command("-c", LIMITED, "64", str(Path(__file__).with_name("serve_fake.py")), "0", "30")
    host, port = command.url.removeprefix("http://").split(":")
    links = [socket.socket() for _ in range(300)]
    for link in links:
        link.setblocking(False)
        link.connect_ex((host, int(port)))
    time.sleep(0.3)
    for link in links:
        link.close()
    until(lambda: httpx.get(f"{command.url}/health", timeout=20).status_code == 200)
    command.process.terminate()
    code, log = command.end()
    assert code == 0 and "ERROR" not in log and "at most 18 connections" in log, log[-2000:]


def unread(server: Served, body: dict[str, Any]) -> socket.socket:
    """A link whose response nobody reads."""
    host, port = server.url.removeprefix("http://").split(":")
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    link.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return link


SCORED = {**LONG, "stream": True, "n": 16, "temperature": 1, "logprobs": 20, "max_tokens": 240}


def test_a_stalled_reader_is_disconnected_and_delays_no_others() -> None:
    with served(sequences=64) as server:
        links = [unread(server, SCORED) for _ in range(2)]
        until(lambda: server.serving.admission.open_sequences == 32)
        assert post(server, {**LONG, "max_tokens": 5}).status_code == 200
        until(lambda: not server.llm.open_requests(), 15)
        assert server.rest()["kv_cache_usage_perc"] == 0
        for link in links:
            link.close()


@pytest.mark.parametrize("prompts", [1, 8])
def test_slow_readers_release_their_place_in_the_queue(monkeypatch: pytest.MonkeyPatch, prompts: int) -> None:
    """Their tokens are generated: what waits for the client is counted as its memory."""
    monkeypatch.setattr(Quick, "write_seconds", 120.0)
    with served(sequences=64) as server:
        admission = server.serving.admission
        links = [unread(server, {**SCORED, "prompt": [LONG["prompt"]] * prompts, "n": 16 // prompts}) for _ in range(2)]
        until(lambda: admission.open_sequences == 32)
        until(lambda: not admission.open_sequences, 60)
        assert admission.open_tokens == 0 and not admission.by_key.total()
        assert server.llm.open_requests(), "the responses are not sent"
        assert post(server, {**LONG, "temperature": 1, "n": 64, "max_tokens": 1}).status_code == 200
        for link in links:
            link.close()
        until(lambda: not server.llm.open_requests())
        assert admission.mean_output < 241


def test_health_is_that_of_the_engine() -> None:
    with served(heartbeat_timeout=1.0) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        pid = server.llm.engine_pid
        assert pid is not None
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        assert time.monotonic() - began < 30
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        assert server.llm.engine_pid != pid and post(server, {"prompt": "x"}).status_code == 200


def test_while_it_drains_streams_end_and_new_requests_are_refused() -> None:
    command = Command(str(Path(__file__).with_name("serve_fake.py")), "0.01", "30")
    body = {**LONG, "stream": True, "max_tokens": 100}

    async def stream(client: httpx.AsyncClient, begun: list[int]) -> str:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            last = ""
            async for line in reply.aiter_lines():
                begun.append(1) if not last else None
                last = line or last
        return last

    async def main() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=command.url, timeout=60, limits=limits) as client:
            begun: list[int] = []
            tasks = [asyncio.ensure_future(stream(client, begun)) for _ in range(50)]

            async def admitted() -> int:
                return sum(task.done() for task in tasks) + (await client.get("/load")).json()["server_load"]

            while len(begun) < ROWS or await admitted() < len(tasks):
                await asyncio.sleep(0.01)
            command.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            assert (await client.get("/ready")).status_code == 503 and (await client.get("/health")).status_code == 200
            reply = await client.post("/v1/completions", json=LONG)
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "shutting_down"
            assert "retry-after" in reply.headers
            return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == ["data: [DONE]"] * 50
    code, log = command.end()
    assert code == 0 and "Traceback" not in log, log


def test_texts_to_be_tokenized_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(server: Served) -> list[int]:
        release = asyncio.Event()

        async def in_thread(*args: Any) -> dict[str, Any]:
            while not release.is_set():  # of the client's loop
                await asyncio.sleep(0.01)
            return {}

        monkeypatch.setattr(server.serving.text_threads, "_in_thread", in_thread)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=limits) as client:
            tasks = [
                asyncio.ensure_future(client.post("/tokenize", json={"prompt": "x"})) for _ in range(MAX_TEXTS + 3)
            ]
            while sum(task.done() for task in tasks) < 3:
                await asyncio.sleep(0.01)
            release.set()
            return sorted(reply.status_code for reply in await asyncio.gather(*tasks))

    with served() as server:
        assert asyncio.run(main(server)) == [200] * MAX_TEXTS + [503] * 3
        assert httpx.post(f"{server.url}/tokenize", json={"prompt": "x"}).status_code == 200


def test_long_lists_of_tokens_are_counted_until_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:
        admission, body = server.serving.admission, {"prompt": "x" * 9000}
        monkeypatch.setattr(admission, "answers", 1000)
        unread = admission.reserve_response("", 1)
        assert httpx.post(f"{server.url}/tokenize", json=body, timeout=60).status_code == 503
        unread.close()
        assert httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["count"] == 9001
        until(lambda: not admission.answer_bytes.total())


def test_values_that_are_no_times_are_reported(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--request-timeout", "--max-queue-wait"):
        for wrong in ("-1", "nan", "1e9"):
            assert main_serve([str(toy), f"{flag}={wrong}"]) == 1
            assert "E668" in capsys.readouterr().err


def test_a_place_is_given_back_whatever_fails() -> None:
    with served(tokens=300) as server:
        wrong = {"prompt": [5, 10**6]}, {"prompt": "x" * 900, "max_tokens": 2}, {"prompt": "x", "cache_salt": "y" * 999}
        for body in (*wrong, {"prompt": "x", "temperature": 9e9}, {"prompt": "x", "stop": [""] * 9}):
            for stream in (False, True):
                assert post(server, {**body, "stream": stream}).status_code == 400
        chat = {"messages": [{"role": "nobody", "content": {}}]}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=chat).status_code == 400
        server.rest()
        with pytest.raises(ApiError):
            server.serving.call_resources("never")
