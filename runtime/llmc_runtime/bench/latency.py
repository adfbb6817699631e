"""`llmc bench latency`: the time of a batch of equal requests, and the time per decode step."""

from __future__ import annotations

import argparse
import time
from typing import IO, Any

import numpy as np

from llmc_runtime.bench import engine_arguments
from llmc_runtime.bench.table import Line

PERCENTILES = (10, 25, 50, 75, 90, 99)
LINES = (
    Line("batch", "batch_size", "d"), Line("mean latency, s", "avg_latency", ".4f"),
    Line("p50 latency, s", "p50_latency", ".4f"), Line("p90 latency, s", "p90_latency", ".4f"),
    Line("p99 latency, s", "p99_latency", ".4f"), Line("to the first token, s (p50)", "first_token", ".4f"),
    Line("ms per decode step (p50)", "ms_per_step", ".3f"), Line("output tokens/s", "output_tokens_per_second", ".1f"),
)  # fmt: skip


def run(args: argparse.Namespace, err: IO[str]) -> dict[str, Any]:
    """Run the measurement and return the report.

    The time per decode step is the batch's time minus that of the same batch with one output token, divided by the
    number of tokens between them. Raises LlmcError E670, and the errors of opening a model and of requests.
    """
    from llmc_runtime.api.llm import LLM
    from llmc_runtime.sched.sampling_params import SamplingParams

    engine_arguments.counts(args, "batch_size", "input_len", "output_len", "num_iters")
    batch_seconds: list[float] = []
    first_seconds: list[float] = []
    with LLM(args.model, **engine_arguments.options(args, err)) as llm:

        def seconds(seed: int, tokens: int) -> float:
            """Return the time of a batch of random prompts with this number of output tokens."""
            prompts = engine_arguments.prompts(seed, [args.input_len] * args.batch_size, llm.config.vocab_size)
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start

        for number in range(-args.num_iters_warmup, args.num_iters):
            seed = args.seed + 2 * (number + args.num_iters_warmup)
            first, batch = seconds(seed, 1), seconds(seed + (args.output_len > 1), args.output_len)
            if number < 0:
                continue
            first_seconds.append(first)
            batch_seconds.append(batch)
            if not args.disable_tqdm:
                print(f"llmc: {number + 1} of {args.num_iters}: {batch_seconds[-1]:.4f} s", file=err, flush=True)
    percentiles = {str(p): float(np.percentile(batch_seconds, p)) for p in PERCENTILES}
    middle, steps = float(np.median(first_seconds)), args.output_len - 1
    return {
        "batch_size": args.batch_size, "input_len": args.input_len, "output_len": args.output_len,
        "avg_latency": float(np.mean(batch_seconds)), "latencies": batch_seconds, "percentiles": percentiles,
        **{f"p{p}_latency": value for p, value in percentiles.items()},
        "first_token": middle, "ms_per_step": 1e3 * (percentiles["50"] - middle) / steps if steps else None,
        "output_tokens_per_second": args.batch_size * args.output_len / percentiles["50"],
    }  # fmt: skip


def arguments(add: Any) -> None:
    """Declare the options of the batch, with the names of vLLM's latency benchmark."""
    add("--batch-size", type=int, default=8, metavar="N", help="number of requests in a batch (8)")
    add("--input-len", type=int, default=32, metavar="N", help="length of prompts in tokens (32)")
    add("--output-len", type=int, default=128, metavar="N", help="length of outputs in tokens (128)")
    add("--num-iters", type=int, default=10, metavar="N", help="number of measured batches (10)")
    add("--num-iters-warmup", type=int, default=2, metavar="N", help="number of batches before the measured ones (2)")
    add("--disable-tqdm", action="store_true", help="print no progress")
