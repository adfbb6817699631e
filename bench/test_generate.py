"""Decode and prefill of the Qwen2.5-0.5B shape: batch 1, greedy, random weights, contenders interleaved in one run.

llmc (LLM.generate) in bf16 is compared with transformers (eager; static cache and torch.compile) and llama.cpp
f16; llmc in int8 and int4, including the head, with llama.cpp's q8_0 and q4_0.

decode = (seconds of a prompt and N + 1 tokens - seconds of the prompt and 1) / N; prefill = seconds of a prompt and 1.
llama.cpp takes part where build/bench/llamacpp holds llama-cpp-python and gguf (make bench-peers).
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench import shapes
from bench.kit import BUILD, LLAMACPP, ROOT, Ceilings, Contender, clock, interleave, median, record, run, table

SHAPE = shapes.QWEN25_05B
NEW, CONTEXT, PROMPT, ROUNDS = 32, 64, 512, 8


@dataclass(frozen=True)
class Format:
    """A format of the matrices: flags of our compile, bytes per weight (codes and scales), llama.cpp's name for it."""

    flags: tuple[str, ...]
    bytes: float
    gguf: str


FORMATS = {
    "bf16": Format((), 2, "f16"),
    "int8": Format(("--quant", "int8", "--quant-head", "int8"), 1, "q8_0"),
    "int4": Format(("--quant", "int4", "--quant-head", "int4"), 0.5 + 2 / 128, "q4_0"),
}


def artifact(checkpoint: Path, name: str) -> Path:
    """Return our artifact of the checkpoint; the compile cache skips work that is already done."""
    out = BUILD / f"{checkpoint.name}-{name}.llmc"
    command = [
        sys.executable,
        "-m",
        "llmc.cli",
        "compile",
        checkpoint,
        "-o",
        out,
        "--force",
        "--cache",
        BUILD / "cache",
    ]
    run([str(x) for x in (*command, *FORMATS[name].flags)])
    return out


def gguf(checkpoint: Path, kind: str) -> Path:
    out = BUILD / f"{checkpoint.name}-{kind}.gguf"
    if not out.exists():
        part = out.with_suffix(".part")
        subprocess.run([LLAMACPP, "-m", "bench.gguf_file", checkpoint, part, kind], cwd=ROOT, check=True)
        part.rename(out)
    return out


@pytest.fixture(scope="module", params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    """The format's name."""
    return str(request.param)


@pytest.fixture(scope="module")
def contenders(name: str) -> Iterator[dict[str, Contender | str]]:
    """Each contender by name, or why it is absent."""
    checkpoint = shapes.checkpoint(SHAPE, BUILD)
    contenders: dict[str, Contender | str] = {}
    peer = f"llama.cpp {FORMATS[name].gguf}"
    try:
        contenders["llmc"] = Contender("ours", artifact(checkpoint, name))
        if name == "bf16":
            contenders["transformers eager"] = Contender("eager", checkpoint)
            contenders["transformers static cache, torch.compile"] = Contender("compiled", checkpoint)
        if LLAMACPP.exists():
            contenders[peer] = Contender("llamacpp", gguf(checkpoint, FORMATS[name].gguf), LLAMACPP)
        else:
            contenders[peer] = f"absent: no {LLAMACPP.relative_to(ROOT)}"
        yield contenders
    finally:
        for c in contenders.values():
            if isinstance(c, Contender):
                c.close()


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    return Ceilings()


def prompt(length: int) -> list[int]:
    """Return random token ids that were not used before."""
    return [random.randrange(3, SHAPE.vocab) for _ in range(length)]


def decode_seconds(c: Contender) -> float:
    ids = prompt(CONTEXT)
    return (c.seconds(ids, NEW + 1) - c.seconds(ids, 1)) / NEW


def present(contenders: dict[str, Contender | str]) -> dict[str, Contender]:
    return {k: v for k, v in contenders.items() if isinstance(v, Contender)}


def check_same(contenders: dict[str, Contender]) -> None:
    """First greedy tokens agree for a quarter of the prompts or more: speed is compared between equal models. Random
    weights leave the likeliest token a rounding error ahead: int8 and q8_0 agree for about three quarters."""
    prompts = [prompt(n) for n in (16, 32, 64, 128, 192, 256, 384, 512)]
    first = {k: [c.generate(p, 1)[0][0] for p in prompts] for k, c in contenders.items()}
    ours = first.pop("llmc")
    for name, theirs in first.items():
        same = sum(a == b for a, b in zip(ours, theirs))
        assert same >= len(prompts) // 4, f"{name}: {same} of {len(prompts)} first tokens agree with ours"


@dataclass(frozen=True)
class Work:
    """One measurement: its title, tokens, bytes or flops, and their limit, a rate of this machine."""

    title: str
    tokens: int
    amount: int
    unit: str
    limit: str
    rate: Callable[[], float]


@pytest.mark.benchmark(timer=clock, group="generate")
def test_decode(benchmark: Any, name: str, contenders: dict[str, Contender | str], ceilings: Ceilings) -> None:
    """Seconds per token after a short prompt; the limit is the weights' bytes over the read bandwidth."""
    here = present(contenders)
    for c in here.values():
        c.warm(lambda c=c: decode_seconds(c))
    if name != "int4":  # rounding to 4 bits differs too much between the two formats
        check_same(here)
    title = f"Decode, {SHAPE.name} {name}, batch 1, {CONTEXT} tokens of prompt, {NEW} steps, medians of {ROUNDS}"
    limit = "bytes of weights / read bandwidth"
    work = Work(
        title, 1, int(SHAPE.read_per_token * FORMATS[name].bytes / 2), "GB/s", limit, lambda: ceilings.bandwidth(16)
    )
    compare(benchmark, work, contenders, decode_seconds)


@pytest.mark.benchmark(timer=clock, group="generate")
def test_prefill(benchmark: Any, name: str, contenders: dict[str, Contender | str], ceilings: Ceilings) -> None:
    """Seconds of a 512-token prompt and its first token; the limit is the products' flops over the FMA rate."""
    for c in present(contenders).values():
        for _ in range(2):
            c.warm(lambda c=c: c.seconds(prompt(PROMPT), 1))
    title = f"Prefill, {SHAPE.name} {name}, {PROMPT} tokens and the first new one, medians of {ROUNDS}"
    flops = SHAPE.prefill_flops_per_token * PROMPT
    work = Work(title, PROMPT, flops, "GFLOP/s", "flops of products / fma rate", ceilings.flops)
    compare(benchmark, work, contenders, lambda c: c.seconds(prompt(PROMPT), 1))


def compare(
    benchmark: Any, work: Work, contenders: dict[str, Contender | str], seconds_of: Callable[[Contender], float]
) -> None:
    """Measure all contenders in turn, each after the limit's rate; shares are medians of those pairs."""
    rates: dict[str, list[float]] = {}

    def measure(name: str, c: Contender) -> float:
        rates.setdefault(name, []).append(work.rate())
        return seconds_of(c)

    runnable = present(contenders)
    seconds = interleave({k: lambda k=k, c=c: measure(k, c) for k, c in runnable.items()}, ROUNDS)
    every = [r for each in rates.values() for r in each]
    floor = work.amount / median(every)
    t = table(work.title, "who", "ms", "least ms", "token/s", work.unit, "limit's rate beside it", "share of it")
    for name, measured in seconds.items():
        s, beside = median(measured), rates[name]
        share = median([work.amount / x / r for x, r in zip(measured, beside)])
        spread = f"{median(beside) / 1e9:.0f} ({min(beside) / 1e9:.0f} to {max(beside) / 1e9:.0f})"
        times = (f"{s * 1e3:.2f}", f"{min(measured) * 1e3:.2f}", f"{work.tokens / s:.1f}")
        t.add(name, *times, f"{work.amount / s / 1e9:.1f}", spread, f"{share:.0%}")
    t.add(f"limit: {work.limit}", f"{floor * 1e3:.2f}", "", f"{work.tokens / floor:.1f}", "", "", "100%")
    for name, c in contenders.items():
        if isinstance(c, str):
            t.add(name, *[c] + [""] * (len(t.columns) - 2))
    t.notes.append("; ".join(f"{k}: {c.version}" for k, c in runnable.items()))
    t.notes.append("seconds to load + warm up: " + ", ".join(f"{k} {c.readiness}" for k, c in runnable.items()))
    peers = {k: median(v) for k, v in seconds.items() if k != "llmc"}
    record(
        benchmark, seconds["llmc"], peers_median_seconds=peers, all_seconds=seconds, rates=rates, limit_seconds=floor
    )
