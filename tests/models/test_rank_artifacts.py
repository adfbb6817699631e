"""Artifacts of several ranks on the CPU: tokens equal those of the whole model, drawn and greedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from draw import of_test
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams
from models.cases import LISTED, Case, further, sample
from models.kit import fails, save
from models.recurrent_cases import RECURRENT

from llmc.driver import compile_model
from llmc.options import Options

DEMO = Path(__file__).parents[2] / "examples" / "demo-model-small"
STEPS = 12
SIZES = {"intermediate_size": 97, "vocab_size": 321}
ODD = replace(LISTED[0], name="odd", config=LISTED[0].config | SIZES)  # padded with zeros
TIED = replace(ODD, name="tied-odd", config=ODD.config | {"tie_word_embeddings": True})
PARAMS = (
    SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1, seed=7, max_tokens=STEPS, ignore_eos=True, repetition_penalty=1.2),
)


def compiled(model: Path, ranks: int, **options: int) -> Path:
    """The model compiled for this number of ranks."""
    limits = {"max_model_len": 96, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    out = model.parent / f"ranks{ranks}.llmc"
    compile_model(model, out, Options(cache=CACHE, reuse=False, tensor_parallel_size=ranks, **(limits | options)))
    return out


def tokens_of(artifact: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The tokens that follow each prompt, greedily and drawn."""
    llm = LLM(artifact, say=lambda text: None, threads=1)
    try:
        work = [({"prompt_token_ids": prompt}, params) for prompt in prompts for params in PARAMS]
        outs = llm.generate([prompt for prompt, _ in work], [params for _, params in work], use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outs]
    finally:
        llm.close()


@pytest.mark.drawn
@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("case", (LISTED[0], ODD, TIED, *sample(3), *further(2), *RECURRENT), ids=lambda c: c.name)
def test_ranks_sample_the_tokens_of_the_whole_model(case: Case, ranks: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(of_test())
    save(case, tmp_path / "model", 3, torch.float32)
    prompts = [rng.integers(3, 320, n).tolist() for n in (1, 9, 45)]
    prompts.append([*prompts[-1][:32], 5, 6, 7])  # shares two pages with the one before
    length = min(case.trace.get("max_positions", 96), 96)
    one, several = (compiled(tmp_path / "model", n, max_model_len=length) for n in (1, ranks))
    assert tokens_of(several, prompts) == tokens_of(one, prompts)


@pytest.mark.slow
def test_a_rank_stores_its_part_of_a_tied_embedding_once(tmp_path: Path) -> None:
    save(TIED, tmp_path / "model", 3, torch.float32)
    artifact = compiled(tmp_path / "model", 2)
    for rank in range(2):
        with safetensors.safe_open(artifact / "weights" / f"rank{rank}" / "00000.safetensors", "np") as file:
            assert len([name for name in file.keys() if "embed_tokens" in name]) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "hip:gfx942", "tensor_parallel_size": 2}, ("hip:gfx942", "AMD GPUs are not supported")),
        ({"pipeline": "serve, after page-attention: shard{ranks=2}"}, ("shard", "--tensor-parallel-size")),
    ],
)
def test_refused_compiles(options: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "model.llmc"
    fails("E439", *words, do=lambda: compile_model(DEMO, out, Options(cache=CACHE, **options)))
    assert not out.exists()


def test_sizes_that_do_not_divide_are_refused_with_those_that_do(tmp_path: Path) -> None:
    out, options = tmp_path / "model.llmc", Options(cache=CACHE, tensor_parallel_size=3)
    fails("E437", "4 query heads", "3 ranks", "1, 2, 4", do=lambda: compile_model(DEMO, out, options))
