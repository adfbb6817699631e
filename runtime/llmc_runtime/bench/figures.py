"""Computes the statistics of a load from its records, with the names of vLLM's benchmark.

Times are in milliseconds. `ttft` is the time from sending a request to the first chunk with text, `e2el` the time to
the last chunk, and `tpot` the time from the first to the last chunk, divided by the tokens between them. `itl` has one
value for each chunk but the first: the time since the chunk before, regardless of the number of tokens in a chunk,
whose mean is `tokens_per_chunk`. Failed requests do not count. Streams cut off at the end of their mix count for
everything except `e2el`, and their tokens count for the throughput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc_runtime.bench.record import CUT, FAILED, OK, Record

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50.0, 90.0, 99.0)
_MAX_ERRORS = 5  # number of kinds of failures to report


@dataclass(frozen=True)
class ReportSpec:
    """The metrics to report, their percentiles, and service-level objectives: `goals` maps metrics to milliseconds."""

    metrics: Sequence[str] = METRICS
    percentiles: Sequence[float] = PERCENTILES
    goals: Mapping[str, float] | None = None


def figures(records: Sequence[Record], start: float, spec: ReportSpec) -> dict[str, Any]:
    """Return counts, throughputs and latencies. `duration` is the time from `start` to the end of the last request."""
    completed = [record for record in records if record.status == OK]
    streamed = [record for record in records if record.status != FAILED and record.chunks]
    duration = max((record.end for record in records), default=start) - start
    read, written = sum(r.prompt_tokens for r in streamed), sum(r.output_tokens for r in streamed)
    span = max(duration, 1e-9)
    goodput = sum(_meets_goals(record, spec.goals) for record in completed) / span if spec.goals else None
    return {
        "duration": duration,
        "completed": len(completed),
        "failed": sum(r.status == FAILED for r in records),
        "cut": sum(r.status == CUT for r in records),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(completed) / span,
        "request_goodput": goodput,
        "output_throughput": written / span,
        "total_token_throughput": (read + written) / span,
        "tokens_per_chunk": written / max(sum(r.chunks for r in streamed), 1),
        "max_concurrent_requests": _peak_concurrency(records),
        "max_send_delay_ms": 1e3 * max((r.sent - r.due for r in records if r.sent), default=0.0),
        **_latencies(completed, streamed, spec),
        "errors": _errors(records),
    }


def _latencies(completed: Sequence[Record], streamed: Sequence[Record], spec: ReportSpec) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    for name in spec.metrics:
        values = _values(name, completed, streamed)
        summary: dict[str, Any] = {"mean": np.mean, "median": np.median, "std": np.std}
        for statistic, reduce in summary.items():
            out[f"{statistic}_{name}_ms"] = float(reduce(values)) if values.size else None
        for p in spec.percentiles:
            out[f"p{p:g}_{name}_ms"] = float(np.percentile(values, p)) if values.size else None
    return out


def _values(name: str, completed: Sequence[Record], streamed: Sequence[Record]) -> np.ndarray:
    if name == "itl":
        gaps = [np.frombuffer(r.gaps, np.float32) for r in streamed if len(r.gaps)]
        return 1e3 * np.concatenate(gaps).astype(np.float64) if gaps else np.empty(0)
    chosen = [r for r in (completed if name == "e2el" else streamed) if name != "tpot" or r.output_tokens > 1]
    return np.array([_metric(r, name) for r in chosen], np.float64)


def _meets_goals(record: Record, goals: Mapping[str, float]) -> bool:
    """Whether a request meets every service-level objective (metric to milliseconds)."""
    return all(_metric(record, name) <= limit for name, limit in goals.items())


def _metric(record: Record, name: str) -> float:
    """Return a request's metric in milliseconds; its `itl` is the mean over its chunks."""
    if name == "ttft":
        return 1e3 * (record.first - record.sent)
    if name == "e2el":
        return 1e3 * (record.last - record.sent)
    count = len(record.gaps) if name == "itl" else record.output_tokens - 1
    return 1e3 * (record.last - record.first) / max(count, 1)


def _peak_concurrency(records: Sequence[Record]) -> int:
    changes = sorted([(r.sent, 1) for r in records if r.sent] + [(r.end, -1) for r in records if r.sent])
    peak = current = 0
    for _, change in changes:
        current += change
        peak = max(peak, current)
    return peak


def _errors(records: Sequence[Record]) -> dict[str, int]:
    """Return the most frequent failures with their counts."""
    counts: dict[str, int] = {}
    for record in records:
        if record.status == FAILED:
            counts[record.error] = counts.get(record.error, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:_MAX_ERRORS])
