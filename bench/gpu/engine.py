"""Decode, prefill and offline throughput of an artifact through the whole LLM.generate; prompts are token ids.

The peers' protocol: decode = (seconds for 129 tokens - seconds for 1) / 128 of `batch` prompts of 128 random tokens.
`steps` measures the same steps within one call, which the time of prompts does not affect.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from llmc_runtime import LLM, SamplingParams
from llmc_runtime.trace import attach_recorder

from bench.gpu import floors
from bench.gpu.floors import Roof
from bench.gpu.rows import Row, engine_row
from bench.shapes import Shape

PROMPT, STEPS = 128, 128
BATCHES = (1, 8, 16, 32, 64, 128, 256)
PROMPTS = (512, 2048, 8192)
TRACED = (1, 32)  # batches whose host time is measured
CONTEXTS = ((32, 4096), (8, 15_000), (64, 2048))  # batch, tokens of a prompt: decode steps of long contexts
OFFLINE = (512, 512, 256)  # requests, tokens in, tokens out
LEAST = 32  # steps between which a decode step is measured


class Step(NamedTuple):
    """A step: its rows and tokens, and when the host saw its end, in ns."""

    rows: int
    tokens: int
    end: int


class Session:
    """An open artifact of a shape.

    roof: the card's ceilings, for floors. trace: a file for the engine's trace. sequences: maximum number that run at
    a time, if it is not the artifact's.
    """

    def __init__(
        self, artifact: Path, shape: Shape, roof: Roof, trace: Path | None = None, sequences: int | None = None
    ) -> None:
        self.shape, self.roof = shape, roof
        begin = time.perf_counter()
        self.log_lines: list[str] = []
        options = {"enable_prefix_caching": False, "max_num_seqs": sequences}
        self.llm = LLM(artifact, say=self.log_lines.append, trace=trace, **options)
        self.open_seconds = time.perf_counter() - begin

    def close(self) -> None:
        self.llm.close()

    def seconds(self, prompts: Sequence[Sequence[int]], new: int) -> float:
        """Return the seconds of one greedy generate call that ignores end-of-sequence tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        begin = time.perf_counter()
        outs = self.llm.generate([list(p) for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        short = [len(o.outputs[0].token_ids) for o in outs if len(o.outputs[0].token_ids) != new]
        assert not short, f"{len(short)} of {len(outs)} requests ended early: {short[:4]} tokens of {new}"
        return seconds

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Return random token ids that no earlier call has used."""
        return [[random.randrange(3, self.shape.vocab) for _ in range(length)] for _ in range(count)]

    def decode(self, batch: int, rounds: int = 3, length: int = PROMPT) -> Row:
        """Return the milliseconds of a decode step after prompts of `length` tokens."""
        self.seconds(self.prompts(batch, length), 4)  # the first use of a batch size captures its graph
        whole, first = [], []
        for i in range(rounds):
            for new, times in ((STEPS + 1, whole), (1, first))[:: 1 if i % 2 else -1]:
                times.append(self.seconds(self.prompts(batch, length), new))
        ms = (statistics.median(whole) - statistics.median(first)) / STEPS * 1e3
        floor = floors.decode_seconds(self.shape, batch, length + STEPS // 2, self.roof) * 1e3
        suite, case = ("decode", str(batch)) if length == PROMPT else ("contexts", f"{batch} after {length}")
        return engine_row(suite, self.shape.name, case, "ms", ms, floor, whole_s=whole, first_s=first)

    def recorded(self, prompts: Sequence[Sequence[int]], new: int) -> list[Step]:
        """Return the steps of a call of `seconds`, in order."""
        recorder, stop = attach_recorder(self.llm.engine, 16 * (new + len(prompts)))
        try:
            self.seconds(prompts, new)
        finally:
            stop()
        return [Step(rows, tokens, end) for _, name, _, end, _, rows, tokens in recorder.rows() if name == "step"]

    def steps(self, batch: int, rounds: int = 3, length: int = PROMPT) -> Row:
        """Return the milliseconds of a decode step after prompts of `length` tokens: in each of several calls, the time
        between the ends of the first and the last step in which every row decodes, by the number of steps; the median
        of the calls."""
        self.seconds(self.prompts(batch, length), 4)
        calls = [decode_steps(self.recorded(self.prompts(batch, length), STEPS + 1), batch) for _ in range(rounds)]
        ms = statistics.median(statistics.mean(times) for times in calls)
        floor = floors.decode_seconds(self.shape, batch, length + STEPS // 2, self.roof) * 1e3
        return engine_row("decode", self.shape.name, str(batch), "ms", ms, floor, **samples(calls))

    def host(self, batch: int) -> Row:
        """Return the median host time exposed per step in microseconds, from the trace."""
        trace = self.llm.trace
        assert trace is not None
        self.seconds(self.prompts(batch, PROMPT), 4)
        trace.clear()
        self.seconds(self.prompts(batch, PROMPT), STEPS + 1)
        summary = trace.summary()
        return engine_row("host", self.shape.name, str(batch), "us", summary["exposed_us"], None, **summary)

    def prefill(self, length: int, rounds: int = 5) -> Row:
        """Return the milliseconds of one prompt and one token."""
        self.seconds(self.prompts(1, length), 1)
        times = [self.seconds(self.prompts(1, length), 1) * 1e3 for _ in range(rounds)]
        floor = floors.prefill_seconds(self.shape, length, self.roof) * 1e3
        return engine_row("prefill", self.shape.name, str(length), "ms", statistics.median(times), floor, all_ms=times)

    def offline(self, requests: int, length: int, new: int) -> Row:
        """Return output tokens per second of many concurrent requests, after a short warm-up."""
        self.seconds(self.prompts(min(8, requests), length), 4)
        seconds = self.seconds(self.prompts(requests, length), new)
        rows = min(requests, self.llm.config.max_num_seqs)
        floor = floors.offline_tokens_per_second(self.shape, length, new, rows, self.roof)
        case = f"{requests} of {length} in, {new} out"
        return engine_row("offline", self.shape.name, case, "tok/s", requests * new / seconds, floor, seconds=seconds)


def decode_steps(steps: Sequence[Step], batch: int) -> list[float]:
    """Return the milliseconds of each decode step of `batch` rows that follows another one."""
    ends = [step.end for step in steps if (step.rows, step.tokens) == (batch, batch)]
    assert len(ends) > LEAST, f"{len(ends)} of {len(steps)} steps decoded {batch} rows"
    return [(b - a) / 1e6 for a, b in pairwise(ends)]


def samples(calls: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the mean, the median and the maximum of each call's steps in milliseconds, and their number."""
    return {
        "mean_ms": [statistics.mean(times) for times in calls],
        "median_ms": [statistics.median(times) for times in calls],
        "max_ms": [max(times) for times in calls],
        "steps": [len(times) for times in calls],
    }


def measure(session: Session, plan: Any) -> Iterator[Row]:
    """Yield the rows of a plan (suites, batches, prompts, requests)."""
    if "decode" in plan.suites:
        for batch in plan.batches:
            yield session.decode(batch, 5 if batch <= 32 else 3)
    if "contexts" in plan.suites:
        for batch, length in CONTEXTS:
            yield session.decode(batch, 2, length)
    if "prefill" in plan.suites:
        for length in plan.prompts:
            yield session.prefill(length)
    if "offline" in plan.suites:
        yield session.offline(plan.requests, *OFFLINE[1:])
