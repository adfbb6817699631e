"""The server under load: clients that leave, queues that are full, an engine that dies, figures, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
import httpx  # noqa: E402
from llmc_runtime.cli import main_serve  # noqa: E402

from tests.runtime.fake_core import CRASH  # noqa: E402
from tests.runtime.served import Served, served, until  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LONG: dict[str, Any] = {"prompt": [20, 30, 40], "max_tokens": 200, "ignore_eos": True, "temperature": 0, "seed": 7}


def metric(server: Served, name: str, labels: str = "") -> float:
    head = f'llmc:{name}{{model_name="toy"{labels}}}'
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith(head):
            return float(line.split()[-1])
    return 0.0


def post_head(server: Served, body: dict[str, Any]) -> socket.socket:
    """A request on its way, on a link that the caller closes."""
    host, port = server.url.removeprefix("http://").split(":")
    link = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    link.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return link


def test_the_load_counts_open_sequences_and_their_tokens() -> None:
    with served(pace=0.05) as server:
        load = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
        assert httpx.get(f"{server.url}/get_load").json() == [load]
        with post_head(server, LONG), post_head(server, LONG):
            until(lambda: server.serving.admission.open_sequences == 2)
            tokens = 2 * (len(LONG["prompt"]) + LONG["max_tokens"])
            assert httpx.get(f"{server.url}/get_load").json() == [load | {"num_reqs": 2, "num_tokens": tokens}]
        until(lambda: httpx.get(f"{server.url}/get_load").json() == [load])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    with served(pace=0.02) as server:
        links = [post_head(server, {**LONG, "stream": stream, "n": 1}) for _ in range(6)]
        until(lambda: server.llm.stats().get("num_requests_running") == 6)
        if stream:
            assert links[0].recv(15) == b"HTTP/1.1 200 OK"
        for link in links:
            link.close()
        until(lambda: not server.serving.admission.open_sequences, 2.0)
        stats = server.rest()
        assert stats["request_success"]["abort"] == 6 and stats["kv_cache_usage_perc"] == 0
        assert metric(server, "request_disconnects_total") == 6


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    with served(pace=0.02, sequences=4) as server:
        links = [post_head(server, LONG) for _ in range(4)]
        until(lambda: server.serving.admission.open_sequences == 4)
        began = time.monotonic()
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert time.monotonic() - began < 5
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "server_overloaded"
        assert reply.headers["retry-after"] == "1" and reply.headers["retry-after-ms"] == "1000"
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert metric(server, "admission_rejections_total", ',reason="queue_full"') >= 1
        too_many = httpx.post(f"{server.url}/v1/completions", json={"prompt": ["x"] * 5, "max_tokens": 1})
        for link in links:
            link.close()
        until(lambda: not server.serving.admission.open_sequences)
        too_many = httpx.post(f"{server.url}/v1/completions", json={"prompt": ["x"] * 5, "max_tokens": 1})
        assert too_many.status_code == 400
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 200


def test_a_key_has_its_share_and_others_theirs() -> None:
    keys = ("first-secret-key", "second-secret-key")
    heads = [{"Authorization": f"Bearer {key}"} for key in keys]
    with served(keys=keys, per_key=2) as server:
        for n, status in ((3, 429), (2, 200)):
            reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "n": n}, headers=heads[0])
            assert reply.status_code == status
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, headers=heads[1]).status_code == 200


def test_tokens_are_bounded_too() -> None:
    with served(tokens=100, pace=0.02) as server:
        link = post_head(server, {**LONG, "max_tokens": 80})
        until(lambda: server.serving.admission.open_tokens == 83)
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 60})
        assert reply.status_code == 503 and "retry-after" in reply.headers
        link.close()
        assert httpx.post(f"{server.url}/v1/completions", json=LONG).status_code == 400


def test_an_engine_that_dies_is_reported_to_streams_and_replaced() -> None:
    with served(pace=0.02) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: {")
            dying = httpx.post(f"{server.url}/v1/completions", json={**LONG, "prompt": [*CRASH, 9]}, timeout=30)
            assert dying.status_code == 503 and dying.json()["error"]["code"] == "engine_unavailable"
            last = [line for line in lines if line][-1]
        assert json.loads(last[6:])["error"]["code"] == "engine_unavailable"
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        assert httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=30).status_code == 200


def test_figures_add_up() -> None:
    with served() as server:
        for n in (1, 2):
            body = {**LONG, "temperature": 1, "max_tokens": 5, "n": n}
            assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        server.rest()
        assert metric(server, "generation_tokens_total") == metric(server, "request_generation_tokens_sum") == 15
        figures = httpx.get(f"{server.url}/metrics").text
        assert 'llmc:request_success_total{finished_reason="length",model_name="toy"} 3.0' in figures
        assert metric(server, "time_to_first_token_seconds_count") == 2
        assert metric(server, "e2e_request_latency_seconds_count") == 2
        assert "# TYPE llmc:num_requests_open gauge" in figures and "# TYPE llmc:restarts_total counter" in figures
        assert metric(server, "request_params_n_sum") == 3 and metric(server, "num_requests_running") == 0
        size = len(httpx.get(f"{server.url}/metrics").text.splitlines())
        for i in range(20):
            httpx.request(f"METHOD{i}", f"{server.url}/path{i}")
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "model": f"m{i}", f"f{i}": 1})
        assert len(httpx.get(f"{server.url}/metrics").text.splitlines()) - size <= 2


class Command:
    """llmc-serve as a process."""

    def __init__(self, *command: str, **environment: str) -> None:
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "runtime", ROOT / "tests")))
        env = {**os.environ, "PYTHONPATH": paths, **environment}
        self.process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True, env=env)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until(lambda: self.url or self.process.poll() is not None, 60)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def url(self) -> str:
        found = re.search(r" at (http[^\s\"]+)", "".join(self.lines))
        return found[1] if found else ""

    def end(self) -> tuple[int, str]:
        """Return the exit code and the output."""
        code = self.process.wait(30)
        self._reader.join(5)
        return code, "".join(self.lines)


@pytest.fixture
def command(toy: Path, tmp_path: Path) -> Iterator[Command]:
    keys = tmp_path / "keys"
    keys.write_text("from-a-file-1\n")
    code = "import sys; from llmc_runtime.cli import main_serve; sys.exit(main_serve())"
    given = ("--port", "0", "--api-key-file", str(keys), "--api-key-env", "MY_KEYS")
    one = Command("-c", code, str(toy), *given, MY_KEYS="from-a-variable-1")
    yield one
    if one.process.poll() is None:
        one.process.kill()


def test_the_command_serves_an_artifact_drains_and_ends_with_0(command: Command) -> None:
    assert httpx.get(f"{command.url}/v1/models").status_code == 401
    with openai.OpenAI(base_url=f"{command.url}/v1", api_key="from-a-file-1", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["toy"]
        chat = [{"role": "user", "content": "private words"}]
        got = client.chat.completions.create(model="toy", messages=chat, max_tokens=9, extra_body={"ignore_eos": True})
        assert got.choices[0].finish_reason == "length" and got.usage.completion_tokens == 9
    head = {"Authorization": "Bearer from-a-variable-1"}
    body = {"prompt": "abc", "stream": True, "max_tokens": 20, "ignore_eos": True, "stream_options": {}}
    with httpx.stream("POST", f"{command.url}/v1/completions", json=body, headers=head, timeout=30) as reply:
        lines = reply.iter_lines()
        next(lines)
        command.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    code, log = command.end()
    assert code == 0, log
    assert "private" not in log and "from-a" not in log and "Traceback" not in log


@pytest.mark.parametrize("signals", [1, 2])
def test_requests_that_do_not_end_in_time_are_reported(signals: int) -> None:
    """One signal and a shutdown timeout of one second, or two signals, the second of which ends the server at once."""
    command = Command(str(Path(__file__).with_name("serve_fake.py")), "0.05", "1" if signals == 1 else "60")
    began = time.monotonic()
    with httpx.stream("POST", f"{command.url}/v1/completions", json={**LONG, "stream": True}, timeout=30) as reply:
        lines = reply.iter_lines()
        next(lines)
        host, port = command.url.removeprefix("http://").split(":")
        idle = socket.create_connection((host, int(port)))
        for _ in range(signals):
            command.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        last = ""
        with contextlib.suppress(httpx.RemoteProtocolError):
            for line in lines:
                last = line or last
        assert last != "data: [DONE]"
        assert signals == 2 or json.loads(last[6:])["error"]["code"] == "engine_unavailable"
    idle.close()
    code, log = command.end()
    assert code == 0 and time.monotonic() - began < 8, log


def test_errors_of_the_start_are_reported(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main_serve([str(toy), "--port", str(taken.getsockname()[1])]) == 1
    assert "E646" in capsys.readouterr().err
    assert main_serve([str(toy), "--api-key-env", "NOBODY_SET_THIS"]) == 1
    assert "E647" in capsys.readouterr().err
    assert main_serve(["nowhere.llmc", "--port", "0"]) == 1
    assert "E101" in capsys.readouterr().err


def test_the_description_names_every_route(tmp_path: Path) -> None:
    with served() as server:
        document = httpx.get(f"{server.url}/openapi.json").json()
        assert document["openapi"].startswith("3.1")
        for path, methods in document["paths"].items():
            for method in methods:
                assert httpx.request(method, server.url + path.replace("{name}", "toy")).status_code != 405
        fields = document["components"]["schemas"]["ChatRequest"]["properties"]
        assert {"messages", "top_logprobs", "max_completion_tokens", "structured_outputs"} <= fields.keys()
        request = httpx.post(f"{server.url}/v1/embeddings", json={}).json()
        assert request.keys() == document["components"]["schemas"]["Error"]["properties"].keys()


def test_many_clients_come_and_go_and_nothing_is_left() -> None:
    async def one(client: httpx.AsyncClient, i: int) -> None:
        try:
            body = {**LONG, "stream": i % 2 == 0, "max_tokens": 30, "prompt": [20 + i] * 9}
            await asyncio.wait_for(client.post("/v1/completions", json=body), 0.02 * (i % 30))
        except (TimeoutError, httpx.HTTPError):
            return

    async def all_of(server: Served) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            await asyncio.gather(*(one(client, i) for i in range(60)))

    with served(pace=0.002) as server:
        asyncio.run(all_of(server))
        until(lambda: not server.serving.admission.open_sequences)
        assert server.rest()["kv_cache_usage_perc"] == 0
