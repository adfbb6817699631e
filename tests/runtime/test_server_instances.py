"""The server with several engines: figures with the label `engine`, health, an engine that dies, administration."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.host_info import usable_cpus

from tests.runtime.served import Served, served, until
from tests.runtime.test_server_load import LONG, post_head
from tests.runtime.test_server_metrics import Samples, samples

KEY = "an-admin-key"
ADMIN = {"Authorization": f"Bearer {KEY}"}


def scrape(server: Served) -> Samples:
    return samples(httpx.get(f"{server.url}/metrics").text)


def complete(server: Served, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 6, **fields}, timeout=30)


def test_each_engine_has_its_figures_and_the_server_has_totals() -> None:
    with served(data_parallel_size=2, alias="vllm") as server:
        for i in range(6):
            assert complete(server, prompt=[50 + i] * 12).status_code == 200
        until(lambda: server.llm.stats()["request_success"]["length"] == 6)
        found = scrape(server)
        tokens = [found["generation_tokens_total", f"engine={i}"] for i in (0, 1)]
        assert sum(tokens) == found["request_generation_tokens_sum", ""] == 36 and min(tokens) >= 12
        assert found["request_success_total", "finished_reason=length"] == 6
        assert found["num_requests_running", "engine=0"] == found["num_requests_running", "engine=1"] == 0
        assert ("num_requests_waiting_by_reason", "engine=1,reason=capacity") in found
        assert found["iteration_tokens_total_count", "engine=1"] > 0
        assert found["startup_time_seconds", "engine=1,stage=total"] > 0
        assert sum(name == "cache_config_info" for name, _ in found) == 2
        assert not any(labels == "" for name, labels in found if name in ("restarts_total", "num_steps_total"))
        assert 'vllm:restarts_total{engine="1",model_name="toy"} 0.0' in httpx.get(f"{server.url}/metrics").text
        assert httpx.get(f"{server.url}/server_info").json()["data_parallel_size"] == 2


def test_one_engine_has_no_label() -> None:
    with served() as server:
        text = httpx.get(f"{server.url}/metrics").text
        assert "engine=" not in text and re.search(r'llmc:restarts_total\{model_name="toy"\}', text)
        assert httpx.get(f"{server.url}/server_info").json()["data_parallel_size"] == 1


def test_a_killed_engine_ends_only_its_own_requests() -> None:
    with served(pace=0.02, data_parallel_size=2, admin_keys=[KEY], restart_delay=1.0) as server:
        links = [post_head(server, {**LONG, "prompt": [60 + i] * 9, "max_tokens": 60}) for i in range(4)]
        until(lambda: [len(one.outputs) for one in server.llm.engines] == [2, 2])
        state = httpx.get(f"{server.url}/admin/state", headers=ADMIN).json()
        assert [one["requests"] for one in state["engines"]] == [2, 2]
        assert sorted(one["engine"] for one in state["requests"]) == [0, 0, 1, 1]
        server.llm.engines[1].startup = {"total": 30.0}
        os.kill(state["engines"][1]["pid"], signal.SIGKILL)
        until(lambda: server.llm.engines[1].state == "starting")
        assert httpx.get(f"{server.url}/health").status_code == httpx.get(f"{server.url}/ready").status_code == 200
        assert complete(server).status_code == 200
        answers = sorted(link.recv(65536) for link in links)
        assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * 2 + [b"HTTP/1.1 503"] * 2
        assert all(b"retry-after: 1\r\n" in answer.lower() for answer in answers[2:])  # the other engine is ready
        until(lambda: server.llm.engines[1].state == "ready")
        found = scrape(server)
        assert found["restarts_total", "engine=0"] == 0 and found["restarts_total", "engine=1"] == 1
        assert found["num_requests_open", "engine=1"] == 0
        until(
            lambda: (
                complete(server, prompt=[1 + os.urandom(1)[0] + 10] * 9) and server.llm.engines[1].stats()["num_steps"]
            )
        )
        assert httpx.post(f"{server.url}/admin/reset_prefix_cache", headers=ADMIN).json() == {"reset": True}
        assert httpx.get(f"{server.url}/admin/trace?seconds=0.1", headers=ADMIN).status_code == 200


def test_all_down_is_503() -> None:
    with served(pace=0.02, data_parallel_size=2, restart_delay=1.0) as server:
        for engine in server.llm.engines:
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
        until(lambda: not server.llm.is_running)
        assert httpx.get(f"{server.url}/health").status_code == 503
        reply = complete(server)
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_unavailable"
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        assert complete(server).status_code == 200


def restart(server: Served, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/admin/restart", json=fields, headers=ADMIN, timeout=60)


def test_engines_are_restarted_one_at_a_time_while_the_others_serve() -> None:
    with served(pace=0.01, data_parallel_size=2, admin_keys=[KEY]) as server, ThreadPoolExecutor(8) as pool:
        before, done = [one.pid for one in server.llm.engines], threading.Event()

        def ask(number: int) -> int:
            """Ask until the restart has ended; return the number of answers."""
            answers = 0
            while not done.is_set():
                assert complete(server, prompt=[60 + number] * 9, max_tokens=30).status_code == 200
                answers += 1
            return answers

        asking = [pool.submit(ask, i) for i in range(6)]
        until(lambda: min(len(one.outputs) for one in server.llm.engines) > 0)
        again = pool.submit(restart, server)
        until(lambda: "starting" in [one.state for one in server.llm.engines])
        assert restart(server).status_code == 409
        assert again.result().json() == {"restarted": [0, 1]}
        done.set()
        assert all(one.result() > 0 for one in asking)
        after = [one.pid for one in server.llm.engines]
        assert not {*before} & {*after} and server.llm.restarts == 0 and server.llm.state == "ready"
        assert restart(server, engine=1).json() == {"restarted": [1]} and server.llm.engines[0].pid == after[0]
        assert restart(server, engine=2).status_code == restart(server, drain=-1).status_code == 400
        misspelled = restart(server, engines=[1])
        assert misspelled.status_code == 400 and "there are: engine, drain" in misspelled.json()["error"]["message"]


def test_a_restart_of_the_only_engine_refuses_requests_and_ends_those_that_take_too_long() -> None:
    with served(pace=0.02, admin_keys=[KEY]) as server, ThreadPoolExecutor(2) as pool:
        tokens = server.llm.stats()["generation_tokens"]
        slow = pool.submit(complete, server, max_tokens=190)
        until(lambda: len(server.llm.engines[0].outputs) == 1)
        again = pool.submit(restart, server, drain=0.5)
        until(lambda: not server.llm.is_running)
        assert complete(server).status_code == httpx.get(f"{server.url}/ready").status_code == 503
        assert slow.result().status_code == 503 and again.result().json() == {"restarted": [0]}
        assert complete(server).status_code == 200
        until(lambda: server.llm.stats()["generation_tokens"] > tokens + 6)  # those of the first process count


@pytest.mark.parametrize(
    ("value", "says"), [("0", "at least 1"), ("-1", "at least 1"), ("x", "at least 1"), ("99", "1 to 64")]
)
def test_wrong_numbers_are_one_error(value: str, says: str, toy: Any) -> None:
    done = subprocess.run(
        _serve(str(toy), f"--data-parallel-size={value}", "--dry-run"), capture_output=True, text=True
    )
    assert done.returncode in (1, 2) and says in done.stderr and "Traceback" not in done.stderr


def _serve(*words: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from llmc_runtime.cli import main_serve; sys.exit(main_serve())", *words]


def test_a_dry_run_counts_the_engines(toy: Any) -> None:
    if usable_cpus() < 2:
        pytest.skip("two engines need two CPUs")
    done = subprocess.run(_serve(str(toy), "-dp", "2", "--dry-run", "--json"), capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["data_parallel_size"] == 2 and report["fits"] is True
    many = subprocess.run(_serve(str(toy), "-dp", str(usable_cpus() + 1), "--dry-run"), capture_output=True, text=True)
    assert many.returncode == 1 and "E201" in many.stderr and f"at most {usable_cpus()}" in many.stderr
