"""Compiled artifacts against transformers: every token and its log-probability, over chunked and shared prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cache import CACHE, with_kernels
from llmc_runtime import LLM, SamplingParams
from models.cases import FURTHER, LISTED, SEED, Case, sample
from models.hub_stand_in import COMMIT, HubStandIn, serving
from models.kit import loaded, save

from llmc.driver import compile_model
from llmc.frontend.hub import Hub
from llmc.options import Options

pytestmark = pytest.mark.drawn(seconds=10)
STEPS = 10
LENGTHS = (1, 7, 45)


def check(llm: LLM, model: Any, prompts: list[list[int]], tolerance: float) -> None:
    """Greedy tokens are transformers' best ones up to ties, and their log-probabilities agree."""
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=4)
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for prompt, out in zip(prompts, outs, strict=True):
        ids = list(out.outputs[0].token_ids)
        assert len(ids) == STEPS
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        want = torch.log_softmax(logits, -1).numpy()
        for row, token, entry in zip(want, ids, out.outputs[0].logprobs, strict=True):
            scale = max(1.0, float(np.abs(row[token])))
            assert row[token] >= row.max() - tolerance * scale, "not the best token"
            for other, found in entry.items():
                assert abs(found.logprob - row[other]) < tolerance * scale


def run_case(case: Case, tmp_path: Path, dtype: torch.dtype, tolerance: float, **options: Any) -> None:
    print(f"seed {SEED}")
    model = save(case, tmp_path / "model", SEED, dtype)
    length = min(case.trace.get("max_positions", 96), 96)
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 4}
    o = Options(cache=CACHE, reuse=False, max_model_len=length, **(limits | options))
    compile_model(tmp_path / "model", tmp_path / "model.llmc", o)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(3, 320, n).tolist() for n in LENGTHS]
    prompts.append([*prompts[-1][:32], 5, 6, 7])  # shares two pages with the one before
    llm = LLM(tmp_path / "model.llmc", say=lambda text: None)
    try:
        check(llm, model.float(), prompts, tolerance)
        check(llm, model, prompts[::-1], tolerance)  # from the prefix cache
    finally:
        llm.close()


@pytest.mark.parametrize("case", LISTED, ids=lambda c: c.name)
def test_listed(case: Case, tmp_path: Path) -> None:
    run_case(case, tmp_path, torch.float32, 1e-3)


@pytest.mark.parametrize("case", sample(2, without="rope-longrope-long"), ids=lambda c: c.name)
def test_sampled_from_the_others(case: Case, tmp_path: Path) -> None:
    """Without the long set of frequencies: transformers itself takes the short one for prompts this short."""
    run_case(case, tmp_path, torch.float32, 1e-3)


@pytest.mark.parametrize("name", ["bloom", "falcon-alibi-one-key"])
def test_a_bias_by_distance(name: str, tmp_path: Path) -> None:
    """In chunks, from the prefix cache, and next to other rows: heads have their own slopes."""
    run_case(next(c for c in FURTHER if c.name == name), tmp_path, torch.float32, 1e-3)


def test_another_target(tmp_path: Path) -> None:
    """One that is drawn in every run; run_case prints the seed."""
    target = ("cpu:portable", "cpu:x86-64-v3")[SEED % 2]
    run_case(LISTED[2], tmp_path, torch.float32, 1e-3, target=target)


def test_bfloat16(tmp_path: Path) -> None:
    run_case(LISTED[0], tmp_path, torch.bfloat16, 8e-2)


def bfloat16_errors(case: Case, tmp_path: Path) -> tuple[float, float]:
    """Return the errors of log-probabilities in bfloat16, ours and transformers', against the same weights in float32;
    medians over prompts."""
    print(f"seed {SEED}")
    save(case, tmp_path / "model", SEED, torch.bfloat16)
    rough, exact = (loaded(tmp_path / "model", dtype) for dtype in (torch.bfloat16, torch.float32))
    options = Options(cache=CACHE, reuse=False, max_model_len=96, max_num_batched_tokens=32, max_num_seqs=4)
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(3, 320, n).tolist() for n in rng.integers(1, 60, 24)]
    llm = LLM(tmp_path / "model.llmc", say=lambda text: None)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20)
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    llm.close()
    errors = []
    for prompt, out in zip(prompts, outs, strict=True):
        (entry,) = out.outputs[0].logprobs
        with torch.no_grad():
            theirs, truth = (
                torch.log_softmax(m(torch.tensor([prompt]), use_cache=False).logits[0, -1].float(), -1)[list(entry)]
                for m in (rough, exact)
            )
        ours = torch.tensor([e.logprob for e in entry.values()])
        errors.append([float((x - truth).square().mean()) ** 0.5 for x in (ours, theirs)])
    ours, theirs = np.median(errors, axis=0)
    return float(ours), float(theirs)


def test_bfloat16_is_no_rougher_than_transformers(tmp_path: Path) -> None:
    ours, theirs = bfloat16_errors(LISTED[0], tmp_path)
    assert ours < 1.4 * theirs


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (7, 3), (1, 4)])
def test_small_limits(tokens: int, rows: int, tmp_path: Path) -> None:
    """Fewer tokens a step than rows, and fewer of both than the example that is traced."""
    limits = {"max_num_batched_tokens": tokens, "max_num_seqs": rows}
    run_case(LISTED[4], tmp_path, torch.float32, 1e-3, **limits)


def test_a_model_by_id(tmp_path: Path) -> None:
    """Its artifact records the commit, also if it was reused from the cache, and the default sampling parameters."""
    save(LISTED[0], tmp_path / "model", SEED)
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    limits = {"max_model_len": 96, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    out = tmp_path / "out.llmc"
    with serving(HubStandIn({"someone/tiny": tmp_path / "model"})) as hub:
        options = Options(cache=with_kernels(tmp_path / "cache"), hub=Hub(hub.url, tmp_path / "hub"), **limits)
        for _ in range(2):
            summary = compile_model("someone/tiny@v1", out, options, force=True)
            source = json.loads((out / "manifest.json").read_text())["source"]
            assert (source["name"], source["revision"]) == ("someone/tiny", COMMIT)
    assert "reuse" in summary.seconds
    notes = json.loads((out / "report" / "compile.json").read_text())["notes"]
    assert any("temperature 0.5" in n for n in notes)
    with LLM(out, say=lambda text: None) as llm:
        assert llm.get_default_sampling_params().temperature == 0.5
