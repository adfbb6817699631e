"""Compare the throughput of several engines of one front with that of one engine, each on its own GPU.

    python -m bench.gpu.instances ARTIFACT [--engines 1,2] [--requests N] [--each] [--input N] [--output N] [--rounds N]

All requests are sent at once through `AsyncLLM`, whose front tokenizes nothing here: prompts are random token ids. The
numbers of engines take turns; the median of the rounds counts. Prints a table and, with --json, JSON.

While prompts are computed and while the last requests end, steps have few rows. One engine that gets its requests in
several waves has this time once, since each wave fills the rows of the one before; engines that share the same requests
have it once each, at the same time. With --each, every engine gets as many requests as one alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path

from llmc_runtime import AsyncLLM, SamplingParams
from llmc_runtime.engine.instances import MeteredOutputs


async def one_round(
    model: Path, engines: int, requests: int, plan: argparse.Namespace
) -> tuple[float, float, list[int]]:
    """Return the output tokens per second of all requests, after a few that capture graphs, the share of one processor
    that the front took meanwhile, and how many requests each of several engines got."""
    more = {"data_parallel_size": engines} if engines > 1 else {}
    async with AsyncLLM(model, enable_prefix_caching=False, **more) as llm:
        vocab = llm.vocab_size
        prompts = [[random.randrange(vocab) for _ in range(plan.input)] for _ in range(2 * requests)]

        async def request(name: str, prompt: list[int], length: int) -> None:
            params = SamplingParams(max_tokens=length, min_tokens=length, ignore_eos=True, temperature=0.0)
            count = 0
            async for output in llm.generate(prompt, params, name):
                count = len(output.outputs[0].token_ids)
            assert count == length, f"{count} tokens of {length}"

        await asyncio.gather(*(request(f"first-{i}", prompts.pop(), 32) for i in range(requests)))
        begin, used = time.perf_counter(), time.process_time()
        tasks = [asyncio.create_task(request(f"counted-{i}", p, plan.output)) for i, p in enumerate(prompts)]
        shares: list[int] = []
        while sum(shares) < requests and not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
            metered = [engine.outputs for engine in llm.engines if isinstance(engine.outputs, MeteredOutputs)]
            shares = [outputs.load.sequences for outputs in metered] or [requests]
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begin
        return requests * plan.output / seconds, (time.process_time() - used) / seconds, shares


def parser() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(prog="python -m bench.gpu.instances", description=(__doc__ or "").splitlines()[0])
    ap.add_argument("model", type=Path, metavar="ARTIFACT")
    ap.add_argument("--engines", type=lambda text: tuple(map(int, text.split(","))), default=(1, 2), metavar="N,N")
    ap.add_argument("--requests", type=int, default=512, metavar="N", help="requests for each number of engines")
    ap.add_argument("--each", action="store_true", help="as many requests for each engine, instead of for all together")
    ap.add_argument("--input", type=int, default=512, metavar="N", help="prompt tokens of a request")
    ap.add_argument("--output", type=int, default=256, metavar="N", help="output tokens of a request")
    ap.add_argument("--rounds", type=int, default=3, metavar="N")
    ap.add_argument("--json", type=Path, metavar="FILE")
    return ap


def main(argv: list[str]) -> int:
    """Measure and print the table."""
    plan = parser().parse_args(argv)
    rates_of: dict[int, list[float]] = {engines: [] for engines in plan.engines}
    for _ in range(plan.rounds):
        for engines in plan.engines:
            requests = plan.requests * (engines if plan.each else 1)
            rate, busy, shares = asyncio.run(one_round(plan.model, engines, requests, plan))
            rates_of[engines].append(rate)
            load = f"{engines} engines, {requests} requests ({' + '.join(map(str, shares))})"
            print(f"{load}: {rate:.0f} output tokens/s, front {busy:.0%} of a processor", flush=True)
    base = statistics.median(rates_of[plan.engines[0]])
    print("| engines | output tokens/s, median | rounds | beside the first |\n|---|---|---|---|")
    for engines, rates in rates_of.items():
        each = ", ".join(f"{rate:.0f}" for rate in rates)
        print(f"| {engines} | {statistics.median(rates):.0f} | {each} | {statistics.median(rates) / base:.2f} |")
    if plan.json:
        plan.json.write_text(json.dumps({str(engines): rates for engines, rates in rates_of.items()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
