"""What the server measures, in Prometheus' form: vLLM's names behind the prefix "llmc:". It decides nothing.

Labels are from closed sets: the served model's name, finish reasons, reasons of refusal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from llmc_runtime.outputs import RequestOutput
from llmc_runtime.sched.params import SamplingParams

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "llmc:"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (1, 2, 5, 10, 20, 50)
_GAUGES = frozenset({"num_requests_running", "num_requests_waiting", "num_requests_open", "kv_cache_usage_perc"})


class Meters:
    """The metrics of one served model. `stats` gives the engine's own counters and gauges by name."""

    def __init__(self, model: str, stats: Callable[[], dict[str, Any]]) -> None:
        self.registry = CollectorRegistry()
        self._model, self._stats = model, stats
        self.registry.register(self)
        self.unknown_fields = self._counter("request_unknown_fields", "Request fields that nobody knows")
        self._refused = self._counter("admission_rejections", "Requests that were not admitted", "reason")
        self.disconnects = self._counter("request_disconnects", "Requests whose client went away")
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first token", _LONG)
        self._next = self._histogram("inter_token_latency_seconds", "From one token to the next", _SHORT)
        self._whole = self._histogram("e2e_request_latency_seconds", "From the request to its end", _LONG)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt", _SIZES)
        self._output = self._histogram("request_generation_tokens", "Tokens that a request got", _SIZES)
        self._n = self._histogram("request_params_n", "Outputs that a request asked for", _COUNTS)
        self._most = self._histogram("request_params_max_tokens", "Tokens that a request asked for", _SIZES)

    def text(self) -> bytes:
        """Everything, as a scraper reads it."""
        return generate_latest(self.registry)

    def refused(self, reason: str) -> None:
        """A request was not admitted; `reason` is from a closed set."""
        self._refused.labels(self._model, reason).inc()

    def unknown(self, fields: int) -> None:
        """So many fields of a request mean nothing."""
        self.unknown_fields.labels(self._model).inc(fields)

    def gone(self) -> None:
        """A client went away before its answer ended."""
        self.disconnects.labels(self._model).inc()

    def begin(self, prompt_tokens: int, params: SamplingParams) -> Meter:
        """One request starts."""
        self._prompt.labels(self._model).observe(prompt_tokens)
        self._n.labels(self._model).observe(params.n)
        if params.max_tokens is not None:
            self._most.labels(self._model).observe(params.max_tokens)
        first, following, whole, output = (
            one.labels(self._model) for one in (self._first, self._next, self._whole, self._output)
        )
        return Meter(first, following, whole, output)

    def collect(self) -> Iterable[Metric]:
        """The engine's own figures, as they are now."""
        stats = self._stats()
        for name, value in stats.items():
            if isinstance(value, dict):
                family = CounterMetricFamily(PREFIX + name, "Requests by how they ended", None, ["model_name", _BY])
                for reason, count in value.items():
                    family.add_metric([self._model, reason], count)
                yield family
            else:
                kind = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
                one = kind(PREFIX + name, f"Of the engine: {name}", None, ["model_name"])
                one.add_metric([self._model], value)
                yield one

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, words, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, words, ["model_name"], registry=self.registry, buckets=buckets)


_BY = "finished_reason"


class Meter:
    """One request's times and tokens."""

    def __init__(self, first: Histogram, following: Histogram, whole: Histogram, output: Histogram) -> None:
        self._first, self._next, self._whole, self._output = first, following, whole, output
        self._began = self._last = time.monotonic()
        self._tokens = 0

    def take(self, output: RequestOutput) -> None:
        """News of the request."""
        new = sum(len(one.token_ids) for one in output.outputs)
        if not new:
            return
        now = time.monotonic()
        (self._next if self._tokens else self._first).observe(now - self._last)
        self._last, self._tokens = now, self._tokens + new

    def end(self) -> None:
        """The request is over."""
        self._whole.observe(time.monotonic() - self._began)
        self._output.observe(self._tokens)
