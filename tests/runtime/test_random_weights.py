"""Weights that the runtime fills: rows of any usual width differ, so that no token's logit is another one's."""

from __future__ import annotations

import numpy as np
import pytest
from llmc_runtime.exec.random_weights import RandomWeights


@pytest.mark.parametrize("width", [64, 1024, 2048, 4096, 14336])
def test_no_two_rows_of_a_vocabulary_are_equal(width: int) -> None:
    rows = min(32000, (1 << 27) // width)
    tile, at = RandomWeights(1).tile("lm_head.weight", "bf16", 2, rows * width * 2)
    values = np.resize(np.roll(tile.view(np.uint16), -at // 2), rows * width).reshape(rows, width)
    first = np.ascontiguousarray(values[:, :32]).view("V64").ravel()
    assert len(np.unique(first)) == rows
