"""All methods of drafting, and models that pool, give the same results with two ranks as with one.

That drafts of a head are those of the published algorithm is tested in test_eagle.py, with two ranks, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM
from models.cases import LISTED
from models.eagle import save_head, tensors
from models.kit import save
from models.mtp import case_of, save_with_layer
from models.test_draft_model import LIMITS, accepted, find
from models.test_pooling import BERT, CLS, CROSS, DECODER, LENGTH, QWEN, ROBERTA, ROWS, VOCAB, Model, numbers
from models.test_pooling import save as save_pooled
from models.test_speculation import eager, quiet, requests, results  # noqa: F401

from llmc.driver import compile_model
from llmc.options import Options


def tokens_and_drafts(artifact: Path, prompts: list[Any], params: list[Any], method: str) -> Any:
    """The tokens of each output, twice (the second time from the prefix cache), and the numbers of drafts."""
    with LLM(artifact, say=quiet, threads=1, speculate=method) as llm:
        found = [[one[:3] for one in results(llm, prompts, params)] for _ in range(2)]
        return found, accepted(llm)


@pytest.mark.usefixtures("eager")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "mtp", "draft", "suffix"])
def test_drafts_are_those_of_one_rank(method: str, tmp_path: Path) -> None:
    if method == "mtp":
        save_with_layer(case_of("deepseek_v3"), tmp_path / "model", SEED)
    else:
        save(find("qwen3"), tmp_path / "model", SEED)
    save_head(tmp_path / "head", tensors(200, seed=SEED))
    save(LISTED[0], tmp_path / "small", SEED + 1)
    draft = {"eagle": f"eagle:{tmp_path / 'head'}", "mtp": "mtp", "draft": str(tmp_path / "small")}.get(method)
    found = []
    for ranks in (1, 2):
        path = tmp_path / f"{ranks}.llmc"
        compile_model(tmp_path / "model", path, Options(**LIMITS, draft=draft, speculate=4, tensor_parallel_size=ranks))
        found.append(tokens_and_drafts(path, *requests(), method))
    (tokens, (drafts, right)), (of_two, (_, right_of_two)) = found
    assert tokens == of_two and min(right, right_of_two) > 0
    assert abs(right - right_of_two) < 0.01 * drafts  # drafts of which two are nearly tied


@pytest.mark.slow
@pytest.mark.parametrize("model", [QWEN, BERT, ROBERTA, CROSS, DECODER], ids=lambda model: model.owner)
def test_pooled_numbers_are_those_of_one_rank(model: Model, tmp_path: Path) -> None:
    save_pooled(model, tmp_path / "model")
    rng = np.random.default_rng(SEED)
    ids = [rng.integers(CLS, VOCAB, n).tolist() for n in (1, 2, 3, 17, 33, LENGTH - 1, LENGTH, 5)]
    found = []
    for ranks in (1, 2):
        path = tmp_path / f"{ranks}.llmc"
        options = Options(cache=CACHE, reuse=False, max_num_seqs=ROWS, tensor_parallel_size=ranks)
        compile_model(tmp_path / "model", path, options)
        with LLM(path, say=quiet, threads=1) as llm:
            found.append(numbers(llm, ids))
    assert np.abs(found[0] - found[1]).max() < 1e-5 and np.abs(found[0]).max() > 0.01
