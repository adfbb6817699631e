"""Models with recurrent layers on several ranks, which compute these layers whole, each with states of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmc_runtime import LLM
from models.test_artifacts import check
from models.test_recurrent_artifacts import artifact, drawn_prompts, named, quiet

pytestmark = pytest.mark.slow


def test_ranks_give_transformers_log_probabilities(tmp_path: Path) -> None:
    model, out = artifact(named("qwen3_5_text"), tmp_path, tensor_parallel_size=2)
    with LLM(out, say=quiet, threads=1) as llm:
        check(llm, model, drawn_prompts(), 1e-3)
        check(llm, model, drawn_prompts()[::-1], 1e-3)
