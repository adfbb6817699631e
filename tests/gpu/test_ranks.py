"""Ranks on two or more GPUs: collectives on random data, small models compared with one rank, ranks that fail.

python tests/gpu/test_ranks.py [--ranks N...] [--models NAME...]     compile on any machine what is missing
pytest tests/gpu/test_ranks.py --confcutdir tests/gpu                about a minute for each number of ranks

Models and kernels of collectives are in build/gpu/ranks, a few MB, which can be copied to the machine with the GPUs.
What is missing there is compiled by the test that needs it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

from draw import SEED  # noqa: E402
from gpu import rank_work  # noqa: E402
from llmc_runtime import LLM, AsyncLLM, RequestOutput, SamplingParams  # noqa: E402
from llmc_runtime.device.cuda.nccl_group import Nccl  # noqa: E402
from llmc_runtime.format.errors import LlmcError  # noqa: E402
from models.cases import LISTED, SMALL, Case  # noqa: E402
from models.recurrent_cases import RECURRENT  # noqa: E402

from bench.gpu.group import Work, compile_graph, run_group  # noqa: E402

FOLDER = ROOT / "build" / "gpu" / "ranks"
WIDE = SMALL | {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024}
MOE = WIDE | {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
RANKS = (2, 4)  # with four, ranks share the two KV heads of every model


class Model(NamedTuple):
    """A model to compile, and the errors of log-probabilities that are allowed: the largest, and the mean. `routed` is
    the share of errors that may be larger.

    Activations in float8 have a scale for each token and rank, so that other ranks round them to other numbers: errors
    are those of float8, 2**-4, not of bfloat16, 2**-8. The same products in torch, of 4 sets of prompts on two and four
    ranks, differ by 0.30 to 0.35, at most 2.1, where those in bfloat16 differ by 0.04, at most 0.32.

    In a mixture, rounding sends a token whose experts are nearly tied to another expert, so that a few errors are those
    of other experts: on two ranks of a CPU, 8 sets of prompts differ by 0.04 to 0.06, at most 3.9.
    """

    case: Case
    dtype: str
    largest: float
    mean: float
    quant: str = "none"
    routed: float = 0.0
    kv_cache: str = "auto"
    collectives: str = "peer"


MODELS = {
    "llama-float32": Model(LISTED[0], "float32", 2e-4, 1e-4),
    "tied-float32": Model(LISTED[1], "float32", 2e-4, 1e-4),
    "wide-bfloat16": Model(Case("wide", "llama", WIDE), "bfloat16", 1.2, 0.06),
    "mixture-bfloat16": Model(Case("mixture", "qwen3_moe", MOE), "bfloat16", 0.6, 0.1, routed=0.05),
    "wide-int4": Model(Case("wide", "llama", WIDE), "bfloat16", 1.2, 0.1, "int4"),
    "wide-fp8-cache": Model(Case("wide", "llama", WIDE), "bfloat16", 1.2, 0.1, kv_cache="fp8"),
    "recurrent-float32": Model(next(c for c in RECURRENT if c.name == "qwen3_5_text"), "float32", 2e-3, 2e-4),
    "wide-fp8": Model(Case("wide", "llama", WIDE), "bfloat16", 4.0, 0.8, "fp8"),
    "llama-float32-nccl": Model(LISTED[0], "float32", 2e-4, 1e-4, collectives="nccl"),
    "wide-bfloat16-nccl": Model(Case("wide", "llama", WIDE), "bfloat16", 1.2, 0.06, collectives="nccl"),
}
UNIT = 1 / 16  # of weights: files of few different numbers can be compressed
STEPS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=8)
DRAWN = SamplingParams(temperature=1, seed=7, max_tokens=STEPS, ignore_eos=True, repetition_penalty=1.2)


def path_of(name: str, ranks: int) -> Path:
    return FOLDER / f"{name}-{ranks}.llmc"


def make(name: str, counts: Sequence[int]) -> None:
    """Compile the artifacts of a model for these numbers of ranks that are missing."""
    missing = [r for r in counts if not (path_of(name, r) / "manifest.json").is_file()]
    if not missing:
        return
    import torch
    from models.kit import build

    from llmc.driver import compile_model
    from llmc.options import Options

    model = MODELS[name]
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = build(model.case, 5, getattr(torch, model.dtype))
        for weight in checkpoint.parameters():
            weight.data = (weight.data / UNIT).round() * UNIT
        checkpoint.save_pretrained(Path(scratch) / "model")
        for ranks in missing:
            options = Options(
                target="cuda:sm_90", dtype=model.dtype, max_model_len=128, max_num_seqs=20, max_num_batched_tokens=64,
                cache=FOLDER.parent / "cache", reuse=False, tensor_parallel_size=ranks, quant=model.quant,
                kv_cache_dtype=model.kv_cache, collectives=model.collectives if ranks > 1 else "peer",
            )  # fmt: skip
            compile_model(Path(scratch) / "model", path_of(name, ranks), options, force=True)


def gpus() -> int:
    try:
        from cuda.bindings import driver
    except ImportError:
        return 0
    try:
        return int(driver.cuDeviceGetCount()[1]) if not driver.cuInit(0)[0] else 0
    except RuntimeError:
        return 0


def needs_nccl(name: str) -> None:
    """Skip the test if the model's ranks use NCCL, and it is not installed."""
    if MODELS[name].collectives == "nccl":
        try:
            Nccl()
        except LlmcError as error:
            pytest.skip(error.cause)


pytestmark = pytest.mark.gpu


@pytest.fixture(params=RANKS, scope="module", ids="{}ranks".format)
def ranks(request: pytest.FixtureRequest) -> int:
    """The number of ranks, each on a GPU of its own."""
    count: int = request.param
    if gpus() < count:
        pytest.skip(f"fewer than {count} GPUs")
    return count


@functools.cache
def work(ranks: int) -> Work:
    return compile_graph(rank_work.text(ranks), FOLDER / "cache")


@functools.cache
def in_parts(ranks: int) -> Work:
    """The same, with sums in parts, which two ranks do not need."""
    return compile_graph(rank_work.text(ranks), FOLDER / "cache", {"parts": ranks})


def test_collectives_on_changing_data(ranks: int) -> None:
    print(f"SEED={SEED}")
    assert run_group(ranks, rank_work.collectives, work(ranks), SEED, 120 // ranks) == [120 // ranks] * ranks


def test_collectives_in_bursts(ranks: int) -> None:
    assert run_group(ranks, rank_work.bursts, work(ranks), SEED, 2000) == [0] * ranks


def test_sums_in_parts(ranks: int) -> None:
    assert run_group(ranks, rank_work.collectives, in_parts(ranks), SEED + 1, 30) == [30] * ranks
    assert run_group(ranks, rank_work.bursts, in_parts(ranks), SEED + 1, 1000) == [0] * ranks


def test_a_rank_that_never_comes(ranks: int) -> None:
    (seconds, error), *_ = run_group(ranks, rank_work.lonely, work(ranks))
    assert error.startswith("E119") and "0.5 s" in error and 0.4 < seconds < 3


def test_the_host_ends_a_group(ranks: int) -> None:
    (seconds, error), *_ = run_group(ranks, rank_work.cancelled, work(ranks))
    assert error.startswith("E119") and seconds < 1


Output = tuple[list[int], list[dict[int, float]]]


@functools.cache
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(SEED)
    some: list[list[int]] = [rng.integers(3, 320, n).tolist() for n in (1, 9, 45, 60, 2, 30)]
    return [*some, [*some[2][:32], 5, 6, 7]]


@functools.cache
def outputs(name: str, ranks: int) -> list[Output]:
    """The tokens after each prompt, greedy and drawn, with log-probabilities of the greedy ones."""
    make(name, [ranks])
    llm = LLM(path_of(name, ranks), say=lambda text: None)
    try:
        todo = [(p, params) for p in prompts() for params in (GREEDY, DRAWN)]
        outs = llm.generate([{"prompt_token_ids": p} for p, _ in todo], [s for _, s in todo], use_tqdm=False)
        return [
            (list(o.outputs[0].token_ids), [{k: v.logprob for k, v in x.items()} for x in o.outputs[0].logprobs or []])
            for o in outs
        ]
    finally:
        llm.close()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_one_rank(name: str, ranks: int) -> None:
    """In float32, all tokens and log-probabilities. In bfloat16, log-probabilities up to the first other token, whose
    errors are those of rounding partial sums, and a greedy token differs only where two are nearly tied. Most of the
    eight likeliest tokens of a step are the same.
    """
    needs_nccl(name)
    model, errors, steps = MODELS[name], [], 0
    for (tokens, logprobs), (others, other_logprobs) in zip(outputs(name, 1), outputs(name, ranks), strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, others)) if a != b), len(tokens))
        if model.dtype == "float32":
            assert same == len(tokens), f"SEED={SEED}: {tokens} {others}"
        if same < len(logprobs):
            best, other = logprobs[same][tokens[same]], logprobs[same].get(others[same], -np.inf)
            assert model.routed or best - other < 2 * model.largest, (
                f"SEED={SEED}: step {same}: {logprobs[same]} {others[same]}"
            )
        for a, b in zip(logprobs[: same + 1], other_logprobs[: same + 1]):
            errors += [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
            steps += 1
    assert steps >= len(prompts()) and len(errors) >= 5 * steps, f"SEED={SEED}: {len(errors)} in {steps} steps"
    larger = np.mean(np.array(errors) >= model.largest)
    shown = f"errors of {np.mean(errors):.2g}, at most {max(errors):.2g}, {larger:.2%} above {model.largest}"
    print(f"{name}, {ranks} ranks: {shown}")
    assert larger <= model.routed and np.mean(errors) < model.mean, f"SEED={SEED}: {shown}"


def ranks_of(parent: int) -> list[int]:
    """The processes of the other ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"rank_process" in (entry / "cmdline").read_bytes():
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.parametrize("name", ["llama-float32", "llama-float32-nccl"])
def test_a_killed_rank_ends_the_group(name: str, ranks: int) -> None:
    needs_nccl(name)
    make(name, [ranks])
    llm = LLM(path_of(name, ranks), say=lambda text: None)
    others = ranks_of(os.getpid())
    assert len(others) == ranks - 1
    pid, killed = random.Random(SEED).choice(others), []

    def kill() -> None:
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        killed.append(time.monotonic())

    thread = threading.Thread(target=kill)
    thread.start()
    many = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with pytest.raises(LlmcError) as failed:
        while True:
            llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 8, many, use_tqdm=False)
    assert time.monotonic() - killed[0] < 5
    assert failed.value.code == "E119" and "SIGKILL" in failed.value.cause
    thread.join()
    llm.close()
    assert not ranks_of(os.getpid())
    llm = LLM(path_of(name, ranks), say=lambda text: None)  # the GPUs are usable
    assert llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.close()


def test_a_server_s_engine_starts_again_after_a_rank_was_killed(ranks: int) -> None:
    name = "llama-float32"
    make(name, [ranks])

    async def answer(llm: AsyncLLM) -> RequestOutput | LlmcError:
        try:
            async for out in llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, "r", output_kind="final_only"):
                last = out
            return last
        except LlmcError as e:
            return e

    async def main() -> None:
        async with AsyncLLM(path_of(name, ranks), say=lambda line: None, restart_delay=0.0) as llm:
            first = await answer(llm)
            assert isinstance(first, RequestOutput)
            for restarts in (1, 2):
                os.kill(ranks_of(llm.engines[0].pid or 0)[-1], signal.SIGKILL)
                async with asyncio.timeout(60):
                    while llm.restarts < restarts or llm.engines[0].state != "ready":
                        await asyncio.sleep(0.02)
                again = await answer(llm)
                assert isinstance(again, RequestOutput)
                assert again.outputs[0].token_ids == first.outputs[0].token_ids

    asyncio.run(main())


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description="Compile what these tests need into build/gpu/ranks.")
    ap.add_argument("--ranks", type=int, nargs="+", default=RANKS, choices=RANKS, metavar="N", help="(2 4)")
    ap.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME", help="(all)")
    asked = ap.parse_args()
    for count in asked.ranks:
        work(count), in_parts(count)
    for each in asked.models:
        make(each, [1, *asked.ranks])
