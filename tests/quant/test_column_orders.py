"""Orders of columns (g_idx) that are zeros, as some tools store them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from models.kit import eager_logits, fails, prompts, relative_error
from quant.handmade import gptq, with_parts
from quant.test_decode import opened
from quant.test_handmade import CASES, computed, made, open_all

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
