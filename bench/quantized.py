"""Compare quantised weights on one core with llama.cpp: int8 with q8_0, int4 with q4_0, including the head.

    python -m bench.quantized [--rounds N] [--core N]

Each contender is a process with one thread on the same core, and processes take turns. Seconds are of processor time,
so that a machine that is shared with other jobs does not count their turns; what they take of the memory's bandwidth
counts for both. decode: (a prompt of 64 and 17 tokens - the prompt and 1) / 16. prefill: a prompt of 512 and 1 token.
Needs build/bench/llamacpp (make bench-peers).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from bench import shapes
from bench.kit import BUILD, LLAMACPP, Contender, interleave, median
from bench.test_generate import FORMATS, artifact, gguf, prompt

PAIRS = tuple((name, FORMATS[name].gguf) for name in ("int8", "int4"))
CONTEXT, STEPS, PROMPT = 64, 16, 512


def decode_seconds(c: Contender) -> float:
    """Return the seconds of one token after a short prompt."""
    ids = prompt(CONTEXT)
    return (c.seconds(ids, STEPS + 1) - c.seconds(ids, 1)) / STEPS


def prefill_seconds(c: Contender) -> float:
    """Return the seconds of a prompt and its first token."""
    return c.seconds(prompt(PROMPT), 1)


def compare(title: str, contenders: dict[str, Contender], measure: Callable[[Contender], float], rounds: int) -> None:
    """Print a row per pair: medians in milliseconds, and the median and range of the rounds' ratios."""
    seconds = interleave({name: lambda c=c: measure(c) for name, c in contenders.items()}, rounds)
    for ours, theirs in PAIRS:
        ratios = sorted(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))
        ms = [f"{median(seconds[name]) * 1e3:.1f}" for name in (ours, theirs)]
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {title} | {ours} {ms[0]} | {theirs} {ms[1]} | {spread} |", flush=True)


def main() -> None:
    """Make the models, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    args = parser.parse_args()
    checkpoint = shapes.checkpoint(shapes.QWEN25_05B, BUILD)
    contenders = {}
    for ours, theirs in PAIRS:
        contenders[ours] = Contender("ours", artifact(checkpoint, ours), core=args.core)
        contenders[theirs] = Contender("llamacpp", gguf(checkpoint, theirs), LLAMACPP, core=args.core)
    print(f"{', '.join(f'{k}: {c.version}' for k, c in contenders.items())}, {args.rounds} rounds")
    print("| what | llmc, ms | llama.cpp, ms | llama.cpp / llmc |\n| --- | --- | --- | --- |", flush=True)
    for c in contenders.values():
        decode_seconds(c)
    compare(f"decode, {CONTEXT} tokens of context", contenders, decode_seconds, args.rounds)
    compare(f"prompt of {PROMPT}", contenders, prefill_seconds, args.rounds)
    for c in contenders.values():
        c.close()


if __name__ == "__main__":
    main()
