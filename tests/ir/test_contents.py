"""Random operands: those of a step agree, an op's declaration covers its integers, and drawings differ by seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draw import generator

from llmc.ir import contents
from llmc.ir.contents import Drawing, Step, index
from llmc.ir.example import example_graph, op_example
from llmc.ir.opdef import op
from llmc.ir.ops import OPS
from llmc.measure.timing import unknown_operand


def drawing(step: Step, rng: np.random.Generator) -> Drawing:
    return Drawing({}, {}, {}, OPS["row_begin"].holds, step, rng)


@pytest.mark.parametrize(
    ("rows", "tokens", "context"), [(5, 37, 100), (1, 90, 40), (6, 6, 33), (64, 512, 1024), (1, 1, 1)]
)
def test_rows_starts_and_positions_of_a_timed_step_agree(rows: int, tokens: int, context: int) -> None:
    d = drawing(Step.serving(rows, tokens, context, 70, 16), generator())
    starts, positions = contents.starts(d, (rows + 1,)), contents.positions(d, (tokens,))
    row, qlens = contents.token_row(d, (tokens,)), contents.qlens(d, (rows,))
    assert starts[0] == 0 and starts[-1] == tokens and (np.diff(starts) == qlens).all()
    assert (qlens[:-1] == 1).all() and (row == np.repeat(np.arange(rows), qlens)).all()
    for i in range(rows):
        last = max(context, qlens[i]) - 1
        assert positions[starts[i + 1] - 1] == last and (np.diff(positions[starts[i] : starts[i + 1]]) == 1).all()
        assert contents.length(d, (rows,))[i] == last + 1 - qlens[i]
    if rows < tokens:  # one value per row
        assert (contents.positions(d, (rows,)) >= 0).all() and (contents.token_row(d, (rows,)) == np.arange(rows)).all()


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize(("entries", "tokens"), [(1, 1), (1, 9), (2, 5), (3, 7), (4, 7), (5, 5), (5, 19)])
def test_a_random_step_is_what_row_begin_lays_out(entries: int, tokens: int, padding: bool) -> None:
    """starts, token rows and positions are those that the op computes from rows, lengths and computed tokens."""
    rng = generator()
    step = Step.random(rng, entries=entries, tokens=tokens, rows=6, limit=30, padding=padding)
    want = OPS["row_spans"].ref(step.rows, step.qlens, step.before, tokens=tokens)
    for got, computed in zip((step.starts, step.token_row, step.positions), want, strict=True):
        np.testing.assert_array_equal(got, computed)
    live = step.token_row >= 0
    assert live.any() and step.positions[live].max() < 30 and (step.qlens[step.rows >= 0] > 0).all()
    assert (step.rows == -1).any() == (padding and entries > 2)


def test_slots_of_tokens_are_distinct_and_padding_has_none() -> None:
    for _ in range(20):
        (_, _, _, slots), _ = op_example(OPS["kv_append"], generator())
        written = slots[slots >= 0]
        assert len(set(written)) == len(written) > 0 and written.max() < 12 and (slots >= -1).all()


def test_experts_and_their_starts_agree() -> None:
    (_, order, starts, *_), _ = op_example(OPS["moe_up"], generator())
    assert sorted(order) == list(range(14)) and starts[0] == 0 and starts[-1] == 14 and (np.diff(starts) >= 0).all()


def test_every_integer_operand_of_ours_is_declared() -> None:
    rng = generator()
    for declared in OPS.values():
        arrays, attrs = op_example(declared, rng)
        (node,) = example_graph(declared, arrays, attrs).graphs["main"].nodes
        assert unknown_operand(node) is None, declared.name


def test_drawings_are_new_for_every_seed_and_never_zero() -> None:
    for declared in OPS.values():
        (a, _), (b, _), (c, _) = (op_example(declared, np.random.default_rng(seed)) for seed in (1, 2, 1))
        assert all((x == y).all() for x, y in zip(a, c, strict=True)), declared.name
        assert not a or any((x != y).any() for x, y in zip(a, b, strict=True)), declared.name
        floats = [x for s, x in zip(declared.operands, a, strict=False) if x.dtype.kind == "f" and s.name != "scores"]
        assert all(x.any() for x in floats), declared.name  # scores of greedy and of filtered rows are 0


def test_an_op_of_a_package_needs_only_its_declaration() -> None:
    @op("(x: f[n, d], rows: i[r], other: i[r]) -> x[r, d]", holds={"rows": index("x"), "absent": index("x")})
    def pick(x: Any, rows: Any, other: Any) -> Any:
        """Rows of x."""
        return x[rows]

    (x, rows, _), _ = op_example(pick, generator())
    assert 0 <= rows.min() and rows.max() < len(x) and list(pick.holds) == ["rows"]
    (node,) = example_graph(pick, [x, rows, rows], {}).graphs["main"].nodes
    assert unknown_operand(node) == "other"
