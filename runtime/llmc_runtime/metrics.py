"""Counters of one engine, with vLLM's names.

A Stat is a number, a dict of numbers by reason, or a histogram as a list: the sum of its values, then the number of
values in each bucket, the last one above all bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

Stat = float | dict[str, int] | list[float]

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMPILE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
FINISH_REASONS = ("stop", "length", "abort", "error")
CAPACITY, DEFERRED = "capacity", "deferred"  # why requests wait: for rows and pages, or for their grammars
# The gauges of an engine process: the value at its start, and the description.
_GAUGES: Mapping[str, tuple[Stat, str]] = MappingProxyType({
    "num_requests_running": (0, "Requests that are computed"),
    "num_requests_waiting": (0, "Requests that wait in the engine"),
    "num_requests_waiting_by_reason": (
        {CAPACITY: 0, DEFERRED: 0}, "Requests that wait for rows and pages (capacity) or for their grammars (deferred)"
    ),
    "kv_cache_usage_perc": (0.0, "Part of the KV cache's pages in use, from 0 to 1"),
    "step_token_budget": (0, "Maximum tokens of a step in which requests decode and others compute their prompts"),
    "num_state_snapshots": (0, "Snapshots in use of the states of recurrent layers"),
})  # fmt: skip
# Statistics that are neither of _GAUGES nor Counters.
_FURTHER_STATS: Mapping[str, str] = MappingProxyType({
    "num_requests_open": "Requests that were given to the engine and have not ended",
    "restarts": "Replacements of the engine's process after its end",
    "scheduler_idle_seconds": "Seconds in which the engine had no request to compute",
    "grammar_compilation_time_seconds": "Seconds that requests waited for their grammars",
})  # fmt: skip
GAUGES = frozenset({*_GAUGES, "num_requests_open"})


class Metric(NamedTuple):
    """A counter or a gauge under vLLM's name. A histogram is two of them, NAME_sum and NAME_count."""

    name: str
    labels: Mapping[str, str]
    value: float


def as_metrics(stats: Mapping[str, Stat]) -> Iterator[Metric]:
    """Yield statistics as metrics with the prefix of vLLM's names; numbers by reason have the label `reason`."""
    for name, value in stats.items():
        if isinstance(value, dict):
            yield from (Metric(f"vllm:{name}", {"reason": reason}, float(n)) for reason, n in value.items())
        elif isinstance(value, list):
            yield Metric(f"vllm:{name}_sum", {}, float(value[0]))
            yield Metric(f"vllm:{name}_count", {}, float(sum(value[1:])))
        else:
            yield Metric(f"vllm:{name}", {}, float(value))


class Histogram:
    """A histogram with a bucket for each upper bound in `bounds`, and one for larger values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.total, self.counts = bounds, 0.0, [0] * (len(bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, as often as `times`."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def as_list(self) -> list[float]:
        """Return the histogram as a Stat."""
        return [self.total, *self.counts]


def _count(text: str) -> Any:
    """Declare a counter with its description."""
    return field(default=0, metadata={"text": text})


@dataclass(slots=True)
class Counters:
    """Counters of tokens and events. Their exporter appends `_total` to the names."""

    num_steps: int = _count("Steps of the engine")
    num_scheduled_tokens: int = _count("Tokens computed on the device, including those computed again after preemption")
    prompt_tokens: int = _count("Prompt tokens of requests, counted at their first admission")
    prompt_tokens_cached: int = _count("Prompt tokens found in the prefix cache at the first admission")
    generation_tokens: int = _count("Generated tokens")
    num_preemptions: int = _count("Requests that lost their KV pages to others, and were computed again")
    prefix_cache_queries: int = _count("Tokens looked up in the prefix cache, at every admission")
    prefix_cache_hits: int = _count("Tokens found in the prefix cache, at every admission")
    state_snapshots_saved: int = _count("Snapshots saved of the states of recurrent layers")
    request_success: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0), metadata={"text": "Outputs that ended, by reason"}
    )
    spec_decode_num_drafts: int = _count("Verifications of the draft tokens of a row")
    spec_decode_num_draft_tokens: int = _count("Draft tokens that were verified")
    spec_decode_num_accepted_tokens: int = _count("Draft tokens that were accepted")
    spec_decode_num_accepted_tokens_per_pos: dict[str, int] = field(
        default_factory=dict, metadata={"text": "Draft tokens that were accepted, by position in the draft"}
    )
    iteration_tokens: list[int] = field(
        default_factory=lambda: [0] * (len(STEP_TOKENS) + 1), metadata={"text": "Tokens computed per step"}
    )

    def step(self, tokens: int) -> None:
        """Count a step that computed this many tokens."""
        self.num_steps += 1
        self.num_scheduled_tokens += tokens
        self.iteration_tokens[bisect_left(STEP_TOKENS, tokens)] += 1

    def drafted(self, drafts: int, accepted: int) -> None:
        """Count the verification of a row's drafts, of which the first `accepted` were accepted."""
        self.spec_decode_num_drafts += 1
        self.spec_decode_num_draft_tokens += drafts
        self.spec_decode_num_accepted_tokens += accepted
        for position in range(accepted):
            self.spec_decode_num_accepted_tokens_per_pos[str(position)] += 1

    def drafted_at_most(self, drafts: int) -> None:
        """Count accepted tokens at this many positions."""
        self.spec_decode_num_accepted_tokens_per_pos = {str(position): 0 for position in range(drafts)}

    def as_dict(self) -> dict[str, Stat]:
        """Return a copy as Stats by name."""
        stats = asdict(self)
        stats["iteration_tokens"].insert(0, stats["num_scheduled_tokens"])
        return stats


def initial_stats() -> dict[str, Stat]:
    """Return all statistics of an engine process, with the values at its start."""
    compiled = Histogram(COMPILE_SECONDS).as_list()
    others: dict[str, Stat] = {"grammar_compilation_time_seconds": compiled, "scheduler_idle_seconds": 0.0}
    return {**Counters().as_dict(), **{name: value for name, (value, _) in _GAUGES.items()}, **others}


# Statistics by name -> their descriptions.
DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {name: text for name, (_, text) in _GAUGES.items()}
    | {counter.name: counter.metadata["text"] for counter in fields(Counters)}
    | dict(_FURTHER_STATS)
)


def add_stats(past: Mapping[str, Stat], now: Mapping[str, Stat]) -> dict[str, Stat]:
    """Return the statistics of several engine processes: counters are summed, gauges are those of `now`."""
    return _sum([{name: _zero(value) if name in GAUGES else value for name, value in past.items()}, now])


def total_stats(engine_stats: Sequence[Mapping[str, Stat]]) -> dict[str, Stat]:
    """Return the sums over several engines; kv_cache_usage_perc is the mean."""
    out = _sum(engine_stats)
    usage = out.get("kv_cache_usage_perc")
    if isinstance(usage, int | float):
        out["kv_cache_usage_perc"] = usage / len(engine_stats)
    return out


def _sum(engine_stats: Sequence[Mapping[str, Stat]]) -> dict[str, Stat]:
    out: dict[str, Stat] = {}
    for stats in engine_stats:
        for name, value in stats.items():
            out[name] = _added(out[name], value) if name in out else value
    return out


def _added(value: Stat, addend: Stat) -> Stat:
    """Return the sum of two values of one statistic; histograms and values by reason are added element by element."""
    if isinstance(value, dict) and isinstance(addend, dict):
        return {reason: value.get(reason, 0) + addend.get(reason, 0) for reason in {**value, **addend}}
    if isinstance(value, list) and isinstance(addend, list):
        return [sum(values) for values in zip(value, addend, strict=True)]
    assert isinstance(value, int | float) and isinstance(addend, int | float)
    return value + addend


def _zero(value: Stat) -> Stat:
    return dict.fromkeys(value, 0) if isinstance(value, dict) else 0
