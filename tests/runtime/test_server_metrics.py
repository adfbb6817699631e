"""/metrics: all names, consistent and monotonic counters, an alias, and no text of clients."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.metrics import COMPILE_SECONDS, STEP_TOKENS, Histogram, add_stats
from llmc_runtime.server.http.auth import key_id
from llmc_runtime.server.operations.admission import REASONS
from llmc_runtime.server.operations.metrics_exporter import _TEXT_SECONDS, ServerMetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.served import Served, served, until
from tests.runtime.test_server_load import LONG, post_head

NAMES = """
gauge num_requests_running num_requests_waiting num_requests_waiting_by_reason num_requests_open kv_cache_usage_perc
gauge cache_config_info startup_time_seconds step_token_budget num_state_snapshots
counter prompt_tokens prompt_tokens_cached generation_tokens request_success num_preemptions prefix_cache_queries
counter prefix_cache_hits admission_rejections request_disconnects request_timeouts request_unknown_fields restarts
counter num_aborted_requests scheduler_idle_seconds runtime_compiles num_steps num_scheduled_tokens
counter state_snapshots_saved
histogram time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
histogram e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds iteration_tokens_total
histogram request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens
histogram request_max_num_generation_tokens request_prefill_kv_computed_tokens
histogram request_params_n request_params_max_tokens grammar_compilation_time_seconds
"""

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"

Samples = dict[tuple[str, str], float]


def test_the_page_lists_every_metric_and_reason_of_refusal() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = [name for line in NAMES.split("\n") for name in line.split()[1:]]
    assert [name for name in (*names, *REASONS) if f"`{name}`" not in page] == []


def families(text: str, prefix: str = "llmc:") -> Iterator[Any]:
    for family in text_string_to_metric_families(text):
        if family.name.startswith(prefix):
            yield family


def samples(text: str, kinds: tuple[str, ...] = ("counter", "histogram", "gauge")) -> Samples:
    found: Samples = {}
    for family in families(text):
        for one in family.samples if family.type in kinds else ():
            labels = ",".join(f"{k}={v}" for k, v in sorted(one.labels.items()) if k != "model_name")
            assert one.labels["model_name"] == "toy" and (one.name[5:], labels) not in found
            found[one.name[5:], labels] = one.value
    return found


def scrape(server: Served, *kinds: str) -> Samples:
    reply = httpx.get(f"{server.url}/metrics")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
    return samples(reply.text, kinds or ("counter", "histogram", "gauge"))


def complete(server: Served, **fields: Any) -> None:
    reply = httpx.post(f"{server.url}/v1/completions", json={**LONG, **fields}, timeout=30)
    assert reply.status_code == 200, reply.text


def test_every_name_is_there_from_the_beginning_with_its_kind() -> None:
    with served(alias="vllm") as server:
        text = httpx.get(f"{server.url}/metrics").text
        kinds = {family.name[5:]: family.type for family in families(text)}
        for line in NAMES.split("\n"):
            kind, *names = line.split() or [""]
            assert {name: kinds.get(name) for name in names} == dict.fromkeys(names, kind)
        found = samples(text)
        assert found["runtime_compiles_total", ""] == 0
        stages = {labels for name, labels in found if name == "startup_time_seconds"}
        assert {"stage=total", "stage=process"} <= stages and found["startup_time_seconds", "stage=total"] > 0
        assert any(name == "cache_config_info" and "block_size=4" in labels for name, labels in found)
        reasons = {labels for name, labels in found if name == "num_requests_waiting_by_reason"}
        assert reasons == {"reason=capacity", "reason=deferred"}
        mine, other = ([line for line in text.splitlines() if p in line.split("{")[0]] for p in ("llmc:", "vllm:"))
        assert [line.replace("llmc:", "vllm:") for line in mine] == other and len(mine) > 100
        assert len(helps := re.findall(r"^# HELP (\S+)", text, re.M)) == len(set(helps))  # Prometheus' rule
        for name, description in re.findall(r"^# HELP (\S+) (.*)", text, re.M):
            assert name[5:].removesuffix("_total") not in description and len(description.split()) > 1
        own = {family.name: family.samples[0].value for family in families(text, "process_")}
        assert own["process_resident_memory_bytes"] > 1 << 20 and own["process_cpu_seconds"] > 0
        info = httpx.get(f"{server.url}/server_info").json()
        assert info["models"] == ["toy", "other"] and info["max_model_len"] == server.serving.llm.config.max_model_len
        kind = httpx.get(f"{server.url}/model_info").json()
        assert kind == {"model_path": "toy", "is_generation": True} and info["served_model_name"] == "toy"
        for path in ("server_info", "model_info"):
            assert httpx.get(f"{server.url}/get_{path}").json() == httpx.get(f"{server.url}/{path}").json()
        head = httpx.head(f"{server.url}/metrics")
        assert head.status_code == 200 and not head.content


def test_an_alias_changes_only_names() -> None:
    metrics = ServerMetrics("llmc:toy", lambda: {"num_steps": 3}, alias="vllm")
    lines = [line for line in metrics.text().decode().splitlines() if "num_steps_total" in line and line[0] != "#"]
    assert lines == [
        'llmc:num_steps_total{model_name="llmc:toy"} 3.0',
        'vllm:num_steps_total{model_name="llmc:toy"} 3.0',
    ]


def test_times_of_the_engine_and_the_front_add_up() -> None:
    with served(pace=0.02) as server:
        for n in (1, 2):
            complete(server, temperature=1, max_tokens=10, n=n)
        server.rest()
        found = scrape(server)
        for name in ("queue", "prefill", "decode", "inference"):
            assert found[f"request_{name}_time_seconds_count", ""] == 2
        queue, prefill, decode, inference = (
            found[f"request_{name}_time_seconds_sum", ""] for name in ("queue", "prefill", "decode", "inference")
        )
        assert (
            inference == pytest.approx(prefill + decode)
            and queue + inference < found["e2e_request_latency_seconds_sum", ""]
        )
        assert found["request_generation_tokens_sum", ""] == 30
        assert found["request_max_num_generation_tokens_sum", ""] == 20
        assert 2 * 0.02 <= prefill < 20 and 2 * 8 * 0.02 < decode < 20
        mean = found["request_time_per_output_token_seconds_sum", ""] / 2
        assert 0.015 < mean < 2 and found["request_time_per_output_token_seconds_count", ""] == 2
        assert found["iteration_tokens_total_count", ""] == found["num_steps_total", ""]
        assert found["iteration_tokens_total_sum", ""] == found["num_scheduled_tokens_total", ""]
        assert found["iteration_tokens_total_bucket", "le=+Inf"] == found["num_steps_total", ""]
        idle = found["scheduler_idle_seconds_total", ""]
        until(lambda: scrape(server)["scheduler_idle_seconds_total", ""] > idle + 0.3, 5)


def test_prompt_tokens_from_the_cache_are_not_computed() -> None:
    with served() as server:
        for _ in range(2):
            complete(server, prompt=[*range(5, 14)], max_tokens=1)
            server.rest()
        found = scrape(server)
        assert found["request_prompt_tokens_sum", ""] == 18 and found["prompt_tokens_cached_total", ""] == 8
        assert found["request_prefill_kv_computed_tokens_sum", ""] == 10
        assert found["request_prefill_kv_computed_tokens_count", ""] == 2


def test_a_request_that_waits_is_reported_so() -> None:
    with served(pace=0.02) as server:
        links = [post_head(server, {**LONG, "max_tokens": 20}) for _ in range(40)]
        until(lambda: scrape(server)["num_requests_waiting_by_reason", "reason=capacity"] > 0)
        for link in links:
            assert link.recv(20)
            link.close()
        until(lambda: not server.serving.admission.open_sequences)
        found = scrape(server)
        assert (
            found["request_queue_time_seconds_sum", ""] > 24 * 0.3
            and found["request_success_total", "finished_reason=length"] == 40
        )


def test_ends_are_those_that_clients_see() -> None:
    with served(pace=0.01) as server:  # slow enough that the last request is still running when its client leaves
        whole = httpx.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 50}).json()["choices"][0]["text"]
        complete(server, max_tokens=50, stop=[whole[4:8]])
        link = post_head(server, LONG)
        until(lambda: scrape(server)["num_requests_running", ""] == 1)
        link.close()
        server.rest()
        found = scrape(server)
        ends = {
            labels.split("=")[1]: value for (name, labels), value in found.items() if name == "request_success_total"
        }
        assert ends == {"length": 1, "stop": 1, "abort": 1, "error": 0}
        assert found["num_aborted_requests_total", ""] == found["request_disconnects_total", ""] == 1


def test_counters_go_on_when_the_engine_is_replaced() -> None:
    with served(pace=0.002) as server:
        for _ in range(3):
            complete(server, max_tokens=30)
        server.rest()
        before = scrape(server, "counter", "histogram")
        assert before["generation_tokens_total", ""] == 90
        assert server.llm.engine_pid is not None
        os.kill(server.llm.engine_pid, signal.SIGKILL)

        def replaced() -> bool:
            now = scrape(server, "counter", "histogram")
            assert all(now.get(name, -1.0) >= value for name, value in before.items()), "a counter went down"
            return now["restarts_total", ""] == 1 and httpx.get(f"{server.url}/ready").status_code == 200

        until(replaced)
        complete(server, max_tokens=30)
        server.rest()
        after = scrape(server)
        assert after["generation_tokens_total", ""] == 120 and after["num_requests_running", ""] == 0
        assert (
            after["iteration_tokens_total_count", ""]
            == after["num_steps_total", ""]
            >= before["num_steps_total", ""] + 30
        )
        assert after["startup_time_seconds", "stage=total"] > 0


def test_no_text_of_a_client_becomes_a_label() -> None:
    with served() as server:
        size = len(scrape(server))
        for i in range(20):
            httpx.request(f"METHOD{i}", f"{server.url}/path{i}")
            body = {"prompt": f"words{i}", "model": f"m{i}", f"f{i}": 1, "max_tokens": 1}
            httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": f"id{i}"})
        text = httpx.get(f"{server.url}/metrics").text
        assert len(samples(text)) == size and not re.search(r"METHOD|path\d|words|m\d|id\d", text)


def test_a_grammar_has_its_time() -> None:
    pytest.importorskip("llguidance")
    with served() as server:
        complete(server, max_tokens=9, structured_outputs={"regex": "[ab]{3}"}, ignore_eos=False)
        server.rest()
        found = scrape(server)
        assert found["grammar_compilation_time_seconds_count", ""] == 1
        assert 0 < found["grammar_compilation_time_seconds_sum", ""] < 10


def test_figures_of_several_engines_are_added_but_for_gauges() -> None:
    sketch = Histogram(COMPILE_SECONDS)
    for value in (0.0005, 0.3, 0.5, 99.0):
        sketch.add(value)
    result = sketch.as_list()
    assert (
        result[0] == pytest.approx(99.8005)
        and sum(result[1:]) == 4
        and result[-1] == 1
        and result[1 + COMPILE_SECONDS.index(0.5)] == 2
    )
    past = {
        "a": 2,
        "b": {"x": 1},
        "c": result,
        "num_requests_running": 7,
        "num_requests_waiting_by_reason": {"capacity": 3},
    }
    now = {"a": 3, "b": {"x": 1, "y": 2}, "c": result, "num_requests_running": 1}
    both = add_stats(past, now)
    assert both["a"] == 5 and both["b"] == {"x": 2, "y": 2} and both["num_requests_running"] == 1
    assert both["c"] == [2 * one for one in result] and both["num_requests_waiting_by_reason"] == {"capacity": 0}
    assert add_stats(past, {})["num_requests_running"] == 0 and len(STEP_TOKENS) == 13


def test_usage_is_counted_by_the_names_of_keys() -> None:
    keys = {"a-key-of-team-a": "team-a", "another-of-team-a": "team-a", "a-key-of-team-b": "team-b"}
    names = {key_id(key): name for key, name in keys.items()}
    with served(keys=list(keys), names=names, key_scope="all-but-metrics") as server:
        want = {"requests": 2, "prompt_tokens": 24, "prompt_tokens_cached": 0, "generation_tokens": 9}
        for i, (key, n) in enumerate(zip(keys, (1, 2))):
            body = {"prompt": [i + 5] * 12, "max_tokens": 3, "ignore_eos": True, "n": n}
            head = {"Authorization": f"Bearer {key}"}
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers=head, timeout=30).status_code == 200
        found = {pair: value for pair, value in scrape(server).items() if pair[0].startswith("key_")}
        assert found == {
            (f"key_{name}_total", f"key={team}"): number if team == "team-a" else 0
            for name, number in want.items() for team in ("team-a", "team-b")
        }  # fmt: skip
    with served() as server:
        assert not any(name.startswith("key_") for name, _ in scrape(server))


def test_figures_of_thousands_of_keys_are_made_in_steps() -> None:
    names = {f"id {number}": f"customer-{number}" for number in range(2500)}
    metrics = ServerMetrics("toy", dict, alias="vllm", key_names=names)
    metrics.count_for_key("id 2400", "key_requests", 7)
    assert max(part.count(b"\n") for part in metrics._parts()) < 200, "lines that are made without a pause"
    text = metrics.text().decode()
    for prefix in ("llmc", "vllm"):
        assert text.count(f"# TYPE {prefix}:key_requests_total counter") == 1
        lines = [line for line in text.splitlines() if line.startswith(f"{prefix}:key_requests_total{{")]
        assert len(set(lines)) == len(names)
        assert f'{prefix}:key_requests_total{{key="customer-2400",model_name="toy"}} 7.0' in lines
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))


def test_many_requests_for_the_metrics_share_few_texts() -> None:
    """A text takes the event loop 5 ms: requests one after the other, and at the same time, wait for the next one."""

    async def main() -> None:
        metrics, begun, values = ServerMetrics("toy", dict), list[float](), itertools.count()

        def parts() -> Iterator[bytes]:
            begun.append(time.monotonic())
            yield b"%d" % next(values)

        metrics._parts = parts  # type: ignore[method-assign]
        first = await metrics.shared_text()
        same = set(await asyncio.gather(*(metrics.shared_text() for _ in range(100))))
        assert first == b"0" and same == {b"1"}, "those that wait share a text, which begins after they came"
        assert [await metrics.shared_text() for _ in range(3)] == [b"2", b"3", b"4"]
        pauses = [later - earlier for earlier, later in itertools.pairwise(begun)]
        assert len(begun) == 5 and min(pauses) > 0.9 * _TEXT_SECONDS

    asyncio.run(main())
