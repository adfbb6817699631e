"""Spans that the server exports to an OpenTelemetry collector, and its responses without one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("opentelemetry.sdk")
import httpx
from llmc_runtime.format.errors import LlmcError, missing_extra
from llmc_runtime.server.config import options_of, read
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.runtime.served import until
from tests.runtime.test_server_load import LONG, Command

PROGRAM = str(Path(__file__).with_name("serve_fake.py"))
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """A collector of traces over HTTP: `spans` has the received spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces", self.path
                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in sent.resource_spans:
                    collector.services |= {a.value.string_value for a in resource.resource.attributes}
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


def attributes(span: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {a.key: plain(a.value) for a in span.attributes}


def test_a_span_per_request_below_the_callers(collector: Collector) -> None:
    command = Command(PROGRAM, "0.002", "5", "--otlp-traces-endpoint", collector.url, "--disable-access-log")
    with httpx.Client(base_url=command.url, timeout=30) as client:
        body = {**LONG, "max_tokens": 5, "temperature": 0.5, "seed": 1}
        caller = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
        answered = client.post("/v1/completions", json=body, headers=caller)
        alone = client.post("/v1/completions", json={**body, "max_tokens": -3}, headers={"traceparent": "nonsense"})
        unsampled = client.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as reply:
            next(reply.iter_lines())
        assert client.get("/health").status_code == 200 and client.get("/metrics").status_code == 200
    assert (answered.status_code, alone.status_code, unsampled.status_code) == (200, 400, 200)
    command.process.terminate()
    code, log = command.end()
    assert code == 0 and '"request"' not in log and "Traceback" not in log, log
    whole, wrong, left = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert {"llmc"} < collector.services
    assert (whole.name, whole.trace_id.hex(), whole.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
    assert answered.headers["traceparent"] == f"00-{TRACE}-{whole.span_id.hex()}-01" and whole.trace_state == "vendor=1"
    found = attributes(whole)
    expected = {
        "gen_ai.usage.prompt_tokens": 3, "gen_ai.usage.completion_tokens": 5, "gen_ai.usage.output_tokens": 5,
        "gen_ai.request.id": answered.json()["id"], "gen_ai.response.model": "toy", "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5, "gen_ai.response.finish_reasons": ["length"], "url.path": "/v1/completions",
        "http.response.status_code": 200,
    }  # fmt: skip
    assert found.items() >= expected.items(), found
    seconds = (whole.end_time_unix_nano - whole.start_time_unix_nano) / 1e9
    assert 0 < found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"] <= seconds
    assert 0 <= found["gen_ai.latency.time_in_queue"] < seconds
    assert not wrong.parent_span_id and wrong.trace_id.hex() != TRACE and wrong.name == "http_request"
    assert attributes(wrong)["error.type"] == "invalid_value"
    assert attributes(left)["http.response.status_code"] == 499
    assert unsampled.headers["traceparent"].endswith("-00")


def test_a_collector_that_is_gone_delays_nothing() -> None:
    command = Command(PROGRAM, "0.002", "5", "--otlp-traces-endpoint", "http://127.0.0.1:9")
    assert httpx.post(f"{command.url}/v1/completions", json={**LONG, "max_tokens": 5}).status_code == 200
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": f"a={'quoted' * 1000}"}  # not a valid state
    assert httpx.get(f"{command.url}/v1/models", headers=headers).status_code == 200
    command.process.terminate()
    code, log = command.end()
    assert code == 0 and "quoted" not in log


def test_endpoints() -> None:
    def endpoint(text: str) -> str | None:
        return options_of(read(["toy", "--otlp-traces-endpoint", text]).args, {}, None).otlp_traces_endpoint

    assert endpoint("http://localhost:4318") == endpoint("http://localhost:4318/") == "http://localhost:4318/v1/traces"
    assert endpoint("https://traces.example/otlp?tenant=a") == "https://traces.example/otlp?tenant=a"
    for wrong in ("grpc://localhost:4317", "localhost:4317", "http://", "http://host:port"):
        with pytest.raises(LlmcError, match=r"E648.*--otlp-traces-endpoint"):
            endpoint(wrong)
    missing = missing_extra("opentelemetry.sdk")
    assert missing is not None and missing.code == "E665" and "tracing" in missing.remedy


def test_spans_of_requests_that_end_while_draining(collector: Collector) -> None:
    command = Command(PROGRAM, "0.01", "5", "--otlp-traces-endpoint", collector.url)
    with httpx.stream("POST", f"{command.url}/v1/completions", json={**LONG, "stream": True}, timeout=30) as reply:
        lines = reply.iter_lines()
        next(lines)
        command.process.terminate()
        assert "data: [DONE]" in list(lines)
    assert command.end()[0] == 0
    until(lambda: len(collector.spans) == 1)
    assert attributes(collector.spans[0])["gen_ai.response.finish_reasons"] == ["length"]
