"""Traces of requests for OpenTelemetry: a span per request, exported over OTLP/HTTP (protobuf).

The caller's context is read from `traceparent` and `tracestate` (W3C Trace Context), and the response has the span's
own `traceparent`. Attributes have vLLM's names, and those of OpenTelemetry's conventions for generative AI that vLLM
lacks. Spans have no texts and no keys. They are exported in batches by a thread; those that the collector does not
take are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from llmc_runtime import __version__
from llmc_runtime.server.http.request_log import MAX_PATH, Record

_PARENT = frozenset({b"traceparent", b"tracestate"})
_EXPORT_SECONDS = 5.0  # limit of one export, and of the last ones when the server ends


class RequestTracer:
    """Makes and exports the spans of a server that serves `model`.

    The sampling decision of the caller is followed; requests without a caller's context are always sampled.
    """

    def __init__(self, url: str, model: str) -> None:
        resource = Resource.create({"service.name": "llmc", "service.version": __version__})
        self._provider = TracerProvider(ParentBased(ALWAYS_ON), resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=_EXPORT_SECONDS)))
        self._tracer = self._provider.get_tracer("llmc_runtime.server", __version__)
        self._context, self._model = TraceContextTextMapPropagator(), model

    def begin(self, scope: Mapping[str, Any]) -> Span:
        """Start the span of a request from its ASGI scope."""
        parent = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _PARENT}
        return self._tracer.start_span("http_request", self._context.extract(parent), SpanKind.SERVER)

    def response_header(self, span: Span) -> tuple[bytes, bytes]:
        """Return the response header that names the span."""
        context = span.get_span_context()
        value = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        return b"traceparent", value.encode()

    def end(self, span: Span, scope: Mapping[str, Any], record: Record) -> None:
        """End the span of a request that has ended."""
        if span.is_recording():
            fields = record.fields()
            if "id" in fields:
                span.update_name("llm_request")  # as vLLM
                span.set_attribute("gen_ai.response.model", self._model)
            span.set_attributes({"http.request.method": scope["method"][:16], "url.path": scope["path"][:MAX_PATH]})
            span.set_attributes(dict(_attributes(fields, record)))
            if fields["status"] >= 500:
                span.set_status(Status(StatusCode.ERROR))
        span.end()

    def close(self) -> None:
        """Export the spans that have ended, within a few seconds, and stop."""
        self._provider.force_flush(int(_EXPORT_SECONDS * 1000))
        self._provider.shutdown()


def _attributes(fields: Mapping[str, Any], record: Record) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a span. Times are in seconds."""
    yield "http.response.status_code", fields["status"]
    if fields.get("error"):
        yield "error.type", fields["error"]
    if "id" not in fields:
        return
    yield "gen_ai.request.id", fields["id"]
    yield "gen_ai.latency.e2e", fields["duration_ms"] / 1000
    for names, value in (
        (("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens"), fields["prompt_tokens"]),
        (("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens"), fields["output_tokens"]),
        (("gen_ai.usage.cache_read.input_tokens",), fields["cached_tokens"]),
    ):
        yield from ((name, value) for name in names)
    if fields["finish_reason"]:
        yield "gen_ai.response.finish_reasons", fields["finish_reason"].split(",")
    if "ttft_ms" in fields:
        yield "gen_ai.latency.time_to_first_token", fields["ttft_ms"] / 1000
    if record.times is not None:
        queued, prefill = record.times
        yield "gen_ai.latency.time_in_queue", queued
        yield "gen_ai.latency.time_in_model_prefill", prefill
    if (params := record.params) is not None:
        for name in ("n", "max_tokens", "temperature", "top_p"):
            if (value := getattr(params, name)) is not None:
                yield f"gen_ai.request.{name}", value
