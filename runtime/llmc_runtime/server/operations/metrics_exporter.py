"""The server's metrics in Prometheus format, with vLLM's names after the prefix "llmc:", and those of its process.

Labels take values from closed sets: the model's name, the configured names of API keys, finish reasons, reasons of
refusal, stages of startup. Every value is stored once: the engine's own counters are read when metrics are requested,
and metrics with another prefix are derived from the finished text.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from llmc_runtime.metrics import COMPILE_SECONDS, DESCRIPTIONS, FINISH_REASONS, GAUGES, STEP_TOKENS, Histogram, Stat
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.operations.admission import REASONS

if TYPE_CHECKING:
    from llmc_runtime.api.async_llm import AsyncLLM
    from llmc_runtime.engine.messages import Ready

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX, ALIASES = "llmc:", ("vllm",)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (1, 2, 5, 10, 20, 50)
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = MappingProxyType({
    "time_to_first_token_seconds": ("Time from the request to its first token", _LONG),
    "inter_token_latency_seconds": ("Time between consecutive tokens", _SHORT),
    "request_time_per_output_token_seconds": ("Mean time between consecutive tokens of a request", _SHORT),
    "e2e_request_latency_seconds": ("Time from the request to its end", _LONG),
    "request_queue_time_seconds": ("Time in the engine's queue", _LONG),
    "request_prefill_time_seconds": ("Time from the start in the engine to the first token", _LONG),
    "request_decode_time_seconds": ("Time from the first token to the last", _LONG),
    "request_inference_time_seconds": ("Time from the start in the engine to the last token", _LONG),
    "request_prompt_tokens": ("Prompt tokens per request", _SIZES),
    "request_generation_tokens": ("Generated tokens per request", _SIZES),
    "request_max_num_generation_tokens": ("Tokens of the longest output of a request", _SIZES),
    "request_prefill_kv_computed_tokens": ("Prompt tokens per request that were not in the prefix cache", _SIZES),
    "request_params_n": ("Outputs requested (n)", _COUNTS),
    "request_params_max_tokens": ("Maximum tokens requested (max_tokens)", _SIZES),
})  # fmt: skip
_COUNTERS: Mapping[str, str] = MappingProxyType({
    "request_unknown_fields": "Unknown fields in requests",
    "request_disconnects": "Requests whose client disconnected",
    "request_timeouts": "Requests that timed out",
    "num_aborted_requests": "Outputs that were aborted",
})  # fmt: skip
# Histograms of the engine, by the name of its figures: name and bounds.
_ENGINE_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = MappingProxyType({
    "iteration_tokens": ("iteration_tokens_total", STEP_TOKENS),
    "grammar_compilation_time_seconds": ("grammar_compilation_time_seconds", COMPILE_SECONDS),
})  # fmt: skip
# Labels of the engine's counters that are not by reason.
_LABELS: Mapping[str, str] = MappingProxyType({"spec_decode_num_accepted_tokens_per_pos": "position"})
# What the requests of each API key used, by the key's name.
_BY_KEY: Mapping[str, str] = MappingProxyType({
    "key_requests": "Requests for generation",
    "key_prompt_tokens": "Prompt tokens of requests that have generated a token",
    "key_prompt_tokens_cached": "Those of them that were in the prefix cache",
    "key_generation_tokens": "Generated tokens",
})  # fmt: skip
_STEP_SECONDS = 0.001  # maximum time for which the event loop is blocked at once
_STEP_KEYS = 100  # API keys whose values are formatted at once
_TEXT_SECONDS = 0.05  # minimum interval between two expositions of all metrics, each of which takes about 5 ms


class ServerMetrics:
    """The metrics of one served model. Belong to the server's event loop.

    `stats` returns the engine's figures by name (see metrics), or a list of those of several engines, and `engine_info`
    metric families that are constant while the engine runs. The metrics of several engines have the label `engine`.
    `gauges` are current values of the server. With `alias`, all metrics are repeated with that prefix. `key_names` has
    the names of API keys by their identifiers.
    """

    def __init__(
        self,
        model: str,
        stats: Callable[[], Mapping[str, Any] | Sequence[Mapping[str, Any]]],
        engine_info: Callable[[], Iterable[Metric]] = tuple,
        alias: str | None = None,
        key_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.registry = CollectorRegistry()
        self._model, self._stats, self._about, self._alias = model, stats, engine_info, alias
        self.gauges: dict[str, tuple[str, Callable[[], float | None]]] = {}
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._refused = dict.fromkeys(REASONS, 0)
        self.ends = dict.fromkeys(FINISH_REASONS, 0)  # number of outputs by finish reason
        self.key_names = key_names
        self._by_key = {name: dict.fromkeys(key_names.values(), 0) for name in _BY_KEY}
        self.registry.register(self)
        # The state of `shared_text`: the last text, the number of texts begun, and when the next one may begin.
        self._shared = b""
        self._begun = 0
        self._next_begin = 0.0
        self._turn = asyncio.Lock()
        ProcessCollector(registry=self.registry)  # process_*: the server's process, not the engine's

    def text(self) -> bytes:
        """Return all metrics in text format."""
        return b"".join(self._parts())

    async def shared_text(self) -> bytes:
        """Return `text`, made in steps between which the event loop serves others; concurrent callers share it.

        A text is begun at most every _TEXT_SECONDS, so that many requests do not make the event loop slower.
        """
        next_number = self._begun + 1  # a text that is begun from now on
        async with self._turn:
            if self._begun < next_number:
                await asyncio.sleep(max(0.0, self._next_begin - time.monotonic()))
                self._begun += 1
                self._next_begin = time.monotonic() + _TEXT_SECONDS
                self._shared = await self._text_in_steps()
            return self._shared

    async def _text_in_steps(self) -> bytes:
        parts: list[bytes] = []
        step_end = time.monotonic() + _STEP_SECONDS
        for part in self._parts():
            parts.append(part)
            if time.monotonic() > step_end:
                await asyncio.sleep(0)
                step_end = time.monotonic() + _STEP_SECONDS
        return b"".join(parts)

    def _parts(self) -> Iterator[bytes]:
        """Yield the text of each metric family, or of a part of it; with `alias`, its repetition at the end."""
        repeated, name = list[bytes](), ""
        for family in self.registry.collect():
            part = generate_latest(_OneFamily(family))
            if family.name == name:  # it continues the family before, whose HELP and TYPE come once
                part = part.split(b"\n", 2)[2]
            name = family.name
            yield part
            if self._alias is not None and family.name.startswith(PREFIX):  # process_* have no prefix
                repeated.append(re.sub(rb"(?m)^(# (?:HELP|TYPE) )?llmc:", rb"\1" + self._alias.encode() + b":", part))
        yield from repeated

    def refused(self, reason: str) -> None:
        """Count a refused request; `reason` is one of admission.REASONS."""
        self._refused[reason] += 1

    def unknown(self, fields: int) -> None:
        """Count unknown fields of a request."""
        self._counts["request_unknown_fields"] += fields

    def count_disconnect(self) -> None:
        """Count a client that disconnected before its response ended."""
        self._counts["request_disconnects"] += 1

    def count_timeout(self) -> None:
        """Count a request that timed out."""
        self._counts["request_timeouts"] += 1

    def ended(self, reason: str, count: int = 1) -> None:
        """Count outputs by finish reason."""
        self.ends[reason if reason in self.ends else "error"] += count
        if reason == "abort":
            self._counts["num_aborted_requests"] += count

    def count_for_key(self, key: str, measure: str, count: int = 1) -> None:
        """Add to a measure of _BY_KEY. Keys without a name are not counted."""
        if key in self.key_names:
            self._by_key[measure][self.key_names[key]] += count

    def begin(self, prompt_tokens: int, params: SamplingParams, key: str = "") -> RequestMetrics:
        """Count a new prompt of a request with this key, and return its metrics."""
        self.histograms["request_prompt_tokens"].add(prompt_tokens)
        self.histograms["request_params_n"].add(params.n)
        if params.max_tokens is not None:
            self.histograms["request_params_max_tokens"].add(params.max_tokens)
        return RequestMetrics(self, params.n, key, prompt_tokens)

    def collect(self) -> Iterable[Metric]:
        """Yield all metric families with their current values; those by API key in parts, as there may be thousands."""
        for name, count in self._counts.items():
            yield self._family(CounterMetricFamily, name, _COUNTERS[name], count)
        yield self._family(
            CounterMetricFamily, "admission_rejections", "Requests that were not admitted", self._refused, "reason"
        )
        yield self._family(
            CounterMetricFamily, "request_success", "Outputs by finish reason", self.ends, "finished_reason"
        )
        for name, text in _BY_KEY.items():
            values = self._by_key[name]
            owners = list(values)
            for start in range(0, len(owners), _STEP_KEYS):
                part = {owner: values[owner] for owner in owners[start : start + _STEP_KEYS]}
                yield self._family(CounterMetricFamily, name, f"{text}, by API key", part, "key")
        for name, (text, value) in self.gauges.items():
            if (number := value()) is not None:
                yield self._family(GaugeMetricFamily, name, text, number)
        for name, (text, bounds) in _HISTOGRAMS.items():
            yield self._histogram(name, text, bounds, {"": self.histograms[name].as_list()})
        text = "Kernels compiled while serving; always 0, as the runtime has no compiler"
        yield self._family(CounterMetricFamily, "runtime_compiles", text, 0)
        yield from self._of_engine()
        yield from self._about()

    def _of_engine(self) -> Iterable[Metric]:
        stats = self._stats()
        engines: dict[str, Mapping[str, Stat]] = (
            {"": stats} if isinstance(stats, Mapping) else {str(i): each for i, each in enumerate(stats)}
        )
        # The server itself counts successful requests, along with disconnects and engine failures.
        names = [name for name in next(iter(engines.values())) if name != "request_success"]
        for name in names:
            values = {engine: each[name] for engine, each in engines.items() if name in each}
            if name in _ENGINE_HISTOGRAMS:
                full_name, bounds = _ENGINE_HISTOGRAMS[name]
                yield self._histogram(full_name, DESCRIPTIONS[name], bounds, values)
            elif not any(isinstance(value, list) for value in values.values()):
                kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
                yield self._by_engine(kind, name, DESCRIPTIONS[name], values, _LABELS.get(name, "reason"))

    def _family(self, kind: Any, name: str, text: str, value: Stat, label: str = "reason") -> Metric:
        """Return a metric family with one value, or with values by `label`."""
        return self._by_engine(kind, name, text, {"": value}, label)

    def _by_engine(self, kind: Any, name: str, text: str, values: Mapping[str, Stat], label: str = "reason") -> Metric:
        """Return a metric family with the values of each engine; an empty name stands for all."""
        owner = ["model_name"] if "" in values else ["model_name", "engine"]
        by_label = any(isinstance(value, Mapping) for value in values.values())
        family: Any = kind(PREFIX + name, text, labels=[*owner, label] if by_label else owner)
        for engine, value in values.items():
            labels = [self._model, *filter(None, [engine])]
            if isinstance(value, Mapping):
                for key, number in value.items():
                    family.add_metric([*labels, key], number)
            else:
                family.add_metric(labels, value)
        return family

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...], values: Mapping[str, Any]) -> Metric:
        """Return a histogram; the values of each engine are the sum, then the number of values in each bucket."""
        names = [*map(repr, map(float, bounds)), "+Inf"]
        labels = ["model_name"] if "" in values else ["model_name", "engine"]
        family: Any = HistogramMetricFamily(PREFIX + name, text, labels=labels)
        for engine, counts in values.items():
            buckets: Any = list(zip(names, itertools.accumulate(counts[1:]), strict=True))
            family.add_metric([self._model, *filter(None, [engine])], buckets, counts[0])
        return family


class _OneFamily(CollectorRegistry):
    """A registry with one metric family."""

    def __init__(self, family: Metric) -> None:
        super().__init__()
        self._family = family

    def collect(self) -> Iterable[Metric]:
        """Yield the family."""
        yield self._family


class RequestMetrics:
    """Measures the times and tokens of one prompt, which a request with the API key `key` sent."""

    def __init__(self, metrics: ServerMetrics, outputs: int, key: str = "", prompt_tokens: int = 0) -> None:
        self._key, self._prompt_tokens = key, prompt_tokens
        self._metrics, self._outputs, self._open = metrics, outputs, outputs
        self._next = metrics.histograms["inter_token_latency_seconds"].add
        self._began = self._last = time.monotonic()
        self._first: float | None = None
        self._prefill = 0.0
        self.tokens = 0
        self._lengths = dict[int, int]()  # output index -> length in tokens

    def take(self, output: RequestOutput) -> None:
        """Record an update of the request."""
        new = 0
        for completion in output.outputs:
            count = len(completion.token_ids)
            new += count
            self._lengths[completion.index] = self._lengths.get(completion.index, 0) + count
            if completion.finish_reason is not None:
                self._open -= 1
                self._metrics.ended(completion.finish_reason)
        if not new and output.pooled is None:
            return
        now = time.monotonic()
        if self._first is None:
            self._begin(now, output)
        else:
            self._next((now - self._last) / new, new)  # tokens that arrive together share the time since the last ones
        self._last = now
        self.tokens += new
        self._metrics.count_for_key(self._key, "key_generation_tokens", new)

    def end(self, rest: str) -> None:
        """Record the end of the request. Outputs that have not ended count as ended by `rest`."""
        histograms = self._metrics.histograms
        if self._open:
            self._metrics.ended(rest, self._open)
            self._open = 0
        histograms["e2e_request_latency_seconds"].add(time.monotonic() - self._began)
        histograms["request_generation_tokens"].add(self.tokens)
        histograms["request_max_num_generation_tokens"].add(max(self._lengths.values(), default=0))
        if self._first is None:
            return
        decode = self._last - self._first
        histograms["request_decode_time_seconds"].add(decode)
        histograms["request_inference_time_seconds"].add(self._prefill + decode)
        if self.tokens > self._outputs:
            histograms["request_time_per_output_token_seconds"].add(decode / (self.tokens / self._outputs - 1))

    def _begin(self, now: float, output: RequestOutput) -> None:
        histograms, self._first = self._metrics.histograms, now
        histograms["time_to_first_token_seconds"].add(now - self._began)
        self._metrics.count_for_key(self._key, "key_prompt_tokens", self._prompt_tokens)
        self._metrics.count_for_key(self._key, "key_prompt_tokens_cached", output.num_cached_tokens)
        histograms["request_prefill_kv_computed_tokens"].add(self._prompt_tokens - output.num_cached_tokens)
        if output.times is not None:
            queued, self._prefill = output.times
            histograms["request_queue_time_seconds"].add(queued)
            histograms["request_prefill_time_seconds"].add(self._prefill)


def engine_info(llm: AsyncLLM, model: str) -> Iterable[Metric]:
    """Yield the configuration of the engines' caches, and the duration of each stage of their startup."""
    engines = [(engine.ready or llm.config, engine.startup) for engine in llm.engines]
    several = len(engines) > 1
    owner = ["model_name", "engine"] if several else ["model_name"]
    owners = [[model, str(i)] if several else [model] for i in range(len(engines))]
    names = _cache_of(llm.config)
    family = GaugeMetricFamily(PREFIX + "cache_config_info", "Sizes of the engine", labels=[*owner, *names])
    for labels, (config, _) in zip(owners, engines, strict=True):
        family.add_metric([*labels, *map(str, _cache_of(config).values())], 1)
    yield family
    text = "Duration of each stage of the engine's last startup"
    family = GaugeMetricFamily(PREFIX + "startup_time_seconds", text, labels=[*owner, "stage"])
    text = "Time to load weights and programs onto the device"
    weights = GaugeMetricFamily(PREFIX + "weight_load_duration_seconds", text, labels=owner)
    for labels, (_, startup) in zip(owners, engines, strict=True):
        for stage, seconds in startup.items():
            family.add_metric([*labels, stage], seconds)
        if "weights" in startup:
            weights.add_metric(labels, startup["weights"])
    yield family
    if weights.samples:
        yield weights


def _cache_of(config: Ready) -> dict[str, Any]:
    return {
        "block_size": config.page_size, "num_gpu_blocks": config.num_pages, "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.prefix_caching, "num_state_snapshots": config.snapshots or 0,
    }  # fmt: skip
