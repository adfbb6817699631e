"""Structured outputs on the GPU: programs cut in front of their sampling, beside requests that run free."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gpu.model_cases import TEXTS, make_all
from gpu.test_models import TOLERANCE, compare
from llmc_runtime import LLM, SamplingParams, StructuredOutputsParams

PAIR = TEXTS[1]
pytestmark = pytest.mark.gpu
FORM = "[a-z]{2,5}(-[0-9]{1,3}){1,3}"
PROMPTS = ["When the morning came,", "Once there was a river that", "The old man said", "A kernel", "Then"]


@pytest.fixture(scope="module")
def outputs() -> dict[str, list[Any]]:
    """What each device says to the same mixture: every second request has to keep a form."""
    pytest.importorskip("llguidance")
    failed = make_all([PAIR], 1)
    assert not failed, failed
    free = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=4)
    kinds = [
        SamplingParams(temperature=i / 2, seed=i, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=FORM))
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


def test_guided_requests_keep_their_form(outputs: dict[str, list[Any]]) -> None:
    for i in (1, 3, 4):
        one = outputs["gpu"][i]
        assert one.finish_reason == "stop" and re.fullmatch(FORM, one.text), one.text


def test_those_beside_them_notice_nothing(outputs: dict[str, list[Any]]) -> None:
    compare([outputs["gpu"][i] for i in (0, 2)], [outputs["cpu"][i] for i in (0, 2)], TOLERANCE)
