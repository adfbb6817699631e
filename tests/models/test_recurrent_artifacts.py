"""Compiled artifacts of models with recurrent layers against transformers: in chunks, in batches, on rows used before,
and with drafts that are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM
from models.cases import Case
from models.kit import save
from models.recurrent_cases import RECURRENT
from models.test_artifacts import bfloat16_errors, check
from models.test_draft_model import accepted
from models.test_speculation import eager, quiet, requests, results  # noqa: F401

from llmc.driver import compile_model
from llmc.options import Options

LENGTHS = (1, 2, 7, 45, 71, 3, 33)
ALWAYS = "qwen3_5_text"  # the others are drawn; test_recurrent_prefixes.py shares its kernels
SLOW = pytest.mark.slow(seconds=10)
CASES = [pytest.param(c, id=c.name, marks=() if c.name == ALWAYS else SLOW) for c in RECURRENT]
LIMITS: dict[str, Any] = {"max_model_len": 112, "max_num_batched_tokens": 24, "max_num_seqs": 4}


def artifact(case: Case, folder: Path, **options: Any) -> tuple[Any, Path]:
    """Save and compile a model; return transformers' model and the artifact."""
    model = save(case, folder / "model", SEED)
    out = folder / "model.llmc"
    compile_model(folder / "model", out, Options(cache=CACHE, reuse=False, **(LIMITS | options)))
    return model, out


def named(name: str) -> Case:
    return next(c for c in RECURRENT if c.name == name)


def drawn_prompts() -> list[list[int]]:
    rng = np.random.default_rng(SEED)
    return [rng.integers(3, 320, n).tolist() for n in LENGTHS]


@pytest.mark.parametrize("case", CASES)
def test_logprobs_equal_transformers(case: Case, tmp_path: Path) -> None:
    """Prompts are computed in chunks of at most 24 tokens next to decoding rows, on rows that others used before."""
    print(f"seed {SEED}")
    model, out = artifact(case, tmp_path)
    with LLM(out, say=quiet, enable_prefix_caching=False) as llm:
        check(llm, model, drawn_prompts(), 1e-3)
        check(llm, model, drawn_prompts()[::-1], 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "lfm2", "bamba"])
def test_bfloat16_is_no_rougher_than_transformers(name: str, tmp_path: Path) -> None:
    ours, theirs = bfloat16_errors(named(name), tmp_path)
    assert ours < 1.4 * theirs


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "bamba"])
def test_company_drafts_and_preemption_change_nothing(name: str, tmp_path: Path) -> None:
    """Results are the same batched, preempted, and with drafts by lookup, of which some are rejected."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 128, "speculate": 4}
    _, out = artifact(named(name), tmp_path, **limits)
    prompts, params = requests()
    options: dict[str, Any] = {"say": quiet, "enable_prefix_caching": False}
    with LLM(out, **options) as llm:
        want = results(llm, prompts, params)
        alone = [results(llm, [p], [s])[0] for p, s in zip(prompts[:6], params[:6], strict=True)]
    assert want[:6] == alone
    page = json.loads((out / "manifest.json").read_text())["kv"]["bytes_per_page"]
    for method in ("ngram:4", "suffix:4"):
        with LLM(out, speculate=method, kv_cache_memory_bytes=12 * page, **options) as llm:
            for _ in range(2):
                assert results(llm, prompts, params) == want, method
            verified, right = accepted(llm)
            assert 0 < right < verified and llm.stats()["num_preemptions"] > 0
