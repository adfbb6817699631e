"""The dashboard and the alerts of docs/deploying.md: every query answered by a Prometheus that scrapes llmc-serve, and
the file compared with the schema that Grafana publishes."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit import ROOT, Server, serving

DEPLOY = ROOT / "examples" / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
UNPACKED = ROOT / "build" / "clients" / "prometheus" / "usr" / "bin"
NODE = ROOT / "build" / "clients" / "node"
SCRAPES = 4  # while there is traffic; Prometheus scrapes every second
# What Grafana puts in place of variables: those of the dashboard, and the interval of rates.
VARIABLES = {"$model": ".*", "$__rate_interval": "60s", "${datasource}": "prometheus"}
# The metrics that vLLM's own dashboard (examples/observability/prometheus_grafana) reads.
VLLM_HISTOGRAMS = (
    "e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds",
    "request_prompt_tokens", "request_generation_tokens", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_max_num_generation_tokens",
)  # fmt: skip
VLLM_COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
VLLM_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def program(name: str) -> Path:
    """prometheus or promtool, of the machine or as `make clients-setup` unpacked them."""
    found = UNPACKED / name if (UNPACKED / name).exists() else shutil.which(name)
    assert found, f"{name} is needed, and was not found (Debian: apt-get install prometheus)"
    return Path(found)


def promtool(*words: str | Path) -> str:
    """Return promtool's output, which must report no error."""
    command = [program("promtool"), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its HTTP API."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as r:
            body = json.loads(r.read())
        assert body["status"] == "success" and not body.get("warnings"), body
        return body["data"]

    def values(self, expression: str) -> list[float]:
        """One value for each series that the expression has now."""
        return [float(one["value"][1]) for one in self.get("query", query=expression)["result"]]


@contextmanager
def scraping(server: Server, room: Path) -> Iterator[Prometheus]:
    """A Prometheus with the configuration of examples/deploy, but for the target and the interval."""
    text = (DEPLOY / "prometheus.yaml").read_text()
    assert "scrape_interval: 15s" in text and '"llmc:8000"' in text
    text = text.replace("scrape_interval: 15s", "scrape_interval: 1s")
    (room / "prometheus.yaml").write_text(text.replace("llmc:8000", server.url.removeprefix("http://")))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listen = f"127.0.0.1:{port}"
    command = [program("prometheus"), f"--config.file={room}/prometheus.yaml", f"--storage.tsdb.path={room}/data"]
    process = subprocess.Popen([*command, f"--web.listen-address={listen}"], stderr=(room / "log").open("w"))
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://{listen}/-/ready", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, (room / "log").read_text()
                time.sleep(0.2)
        else:
            raise AssertionError((room / "log").read_text())
        yield Prometheus(f"http://{listen}")
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def scraped(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Prometheus]]:
    """A server with traffic, and the Prometheus that scrapes it."""
    options = ("--api-key-scope", "all-but-metrics", "--metrics-alias", "vllm")
    with serving(keys, *options) as server, scraping(server, tmp_path_factory.mktemp("prometheus")) as prometheus:
        for request in itertools.count():
            end = {"max_tokens": 8} if request % 2 else {"max_tokens": 80, "stop": ["e"]}
            server.post("/v1/completions", {"model": server.model, "prompt": "Once upon a time", **end})
            if max(prometheus.values("sum_over_time(up[60s])"), default=0) >= SCRAPES:
                break
        yield server, prometheus


def replaced(expression: str) -> str:
    """An expression as Grafana sends it."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def alerts() -> list[str]:
    """The expressions in the table of alerts of docs/deploying.md."""
    page = (ROOT / "docs" / "deploying.md").read_text()
    table = page.split("| alert | expression |\n", 1)[1].split("\n\n", 1)[0]
    return re.findall(r"\| `([^`]+)`", table)


def test_promtool_accepts_the_configuration_the_alerts_and_the_metrics(
    scraped: tuple[Server, Prometheus], tmp_path: Path
) -> None:
    assert "SUCCESS" in promtool("check", "config", DEPLOY / "prometheus.yaml")
    assert len(alerts()) >= 5
    rules = [{"alert": f"a{i}", "expr": expression} for i, expression in enumerate(alerts())]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "llmc", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", tmp_path / "rules.yaml")
    with urllib.request.urlopen(scraped[0].url + "/metrics", timeout=30) as reply:
        text = reply.read().decode()
    # promtool also has an opinion on names; these are vLLM's.
    command = [program("promtool"), "check", "metrics"]
    ended = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    opinions = ("should not contain ':'", 'iteration_tokens_total non-counter metrics should not have "_total" suffix')
    faults = [line for line in (ended.stdout + ended.stderr).splitlines() if not line.endswith(opinions)]
    assert text.count("\n# TYPE vllm:") == text.count("\n# TYPE llmc:") > 40 and not faults, faults


def test_prometheus_answers_every_query_of_the_dashboard(scraped: tuple[Server, Prometheus]) -> None:
    """Counters of requests and tokens, histograms and gauges have values; those of rare events have a series."""
    _, prometheus = scraped
    assert all(target["health"] == "up" for target in prometheus.get("targets")["activeTargets"])
    moved = 0
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            found = prometheus.values(replaced(target["expr"]))
            assert found, (panel["title"], target["expr"])
            moved += any(math.isfinite(value) and value > 0 for value in found)
    assert moved >= 15, moved
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()
            assert prometheus.get(f"label/{label}/values", **{"match[]": metric}), variable


def test_prometheus_answers_the_alerts(scraped: tuple[Server, Prometheus]) -> None:
    """With the comparison each is quiet; without it there is a value to compare."""
    for expression in alerts():
        assert scraped[1].values(expression) == [], expression
        assert scraped[1].values(expression.rsplit(" > ", 1)[0]), expression


def test_metrics_of_vllms_dashboard_exist_under_the_alias(scraped: tuple[Server, Prometheus]) -> None:
    _, prometheus = scraped
    models = prometheus.get("label/model_name/values")
    assert models
    where = f'{{model_name="{models[0]}"}}'
    for name in VLLM_HISTOGRAMS:
        (value,) = prometheus.values(f"histogram_quantile(0.9, sum by (le) (rate(vllm:{name}_bucket{where}[60s])))")
        assert math.isfinite(value), name
        assert prometheus.values(f"rate(vllm:{name}_sum{where}[60s]) / rate(vllm:{name}_count{where}[60s])"), name
    for name in VLLM_COUNTERS:
        assert max(prometheus.values(f"rate(vllm:{name}{where}[60s])")) > 0, name
    for name in VLLM_GAUGES:
        assert prometheus.values(f"vllm:{name}{where}"), name
    reasons = prometheus.get("query", query="sum by (finished_reason) (increase(vllm:request_success_total[60s]))")
    assert {"length", "stop"} <= {one["metric"]["finished_reason"] for one in reasons["result"]}


def typed(dashboard: Any, room: Path) -> subprocess.CompletedProcess[str]:
    """tsc's verdict on a dashboard as a value of Grafana's published type."""
    file = room / "dashboard.ts"
    file.write_text(
        f'import type {{ Dashboard }} from "@grafana/schema";\nexport const d: Dashboard = {json.dumps(dashboard)};\n'
    )
    (room / "node_modules").exists() or (room / "node_modules").symlink_to(NODE / "node_modules")
    options = ("--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler")
    command = [NODE / "node_modules" / ".bin" / "tsc", *options, file]
    return subprocess.run(command, cwd=room, capture_output=True, text=True, timeout=120)


def test_the_dashboard_has_the_type_that_grafana_publishes(tmp_path: Path) -> None:
    good = typed(DASHBOARD, tmp_path)
    assert good.returncode == 0, good.stdout
    wrong = json.loads(json.dumps(DASHBOARD))
    wrong["panels"][0]["gridPos"]["width"] = 3
    bad = typed(wrong, tmp_path)
    assert bad.returncode != 0 and "width" in bad.stdout
