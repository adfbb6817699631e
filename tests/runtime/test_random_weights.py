"""Weights that the runtime fills: rows of any usual width differ, so that no token's logit is another one's."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from llmc_runtime.exec.buffer_layout import RandomWeights


@pytest.mark.parametrize("width", [64, 1024, 2048, 4096, 14336])
def test_no_two_rows_of_a_vocabulary_are_equal(width: int) -> None:
    rows = min(32000, (1 << 27) // width)
    tile, at = RandomWeights(1).tile("lm_head.weight", "bf16", 2, rows * width * 2)
    values = np.resize(np.roll(tile.view(np.uint16), -at // 2), rows * width).reshape(rows, width)
    first = np.ascontiguousarray(values[:, :32]).view("V64").ravel()
    assert len(np.unique(first)) == rows


def test_codes_are_near_the_numbers_that_they_stand_for() -> None:
    """Codes of 8 bits, floats or integers, are compared with the float32 tile of the same seed; none is NaN."""
    exact = RandomWeights(1).tile("w", "f32", 2, 1)[0].view(np.float32)
    floats = RandomWeights(1).tile("w", "f8e4m3", 2, 1)[0].view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(floats.astype(np.float32), exact.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    integers = RandomWeights(1).tile("w", "i8", 2, 1)[0].view(np.int8)
    np.testing.assert_allclose(integers / 1600, exact, atol=0.5 / 1600 + 1e-7)


def test_named_weights_are_minus_one() -> None:
    """Whatever their rank: rates of decay are vectors in some models and matrices in others."""
    for rank in (1, 2):
        tile, at = RandomWeights(1, {"decay"}).tile("decay", "f32", rank, 8)
        assert set(np.roll(tile.view(np.float32), -at // 4)[:2].tolist()) == {-1.0}
    assert RandomWeights(1, {"decay"}).tile("norm", "f32", 1, 4)[0].view(np.float32)[0] == 1.0
