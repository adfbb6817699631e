"""A request's tokens do not depend on other requests: batched, chunked, preempted or cached, they are the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, LlmcError, SamplingParams
from llmc_runtime.exec.canary import Canary
from models.cases import LISTED
from models.kit import save

from llmc.artifact.amend import put_file
from llmc.driver import compile_model
from llmc.measure.verify_artifact import verify_artifact
from llmc.options import Options


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A qwen3-like model in float32, 6 rows, 24 tokens a step."""
    folder = tmp_path_factory.mktemp("batching")
    save(LISTED[3], folder / "model", SEED)
    options = Options(cache=CACHE, reuse=False, max_num_seqs=6, max_num_batched_tokens=24)
    compile_model(folder / "model", folder / "model.llmc", options)
    yield folder / "model.llmc"


def requests() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Prompts of 1 to 90 tokens, half of them with a shared beginning; every kind of sampling."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    shared = rng.integers(3, 320, 40).tolist()
    prompts, params = [], []
    for i in range(24):
        own = rng.integers(3, 320, int(rng.integers(1, 50))).tolist()
        prompts.append({"prompt_token_ids": shared + own if i % 2 else own})
        kind = {
            "temperature": float(rng.choice([0.0, 0.7, 1.3])),
            "top_k": int(rng.choice([0, 8])),
            "top_p": float(rng.choice([1.0, 0.85])),
            "min_p": float(rng.choice([0.0, 0.02])),
            "repetition_penalty": float(rng.choice([1.0, 1.3])),
            "frequency_penalty": float(rng.choice([0.0, 0.4])),
            "presence_penalty": float(rng.choice([0.0, 0.3])),
            "min_tokens": int(rng.choice([0, 5])),
            "max_tokens": int(rng.integers(6, 24)),
            "seed": i,
        }
        params.append(SamplingParams(**kind))
    return prompts, params


def test_log_probabilities_after_a_step_of_the_same_work(artifact: Path) -> None:
    """A request gets the row of one that wants none, and its step has the same work."""
    with LLM(artifact, say=lambda text: None) as llm:
        for count in (None, 2, None):
            params = SamplingParams(temperature=0, max_tokens=1, logprobs=count)
            found = llm.generate([{"prompt_token_ids": [5]}], params, use_tqdm=False)[0].outputs[0].logprobs
            assert (found is None) == (count is None)


def tokens(llm: LLM, prompts: list[dict[str, list[int]]], params: list[SamplingParams]) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


def quiet(text: str) -> None:
    return


def test_company_changes_nothing(artifact: Path) -> None:
    prompts, params = requests()
    roomy = LLM(artifact, say=quiet, enable_prefix_caching=False)
    alone = [tokens(roomy, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    assert tokens(roomy, prompts, params) == alone, "batched"
    roomy.close()
    page = json.loads((artifact / "manifest.json").read_text())["kv"]["bytes_per_page"]
    tight = LLM(artifact, say=quiet, kv_cache_memory_bytes=14 * page)
    assert tokens(tight, prompts, params) == alone, "with preemption and the prefix cache"
    assert tokens(tight, prompts[::-1], params[::-1]) == alone[::-1], "from a warm cache"
    stats = tight.stats()
    assert stats["num_preemptions"] > 0 and stats["prefix_cache_hits"] > 0
    tight.close()


def test_threads_change_nothing(artifact: Path) -> None:
    prompts, params = requests()
    found = []
    for threads in (1, 3):
        llm = LLM(artifact, say=quiet, threads=threads)
        found.append(tokens(llm, prompts[:6], params[:6]))
        llm.close()
    assert found[0] == found[1]


def test_a_canary_is_required_on_request(artifact: Path, tmp_path: Path) -> None:
    """The canary of `verify --record` is compared at load; that of another model, or a missing one, is an error."""
    folder = tmp_path / "copy.llmc"
    shutil.copytree(artifact, folder)
    with pytest.raises(LlmcError, match="has no canary"):
        LLM(folder, say=quiet, canary=True)
    assert verify_artifact(folder, record=True)["ok"]
    with LLM(folder, say=quiet, canary=True) as llm:
        prompts, params = requests()
        with LLM(artifact, say=quiet) as plain:
            assert tokens(llm, prompts[:4], params[:4]) == tokens(plain, prompts[:4], params[:4])
    recorded = Canary.load((folder / "canary.json").read_bytes())
    runs = tuple(replace(r, tokens=tuple((t + 1) % 320 for t in r.tokens)) for r in recorded.runs)
    wrong = replace(recorded, runs=runs)
    put_file(folder, "canary.json", wrong.dump())
    with pytest.raises(LlmcError, match="the canary fails"):
        LLM(folder, say=quiet, canary=True)
