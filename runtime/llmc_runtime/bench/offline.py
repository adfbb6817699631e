"""`llmc bench offline`: throughput of LLM.generate, or of AsyncLLM, for requests that are all submitted at once."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from llmc_runtime.bench import engine_arguments
from llmc_runtime.bench.table import Line
from llmc_runtime.bench.workload import Mix

if TYPE_CHECKING:
    from llmc_runtime.outputs import RequestOutput

LINES = (
    Line("seconds", "elapsed_time", ".2f"), Line("requests", "num_requests", "d"),
    Line("prompt tokens", "total_input_tokens", "d"), Line("output tokens", "total_output_tokens", "d"),
    Line("requests/s", "requests_per_second", ".2f"), Line("output tokens/s", "output_tokens_per_second", ".1f"),
    Line("tokens/s", "tokens_per_second", ".1f"), Line("steps", "steps", "d"),
    Line("ms per step", "ms_per_step", ".3f"),
)  # fmt: skip


@dataclass(frozen=True)
class Round:
    """A measured round: its seconds, its number of steps, and the outputs of its requests."""

    seconds: float
    steps: int
    outputs: Sequence[RequestOutput]


def run(args: argparse.Namespace, err: IO[str]) -> dict[str, Any]:
    """Run the measurement and return the report. Raises LlmcError E670 and the errors of models and requests."""
    engine_arguments.counts(args, "num_prompts", "input_len", "output_len", "rounds")
    sizes = Mix("offline", num_prompts=args.num_prompts, input_len=args.input_len, output_len=args.output_len,
                range_ratio=args.range_ratio, prefix_len=args.prefix_len).sizes(str(args.seed))  # fmt: skip
    drawn = [next(sizes) for _ in range(args.num_prompts)]
    rounds = asyncio.run(_async(args, drawn, err)) if args.async_engine else _sync(args, drawn, err)
    best = min(rounds, key=lambda timed: timed.seconds)
    elapsed, steps, outputs = best.seconds, best.steps, rounds[-1].outputs
    read = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "elapsed_time": elapsed, "num_requests": len(outputs), "total_input_tokens": read,
        "total_output_tokens": written, "total_num_tokens": read + written,
        "requests_per_second": len(outputs) / elapsed, "output_tokens_per_second": written / elapsed,
        "tokens_per_second": (read + written) / elapsed, "steps": steps,
        "ms_per_step": 1e3 * elapsed / max(steps, 1), "all_elapsed_times": [timed.seconds for timed in rounds],
        "engine": "AsyncLLM" if args.async_engine else "LLM",
    }  # fmt: skip


def _params(args: argparse.Namespace, drawn: Sequence[tuple[int, int]]) -> list[Any]:
    from llmc_runtime.sched.sampling_params import SamplingParams

    text = not args.disable_detokenize
    return [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=text) for _, n in drawn]


def _prompts(args: argparse.Namespace, drawn: Sequence[tuple[int, int]], vocab_size: int, number: int) -> list[Any]:
    """Return the prompts of a round. Rounds differ, so that none hits the prefixes of the one before."""
    lengths = [length for length, _ in drawn]
    return engine_arguments.prompts(args.seed * 1000 + number, lengths, vocab_size, args.prefix_len)


def _sync(args: argparse.Namespace, drawn: Sequence[tuple[int, int]], err: IO[str]) -> list[Round]:
    from llmc_runtime.api.llm import LLM

    rounds = []
    params = _params(args, drawn)
    with LLM(args.model, **engine_arguments.options(args, err)) as llm:
        for number in range(-args.warmups, args.rounds):
            prompts = _prompts(args, drawn, llm.config.vocab_size, number + args.warmups)
            before, start = llm.stats()["num_steps"], time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=not args.disable_tqdm)
            if number >= 0:
                seconds = time.perf_counter() - start
                rounds.append(Round(seconds, llm.stats()["num_steps"] - before, outputs))
    return rounds


async def _async(args: argparse.Namespace, drawn: Sequence[tuple[int, int]], err: IO[str]) -> list[Round]:
    from llmc_runtime.api.async_llm import AsyncLLM

    rounds = []
    params = _params(args, drawn)
    async with AsyncLLM(args.model, **engine_arguments.options(args, err)) as llm:

        async def last(number: int, prompt: list[int]) -> Any:
            final = None
            async for output in llm.generate(prompt, params[number], str(number), output_kind="final_only"):
                final = output
            return final

        for number in range(-args.warmups, args.rounds):
            prompts = _prompts(args, drawn, llm.config.vocab_size, number + args.warmups)
            before, start = await _steps(llm), time.perf_counter()
            outputs = await asyncio.gather(*(last(i, prompt) for i, prompt in enumerate(prompts)))
            if number >= 0:
                seconds = time.perf_counter() - start
                rounds.append(Round(seconds, await _steps(llm) - before, outputs))
    return rounds


async def _steps(llm: Any) -> int:
    """Return the number of steps so far, after waiting for the engine's statistics to be updated."""
    await asyncio.sleep(0.5)
    return int(llm.stats().get("num_steps", 0))


def arguments(add: Any) -> None:
    """Declare the options of the work, with the names of vLLM's throughput benchmark."""
    add("--num-prompts", type=int, default=256, metavar="N", help="number of requests (256)")
    add("--input-len", type=int, default=512, metavar="N", help="length of prompts in tokens (512)")
    add("--output-len", type=int, default=128, metavar="N", help="length of outputs in tokens (128)")
    add("--range-ratio", type=float, default=0.0, metavar="X", help="relative variation of both lengths, 0 to 1 (0)")
    add("--prefix-len", type=int, default=0, metavar="N", help="length of a shared prefix in tokens (0)")
    add("--rounds", type=int, default=1, metavar="N", help="number of rounds, of which the fastest is reported (1)")
    add("--warmups", type=int, default=1, metavar="N", help="number of rounds before the measured ones (1)")
    add(
        "--async-engine", action="store_true", help="use AsyncLLM, whose engine runs in its own process, instead of LLM"
    )
    add("--disable-detokenize", action="store_true", help="do not convert output tokens to text")
    add("--disable-tqdm", action="store_true", help="print no progress")
