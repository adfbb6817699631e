"""The step that a kernel is timed on: rows that decode beside the next tokens of a prompt, integers that agree."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.measure.operands import Scene, values


@pytest.mark.parametrize(
    ("rows", "tokens", "context"), [(5, 37, 100), (1, 90, 40), (6, 6, 33), (64, 512, 1024), (1, 1, 1)]
)
def test_rows_starts_and_positions_agree(rows: int, tokens: int, context: int) -> None:
    scene, rng = Scene(rows, tokens, context, 70, 16, 9), np.random.default_rng()

    def get(name: str, *shape: int) -> np.ndarray:
        found = values(name, "i32", shape, scene, rng)
        assert found is not None and found.shape == shape
        return found

    starts, positions = get("starts", rows + 1), get("positions", tokens)
    row, qlens = get("token_row", tokens), get("qlens", rows)
    assert starts[0] == 0 and starts[-1] == tokens and (np.diff(starts) == qlens).all()
    assert (qlens[:-1] == 1).all() and (row == np.repeat(np.arange(rows), qlens)).all()
    for i in range(rows):
        last = max(context, qlens[i]) - 1
        assert positions[starts[i + 1] - 1] == last and (np.diff(positions[starts[i] : starts[i + 1]]) == 1).all()
        assert get("length", rows)[i] == last + 1 - qlens[i]
    if rows < tokens:  # one value a row
        assert (get("positions", rows) >= 0).all() and (get("token_row", rows) == np.arange(rows)).all()
