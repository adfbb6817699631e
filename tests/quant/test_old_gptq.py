"""Tensors that old versions of AutoGPTQ and other tools store with the codes: a g_idx of zeros, and biases of zeros."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from models.kit import eager_logits, fails, prompts, relative_error
from quant.handmade import Encode, Tensors, gptq, with_parts
from quant.test_decode import opened
from quant.test_handmade import CASES, computed, made, open_all

MIXTURE = CASES["gptq-mixture"]
CASE, PLACES = CASES["gptq-head"], r"(q|k|v|gate|up)_proj"
ZEROS = with_parts(gptq(), g_idx=torch.zeros(128, dtype=torch.int32))


def test_zeros_stand_for_the_natural_order(tmp_path: Path) -> None:
    tokens, positions = prompts((9,), 64)
    found = made(replace(CASE, rules=((PLACES, ZEROS), *CASE.rules)), tmp_path)
    with opened(found.folder) as checkpoint:
        assert relative_error(computed(checkpoint, tokens, positions), eager_logits(found.model, tokens, (9,))) <= 1e-5


def test_zeros_lose_another_order(tmp_path: Path) -> None:
    case = replace(CASE, rules=((PLACES, ZEROS), (r"_proj|lm_head", gptq(order="runs"))))
    folder = made(case, tmp_path, desc_act=True).folder
    fails("E342", "g_idx puts all columns in group 0", "4 groups of scales", do=lambda: open_all(folder))


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_products_and_experts_that_have_none(value: float, tmp_path: Path) -> None:
    """They may be zeros alone."""
    rules = tuple((pattern, how and partial(biased, how, value)) for pattern, how in MIXTURE.rules)
    found = made(replace(MIXTURE, rules=rules), tmp_path)
    if value:
        fails("E324", ".bias", do=lambda: open_all(found.folder))
        return
    tokens, positions = prompts((9,), 64)
    with opened(found.folder) as checkpoint:
        assert relative_error(computed(checkpoint, tokens, positions), eager_logits(found.model, tokens, (9,))) <= 1e-5


def biased(how: Encode, value: float, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    parts, dequantised = how(w)
    return {**parts, "bias": torch.full((len(w),), value, dtype=torch.float16)}, dequantised
