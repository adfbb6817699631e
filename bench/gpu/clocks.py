"""SM clock, power and throttle reasons of every GPU beside the steps of a model, sampled through NVML.

    python -m bench.gpu.clocks ARTIFACT [--model NAME] [--cases A,B] [--prompts N] [--tokens N] [--json FILE]

A separate process samples all GPUs about every millisecond. A line is one prompt, or all steps of one kind: its
time, and of each GPU the lowest and the highest clock (MHz), the highest power (W) and the reasons for a lower clock.

case         prompts
N            one after the other, N ms between the end of one and the next (0: none)
decode       each after 32 steps of 64 rows
kernelsN     as N, with rank 0 recorded by CUPTI: how much longer products and collectives take than their medians
offline      512 requests of 512 tokens in and 256 out; a line is a kind of step
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu import account
from bench.gpu.engine import OFFLINE, Session
from bench.gpu.floors import H200
from bench.gpu.nvml import Sample, Sampler, reasons_of
from bench.gpu.plan import MODELS

CASES = "300,0,5,20,100,decode,kernels0,kernels20,0,offline"
DECODE_ROWS, DECODE_STEPS = 64, 33
COLLECTIVES = ("llmc_all_reduce", "llmc_all_gather")  # how names of their kernels begin


class Span(NamedTuple):
    """A span of work: its label, and its begin and end by `time.perf_counter_ns`."""

    label: str
    begin: int
    end: int


def beside(samples: Iterable[Sample], begin: int, end: int) -> dict[int, list[Sample]]:
    """Return the samples between two times by GPU."""
    samples_of: dict[int, list[Sample]] = {}
    for sample in samples:
        if begin <= sample.ns <= end:
            samples_of.setdefault(sample.gpu, []).append(sample)
    return dict(sorted(samples_of.items()))


def described(samples: Sequence[Sample], spans: Sequence[Span]) -> str:
    """Return a line about spans of one kind: their number, the median and the largest time, and what the GPUs did."""
    times = [(s.end - s.begin) / 1e6 for s in spans]
    samples_of: dict[int, list[Sample]] = {}
    for span in spans:
        for gpu, some in beside(samples, span.begin, span.end).items():
            samples_of.setdefault(gpu, []).extend(some)
    cards = [
        f"GPU {gpu}: {min(s.mhz for s in some):4} to {max(s.mhz for s in some):4} MHz"
        f" (mean {statistics.mean(s.mhz for s in some):4.0f}), {max(s.milliwatts for s in some) / 1e3:3.0f} W,"
        f" {'+'.join(reasons_of(some)) or 'no reason'}"
        for gpu, some in sorted(samples_of.items())
    ]
    many = f"{len(times)} x " if len(times) > 1 else ""
    longest = f" (at most {max(times):.1f}, {sum(times) / 1e3:.2f} s in all)" if len(times) > 1 else ""
    return f"{spans[0].label:24} {many}{statistics.median(times):7.2f} ms{longest}; {'; '.join(cards) or 'no sample'}"


def spans_of(count: int, work: Callable[[], object], before: Callable[[], object]) -> list[Span]:
    """Run `before` and then `work` repeatedly, and return the spans of `work`."""
    spans = []
    for i in range(count):
        before()
        begin = time.perf_counter_ns()
        work()
        spans.append(Span(f"prompt {i + 1}", begin, time.perf_counter_ns()))
    return spans


def prompts_of(session: Session, case: str, count: int, tokens: int) -> list[Span]:
    """Return the spans of prompts, with pauses of `case` ms or decode steps in front of each."""
    prompts = iter([session.prompts(1, tokens) for _ in range(count)])

    def before() -> None:
        if case == "decode":
            session.seconds(session.prompts(DECODE_ROWS, 16), DECODE_STEPS)
        elif int(case):
            time.sleep(int(case) / 1e3)

    return spans_of(count, lambda: session.seconds(next(prompts), 1), before)


def slowness(kernels: Sequence[account.Kernel], count: int) -> list[str]:
    """Return a line for each of `count` equal prompts: its time on the GPU, and by how much longer its kernels and its
    collectives take than their medians over all prompts."""
    ordered = sorted(kernels, key=lambda kernel: (kernel.call, kernel.begin))
    size = len(ordered) // count
    prompts = [ordered[i * size : (i + 1) * size] for i in range(count)]
    usual = [max(1, statistics.median(prompt[i].duration for prompt in prompts)) for i in range(size)]
    lines = [f"{len(ordered)} kernels, {len(ordered) % count} more than {count} prompts of {size}"]
    for prompt in prompts:
        # Of other kernels and of collectives: duration and median in ns.
        parts: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for kernel, median in zip(prompt, usual, strict=True):
            parts[kernel.name.startswith(COLLECTIVES)].append((kernel.duration, median))
        ratios = [duration / median for duration, median in parts[False]]
        part = max(1, len(ratios) // 4)
        shown = " ".join(f"{statistics.median(ratios[i : i + part]):.2f}" for i in range(0, 4 * part, part))
        sums = parts[True] or [(0.0, 1.0)]
        lines.append(
            f"{lasted(prompt):7.2f} ms, of which idle {lasted(prompt) - busy(prompt):6.2f}; by quarter, kernels take"
            f" {shown} of their medians; collectives {sum(d for d, _ in sums) / sum(m for _, m in sums):.2f}"
            f" (median {statistics.median(d / m for d, m in sums):.2f}, longest {max(d for d, _ in sums) / 1e6:.2f} ms)"
        )
    return lines


def lasted(kernels: Sequence[account.Kernel]) -> float:
    """Return the milliseconds from the first begin to the last end."""
    return (max(k.begin + k.duration for k in kernels) - min(k.begin for k in kernels)) / 1e6


def busy(kernels: Sequence[account.Kernel]) -> float:
    """Return the milliseconds during which at least one kernel runs."""
    total, end = 0, 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        last = kernel.begin + kernel.duration
        total += max(0, last - max(end, kernel.begin))
        end = max(end, last)
    return total / 1e6


def kinds_of(session: Session) -> list[list[Span]]:
    """Run the offline suite and return its steps by kind, each from the end of the step before to its own end: decode
    steps of all rows and of fewer, and steps with prompts of the largest number of tokens and of fewer."""
    requests, length, new = OFFLINE
    prompts, limits = session.prompts(requests, length), session.llm.config
    origin = last = time.perf_counter_ns()
    kinds: dict[str, list[Span]] = {}
    for step in session.recorded(prompts, new):
        if step.rows == step.tokens:
            label = f"{step.rows} rows" if step.rows == limits.max_num_seqs else "fewer rows"
        else:
            full = step.tokens == limits.max_num_batched_tokens
            label = f"{'' if full else 'fewer than '}{limits.max_num_batched_tokens} tokens"
        kinds.setdefault(label, []).append(Span(label, last, origin + step.end))
        last = origin + step.end
    return list(kinds.values())


def measure(session: Session, cases: Sequence[str], count: int, tokens: int) -> list[dict[str, Any]]:
    """Run the cases and print their lines; return spans and samples as JSON."""
    results = []
    session.seconds(session.prompts(1, tokens), 1)
    session.seconds(session.prompts(DECODE_ROWS, 16), 4)
    for case in cases:
        groups: list[list[Span]] = []
        lines: list[str] = []
        with Sampler() as sampler:
            if case == "offline":
                groups = kinds_of(session)
            elif case.startswith("kernels"):
                pause = case.removeprefix("kernels")
                lines = slowness(account.recorded(partial(prompts_of, session, pause, count, tokens)), count)
            else:
                groups = [[span] for span in prompts_of(session, case, count, tokens)]
        print(f"-- case {case}, {len(sampler.samples)} samples", flush=True)
        for line in [*(described(sampler.samples, spans) for spans in groups), *lines]:
            print(f"   {line}", flush=True)
        results.append({"case": case, "spans": [s for g in groups for s in g], "samples": sampler.samples})
        time.sleep(0.5)
    return results


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("artifact", type=Path, metavar="ARTIFACT")
    ap.add_argument("--model", default="llama-3.1-8b", choices=sorted(MODELS), metavar="NAME", help="(llama-3.1-8b)")
    ap.add_argument("--cases", default=CASES, metavar="A,B", help=f"in this order ({CASES})")
    ap.add_argument("--prompts", type=int, default=24, metavar="N", help="prompts of a case (24)")
    ap.add_argument("--tokens", type=int, default=2048, metavar="N", help="tokens of a prompt (2048)")
    ap.add_argument("--json", type=Path, metavar="FILE", help="file for all spans and samples")
    args = ap.parse_args()
    session = Session(args.artifact, MODELS[args.model], H200)
    try:
        results = measure(session, args.cases.split(","), args.prompts, args.tokens)
    finally:
        session.close()
    if args.json is not None:
        args.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
