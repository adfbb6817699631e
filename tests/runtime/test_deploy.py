"""The files in examples/deploy: the flags, routes and metrics that they name exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
import yaml
from llmc_runtime.server.server_options import serve_parser

from tests.runtime.served import served
from tests.runtime.test_server_metrics import families

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
ROUTES = ("/health", "/ready", "/metrics")
PROMQL = r"\b(llmc:\w+)"


def container_args() -> dict[str, list[str]]:
    """The arguments of llmc-serve in each file."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    unit = re.findall(r"^ExecStart=\S+/llmc-serve (.*)$", (DEPLOY / "llmc-serve.service").read_text(), re.M)
    (command,) = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.M)
    return {
        "compose.yaml": compose["services"]["llmc"]["command"],
        "kubernetes.yaml": deployment["spec"]["template"]["spec"]["containers"][0]["args"],
        "llmc-serve.service": shlex.split(unit[0]),
        "Dockerfile": json.loads(command),
    }


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml", "llmc-serve.service", "Dockerfile"])
def test_the_flags_exist_and_the_port_is_the_one_that_is_opened(name: str) -> None:
    args = serve_parser().parse_args(container_args()[name])
    assert args.port == 8000 and args.host == "0.0.0.0" and args.model.endswith("/model.llmc")


def test_probes_name_routes_that_need_no_key() -> None:
    named = {m for p in DEPLOY.iterdir() for m in re.findall(r"(?<=path: )/\w+|8000(/\w+)", p.read_text())}
    named |= set(re.findall(r"path: (/[a-z]+)", (DEPLOY / "kubernetes.yaml").read_text()))
    with served() as server:
        for path in named - {""}:
            assert path in ROUTES and httpx.get(server.url + path).status_code == 200, path


def exprs(value: Any) -> list[str]:
    """All PromQL texts of a dashboard."""
    if isinstance(value, dict):
        own = [v for k, v in value.items() if k in ("expr", "query") and isinstance(v, str)]
        return own + [e for v in value.values() for e in exprs(v)]
    return [e for v in value for e in exprs(v)] if isinstance(value, list) else []


def missing(dashboard: Any, text: str, gauges: Iterable[str] = ()) -> set[str]:
    """The metrics of a dashboard that neither the text of /metrics nor `gauges` has."""
    known = {s.name for family in families(text) for s in family.samples} | {f"llmc:{name}" for name in gauges}
    return {name for e in exprs(dashboard) for name in re.findall(PROMQL, e)} - known


def test_every_metric_of_the_dashboard_exists() -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    assert len(dashboard["panels"]) >= 10 and len({p["id"] for p in dashboard["panels"]}) == len(dashboard["panels"])
    named = {name for e in exprs(dashboard) for name in re.findall(PROMQL, e)}
    assert len(named) >= 20
    with served() as server:
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5, 6], "max_tokens": 3}, timeout=30)
        assert reply.status_code == 200
        text = httpx.get(f"{server.url}/metrics").text
    command = (ROOT / "runtime/llmc_runtime/server/run_server.py").read_text()  # which adds gauges of its own
    assert not missing(dashboard, text, re.findall(r"gauges\[\"(\w+)\"\]", command))
    assert missing([{"expr": "rate(llmc:no_such_metric_total[5m])"}], text) == {"llmc:no_such_metric_total"}


def test_the_metrics_of_autoscaling_exist_and_it_scales_the_deployment() -> None:
    text = (DEPLOY / "autoscaling.yaml").read_text()
    scaler, (deployment, _) = yaml.safe_load(text), yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    named = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert named == {name.replace(":", "_", 1) for name in re.findall(PROMQL, text)} and len(named) == 2
    with served(data_parallel_size=2) as server:
        known = {s.name for family in families(httpx.get(f"{server.url}/metrics").text) for s in family.samples}
    assert set(re.findall(PROMQL, text)) <= known


def test_stopping_takes_longer_than_the_server_drains() -> None:
    drain = serve_parser().get_default("shutdown_timeout") or 30
    unit = (DEPLOY / "llmc-serve.service").read_text()
    seconds = [int(n) for n in re.findall(r"TimeoutStopSec=(\d+)", unit)]
    seconds += [
        int(n) for n in re.findall(r"terminationGracePeriodSeconds: (\d+)", (DEPLOY / "kubernetes.yaml").read_text())
    ]
    seconds += [int(n) for n in re.findall(r"stop_grace_period: (\d+)s", (DEPLOY / "compose.yaml").read_text())]
    assert len(seconds) == 3 and min(seconds) >= drain + 5


def test_files_that_the_image_copies_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [w for line in re.findall(r"^COPY (.*)$", text, re.M) for w in line.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
