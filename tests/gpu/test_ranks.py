"""Ranks on two or more GPUs: collectives on random data, small models beside one rank, ranks that fail.

python tests/gpu/test_ranks.py                                   compile the models (on any machine): build/gpu/ranks
pytest tests/gpu/test_ranks.py --confcutdir tests/gpu            about a minute
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

from draw import SEED  # noqa: E402
from gpu import rank_work  # noqa: E402
from llmc_runtime import LLM, AsyncLLM, RequestOutput, SamplingParams  # noqa: E402
from llmc_runtime.format.errors import LlmcError  # noqa: E402
from models.cases import LISTED, SMALL, Case  # noqa: E402

from bench.gpu.group import Work, compile_graph, run_group  # noqa: E402

FOLDER = ROOT / "build" / "gpu" / "ranks"
WIDE = SMALL | {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024}
MODELS = {"llama-float32": (LISTED[0], "float32"), "wide-bfloat16": (Case("wide", "llama", WIDE), "bfloat16")}
RANKS = 2
STEPS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(temperature=1, seed=7, max_tokens=STEPS, ignore_eos=True, repetition_penalty=1.2)


def path_of(name: str, ranks: int) -> Path:
    return FOLDER / f"{name}-{ranks}.llmc"


def make(name: str) -> None:
    """Compile the artifacts of a model that are missing: for one rank, and for several."""
    missing = [r for r in (1, RANKS) if not (path_of(name, r) / "manifest.json").is_file()]
    if not missing:
        return
    import torch
    from models.kit import save

    from llmc.driver import compile_model
    from llmc.options import Options

    case, dtype = MODELS[name]
    with tempfile.TemporaryDirectory() as scratch:
        save(case, Path(scratch) / "model", 5, getattr(torch, dtype))
        for ranks in missing:
            options = Options(
                target="cuda:sm_90", dtype=dtype, max_model_len=128, max_num_seqs=20, max_num_batched_tokens=64,
                cache=FOLDER.parent / "cache", reuse=False, tensor_parallel_size=ranks,
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


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpus() < RANKS, reason=f"fewer than {RANKS} GPUs")]


@pytest.fixture(scope="module")
def work() -> Work:
    return compile_graph(rank_work.text(RANKS), FOLDER.parent / "cache")


@pytest.fixture(scope="module")
def in_parts() -> Work:
    """The same, with sums in parts, which two ranks do not need."""
    return compile_graph(rank_work.text(RANKS), FOLDER.parent / "cache", {"parts": RANKS})


def test_collectives_on_changing_data(work: Work) -> None:
    print(f"SEED={SEED}")
    assert run_group(RANKS, rank_work.collectives, work, SEED, 120) == [120] * RANKS


def test_collectives_in_bursts(work: Work) -> None:
    assert run_group(RANKS, rank_work.bursts, work, SEED, 2000) == [0] * RANKS


def test_sums_in_parts(in_parts: Work) -> None:
    assert run_group(RANKS, rank_work.collectives, in_parts, SEED + 1, 60) == [60] * RANKS
    assert run_group(RANKS, rank_work.bursts, in_parts, SEED + 1, 1000) == [0] * RANKS


def test_a_rank_that_never_comes(work: Work) -> None:
    (seconds, error), _ = run_group(RANKS, rank_work.lonely, work)
    assert error.startswith("E119") and "0.5 s" in error and 0.4 < seconds < 3


def test_the_host_ends_a_group(work: Work) -> None:
    (seconds, error), _ = run_group(RANKS, rank_work.cancelled, work)
    assert error.startswith("E119") and seconds < 1


def outputs(artifact: Path, prompts: list[list[int]]) -> list[tuple[list[int], list[dict[int, float]]]]:
    """The tokens after each prompt, greedy and drawn, with log-probabilities of the greedy ones."""
    llm = LLM(artifact, say=lambda text: None)
    try:
        todo = [(p, params) for p in prompts for params in (GREEDY, DRAWN)]
        outs = llm.generate([{"prompt_token_ids": p} for p, _ in todo], [s for _, s in todo], use_tqdm=False)
        return [
            (list(o.outputs[0].token_ids), [{k: v.logprob for k, v in x.items()} for x in o.outputs[0].logprobs or []])
            for o in outs
        ]
    finally:
        llm.close()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_one_rank(name: str) -> None:
    """In float32, all tokens and log-probabilities; in bfloat16, log-probabilities up to the first other token, whose
    errors are those of rounding partial sums.
    """
    make(name)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(3, 320, n).tolist() for n in (1, 9, 45, 60, 2, 30)]
    prompts.append([*prompts[2][:32], 5, 6, 7])
    one, two = (outputs(path_of(name, ranks), prompts) for ranks in (1, RANKS))
    largest, mean = (2e-4, 1e-4) if "float32" in name else (0.6, 0.06)
    errors = []
    for (tokens, logprobs), (others, other_logprobs) in zip(one, two, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, others)) if a != b), len(tokens))
        if "float32" in name:
            assert same == len(tokens), f"SEED={SEED}: {tokens} {others}"
        for a, b in zip(logprobs[:same], other_logprobs[:same]):
            for token in a.keys() & b.keys():
                errors.append(abs(a[token] - b[token]))
    assert len(errors) > 60 and max(errors) < largest and np.mean(errors) < mean, f"SEED={SEED}: {sorted(errors)[-5:]}"


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


def test_a_killed_rank_ends_the_group() -> None:
    name = "llama-float32"
    make(name)
    llm = LLM(path_of(name, RANKS), say=lambda text: None)
    (pid,) = ranks_of(os.getpid())
    killed = []

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
    llm = LLM(path_of(name, RANKS), say=lambda text: None)  # the GPUs are usable
    assert llm.generate([{"prompt_token_ids": [5, 6, 7]}], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.close()


def test_a_server_s_engine_starts_again_after_a_rank_was_killed() -> None:
    name = "llama-float32"
    make(name)

    async def answer(llm: AsyncLLM) -> RequestOutput | LlmcError:
        try:
            async for out in llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, "r", output_kind="final_only"):
                last = out
            return last
        except LlmcError as e:
            return e

    async def main() -> None:
        async with AsyncLLM(path_of(name, RANKS), say=lambda line: None, restart_delay=0.0) as llm:
            first = await answer(llm)
            assert isinstance(first, RequestOutput)
            for restarts in (1, 2):
                os.kill(ranks_of(llm.engines[0].pid or 0)[0], signal.SIGKILL)
                async with asyncio.timeout(60):
                    while llm.restarts < restarts or llm.engines[0].state != "ready":
                        await asyncio.sleep(0.02)
                again = await answer(llm)
                assert isinstance(again, RequestOutput)
                assert again.outputs[0].token_ids == first.outputs[0].token_ids

    asyncio.run(main())


if __name__ == "__main__":
    for model in MODELS:
        make(model)
