"""Structured outputs on the GPU, in batches with unconstrained requests; their programs are split before sampling."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gpu.model_cases import TEXTS, make_all
from gpu.test_models import LOGPROBS, TOLERANCE, compare
from llmc_runtime import LLM, SamplingParams, StructuredOutputsParams

PAIR = TEXTS[1]
pytestmark = pytest.mark.gpu
PATTERN = "[a-z]{2,5}(-[0-9]{1,3}){1,3}"
PROMPTS = ["When the morning came,", "Once there was a river that", "The old man said", "A kernel", "Then"]


@pytest.fixture(scope="module")
def outputs() -> dict[str, list[Any]]:
    """The outputs of the GPU and of the CPU for the same batch, in which three of five requests are constrained."""
    pytest.importorskip("llguidance")
    failed = make_all([PAIR], 1)
    assert not failed, failed
    free = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=LOGPROBS)
    kinds = [
        SamplingParams(
            temperature=i / 2, seed=i, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=PATTERN)
        )
        for i in range(3)
    ]
    mixed = [free, kinds[0], free, kinds[1], kinds[2]]
    found = {}
    for kind in ("gpu", "cpu"):
        llm = LLM(PAIR.path(kind), say=lambda text: None)
        try:
            found[kind] = [out.outputs[0] for out in llm.generate(PROMPTS, mixed, use_tqdm=False)]
        finally:
            llm.close()
    return found


def test_constrained_requests_match_the_pattern(outputs: dict[str, list[Any]]) -> None:
    for i in (1, 3, 4):
        one = outputs["gpu"][i]
        assert one.finish_reason == "stop" and re.fullmatch(PATTERN, one.text), one.text


def test_unconstrained_requests_match_cpu(outputs: dict[str, list[Any]]) -> None:
    compare([outputs["gpu"][i] for i in (0, 2)], [outputs["cpu"][i] for i in (0, 2)], TOLERANCE)
