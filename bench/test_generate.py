"""Decode and prefill of the Qwen2.5-0.5B shape, batch 1, bf16, greedy, random weights: ours through LLM.generate beside
transformers (eager; static cache and torch.compile) and llama.cpp f16, interleaved in one run.

decode = (seconds of a prompt and N + 1 tokens - seconds of the prompt and 1) / N; prefill = seconds of a prompt and 1.
llama.cpp takes part where build/bench/llamacpp holds llama-cpp-python and gguf (make bench-peers).
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench import shapes
from bench.kit import BUILD, LLAMACPP, ROOT, Ceilings, Contender, clock, interleave, median, record, run, table

SHAPE = shapes.QWEN25_05B
NEW, CONTEXT, PROMPT, ROUNDS = 32, 64, 512, 6


def artifact(checkpoint: Path) -> Path:
    """Our artifact of the checkpoint; the compiler's own cache decides whether anything is to be done."""
    out = BUILD / f"{checkpoint.name}.llmc"
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
    run([str(x) for x in command])
    return out


def gguf(checkpoint: Path) -> Path:
    out = BUILD / f"{checkpoint.name}-f16.gguf"
    if not out.exists():
        part = out.with_suffix(".part")
        subprocess.run([LLAMACPP, "-m", "bench.gguf_file", checkpoint, part], cwd=ROOT, check=True)
        part.rename(out)
    return out


@pytest.fixture(scope="module")
def contenders() -> Iterator[dict[str, Contender | str]]:
    """Each contender by name, or why it is absent."""
    checkpoint = shapes.checkpoint(SHAPE, BUILD)
    found: dict[str, Contender | str] = {}
    try:
        found["llmc"] = Contender("ours", artifact(checkpoint))
        found["transformers eager"] = Contender("eager", checkpoint)
        found["transformers static cache, torch.compile"] = Contender("compiled", checkpoint)
        if LLAMACPP.exists():
            found["llama.cpp f16"] = Contender("llamacpp", gguf(checkpoint), LLAMACPP)
        else:
            found["llama.cpp f16"] = f"absent: no {LLAMACPP.relative_to(ROOT)}"
        yield found
    finally:
        for c in found.values():
            if isinstance(c, Contender):
                c.close()


@pytest.fixture(scope="module")
def ceilings() -> Ceilings:
    return Ceilings()


def prompt(length: int) -> list[int]:
    """Token ids nobody has seen before."""
    return [random.randrange(3, SHAPE.vocab) for _ in range(length)]


def decode_seconds(c: Contender) -> float:
    ids = prompt(CONTEXT)
    return (c.seconds(ids, NEW + 1) - c.seconds(ids, 1)) / NEW


def present(contenders: dict[str, Contender | str]) -> dict[str, Contender]:
    return {k: v for k, v in contenders.items() if isinstance(v, Contender)}


def check_same(here: dict[str, Contender]) -> None:
    """First greedy tokens agree for most prompts: speed is compared between equal models. Random weights leave the
    likeliest token a rounding error ahead, so that other orders of summation change some."""
    prompts = [prompt(n) for n in (16, 32, 64, 128, 192, 256, 384, 512)]
    first = {k: [c.generate(p, 1)[0][0] for p in prompts] for k, c in here.items()}
    ours = first.pop("llmc")
    for name, theirs in first.items():
        same = sum(a == b for a, b in zip(ours, theirs))
        assert same >= len(prompts) // 2, f"{name}: {same} of {len(prompts)} first tokens agree with ours"


@pytest.mark.benchmark(timer=clock, group="generate")
def test_decode(benchmark: Any, contenders: dict[str, Contender | str], ceilings: Ceilings) -> None:
    """Seconds a token behind a short prompt; the limit is the weights' bytes over the read bandwidth."""
    here = present(contenders)
    for c in here.values():
        c.warm(lambda c=c: decode_seconds(c))
    check_same(here)
    measures = {k: lambda c=c: decode_seconds(c) for k, c in here.items()}
    found = interleave({**measures, "limit": ceilings.bandwidth}, ROUNDS)
    title = f"Decode, {SHAPE.name} bf16, batch 1, {CONTEXT} tokens of prompt, {NEW} steps, medians of {ROUNDS}"
    work = Work("weights read / read bandwidth", "GB/s", SHAPE.read_per_token, 1, found.pop("limit"))
    _report(benchmark, title, work, found, contenders)


@pytest.mark.benchmark(timer=clock, group="generate")
def test_prefill(benchmark: Any, contenders: dict[str, Contender | str], ceilings: Ceilings) -> None:
    """Seconds of a 512-token prompt and its first token; the limit is the products' flops over the rate of fma."""
    here = present(contenders)
    for c in here.values():
        for _ in range(2):
            c.warm(lambda c=c: c.seconds(prompt(PROMPT), 1))
    measures = {k: lambda c=c: c.seconds(prompt(PROMPT), 1) for k, c in here.items()}
    found = interleave({**measures, "limit": ceilings.flops}, ROUNDS)
    title = f"Prefill, {SHAPE.name} bf16, {PROMPT} tokens and the first new one, medians of {ROUNDS}"
    flops = SHAPE.prefill_flops_per_token * PROMPT
    _report(
        benchmark, title, Work("products / fma rate", "GFLOP/s", flops, PROMPT, found.pop("limit")), found, contenders
    )


@dataclass
class Work:
    """What one measurement does: bytes or flops, tokens, and the machine's rates measured in between."""

    limit: str
    unit: str
    amount: int
    tokens: int
    rates: list[float]


def _report(
    benchmark: Any, title: str, work: Work, found: dict[str, list[float]], contenders: dict[str, Contender | str]
) -> None:
    ceiling = median(work.rates)
    floor = work.amount / ceiling
    t = table(title, "who", "ms", "token/s", "least ms", work.unit, f"share of {ceiling / 1e9:.1f} {work.unit}")
    for name, seconds in {**found, f"limit: {work.limit}": [floor]}.items():
        s = median(seconds)
        rate = work.amount / s
        times = (f"{s * 1e3:.2f}", f"{work.tokens / s:.1f}", f"{min(seconds) * 1e3:.2f}")
        t.add(name, *times, f"{rate / 1e9:.1f}", f"{rate / ceiling:.0%}")
    low, high = min(work.rates) / 1e9, max(work.rates) / 1e9
    t.notes.append(f"the limit's rate in this run: median {ceiling / 1e9:.1f}, {low:.1f} to {high:.1f} {work.unit}")
    _absent(t, contenders)
    record(benchmark, found["llmc"], **_extra(found), limit_rate=ceiling, limit_seconds=floor)


def _extra(found: dict[str, list[float]]) -> dict[str, Any]:
    return {"peers_median_seconds": {k: median(v) for k, v in found.items() if k != "llmc"}, "all_seconds": found}


def _absent(t: Any, contenders: dict[str, Contender | str]) -> None:
    for name, c in contenders.items():
        if isinstance(c, str):
            t.add(name, *[c] + [""] * (len(t.columns) - 2))
        else:
            t.notes.append(
                f"{name}: {c.version}, loaded in {c.load_seconds:.1f} s, warmed up in {c.warm_seconds:.1f} s"
            )
