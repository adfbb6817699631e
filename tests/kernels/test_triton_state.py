"""The row kernels in Triton's interpreter compared with their references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels.harness import Case
from kernels.triton_harness import run_case

from llmc.codegen.backends.triton.row_state import (
    ROW_ACCEPT,
    ROW_BEGIN,
    ROW_COMMIT,
    ROW_EXTEND,
    ROW_IDS,
    ROW_LAST,
    ROW_PROPOSE,
    ROW_REWIND,
    ROW_SLOTS,
    ROW_SPANS,
)
from llmc.ir.example import example_graph, op_example
from llmc.ir.ops import OPS

KERNELS = {
    "row_spans": ROW_SPANS, "row_begin": ROW_BEGIN, "row_ids": ROW_IDS, "row_slots": ROW_SLOTS,
    "row_last": ROW_LAST, "row_commit": ROW_COMMIT, "row_accept": ROW_ACCEPT,
    "row_propose": ROW_PROPOSE, "row_rewind": ROW_REWIND, "row_extend": ROW_EXTEND,
}  # fmt: skip
M, LENGTH, PAGE, VOCAB = 400, 900, 16, 50
I32 = np.int32


def case(op: str, arrays: list[Any], attrs: dict[str, Any]) -> Case:
    g = example_graph(OPS[op], arrays, attrs).graphs["main"]
    return Case(op, g, KERNELS[op], {}, arrays)


def drawn_rows(rng: np.random.Generator, r: int, most: int, padding: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, qlens, length): rows of one to three entries each, some without tokens, and `padding` rows of -1.

    Twelve entries of any row fit its history: test_spans joins entries of neighbouring rows.
    """
    rows = np.repeat(rng.permutation(M)[:r], rng.choice([1, 1, 3], r))[:r].astype(I32)
    qlens = rng.integers(0, most + 1, r).astype(I32)
    rows[r - padding :], qlens[r - padding :] = -1, 0
    return rows, qlens, rng.integers(0, LENGTH - 12 * most, M).astype(I32)


@pytest.mark.parametrize("op", KERNELS)
def test_examples(op: str) -> None:
    run_case(case(op, *op_example(OPS[op], generator())))


@pytest.mark.parametrize(
    ("r", "most", "padding", "spare"), [(1, 1, 0, 0), (5, 40, 2, 9), (300, 1, 40, 3), (300, 3, 0, 0)]
)
@pytest.mark.parametrize("op", ["row_spans", "row_begin"])
def test_spans(op: str, r: int, most: int, padding: int, spare: int) -> None:
    """More entries than one block, entries without tokens, padding, tokens after the last entry, and a row whose
    entries begin in one block and end in the next."""
    rng = generator()
    rows, qlens, length = drawn_rows(rng, r, most, padding)
    qlens[0] = max(qlens[0], 1)
    rows[254:259] = rows[254:255]
    arrays: list[Any] = [rows, qlens, length]
    attrs: dict[str, Any] = {"tokens": int(qlens.sum()) + spare}
    if op == "row_begin":
        arrays += [
            rng.integers(0, 9999, (M, LENGTH)).astype(I32),
            rng.integers(0, 999, (M, LENGTH // PAGE + 1)).astype(I32),
        ]
        attrs["page"] = PAGE
    run_case(case(op, arrays, attrs))


@pytest.mark.parametrize(("op", "attrs"), [("row_ids", {}), ("row_slots", {"page": PAGE})])
def test_ids_and_slots(op: str, attrs: dict[str, Any]) -> None:
    rng = generator()
    table = rng.integers(0, 9999, (M, LENGTH)).astype(I32)
    token_row = rng.integers(-1, M, 200).astype(I32)
    run_case(case(op, [table, token_row, np.where(token_row < 0, -1, rng.integers(0, LENGTH, 200)).astype(I32)], attrs))


def test_last() -> None:
    qlens = generator().integers(0, 3, 200)
    run_case(case("row_last", [np.concatenate([[0], np.cumsum(qlens)]).astype(I32)], {}))


def test_commit() -> None:
    """Full rows drop the id; rows that do not emit only grow; of a row's entries the last one counts."""
    rng = generator()
    r = 150
    rows, qlens, length = drawn_rows(rng, r, 5, 20)
    length[rows[:10]], qlens[:10] = LENGTH - 3, 1
    starts, _, positions = OPS["row_spans"].ref(rows, qlens, length, tokens=int(qlens.sum()) + 3)
    tokens, counts = rng.integers(0, 99, (M, LENGTH)).astype(I32), rng.integers(0, 9, (M, VOCAB)).astype(I32)
    emit, ids = rng.integers(0, 2, r).astype(I32), rng.integers(0, VOCAB, r).astype(I32)
    run_case(case("row_commit", [tokens, length, counts, rows, starts, positions, emit, ids], {}))


def verifying(rng: np.random.Generator, r: int) -> list[Any]:
    """Operands of row_accept: rows that verify up to 5 drafts, a few of which are right, and rows of a prompt."""
    runs = rng.integers(1, 7, r)
    rows = np.repeat(rng.permutation(M)[: len(runs)], runs)[:r].astype(I32)
    prompts = rng.random(M) < 0.2
    qlens = np.where(prompts[rows], rng.integers(1, 4, r), 1).astype(I32)
    emit = ~prompts[rows] | (rng.random(r) < 0.3) & (np.append(rows[1:], -1) != rows)
    rows[r - 4 :], qlens[r - 4 :] = -1, 0
    length = rng.integers(0, LENGTH - 30, M).astype(I32)
    length[rows[:6]] = LENGTH - np.bincount(np.maximum(rows, 0), qlens, M)[rows[:6]]
    starts, _, positions = OPS["row_spans"].ref(rows, qlens, length, tokens=int(qlens.sum()))
    tokens, counts = rng.integers(0, 2, (M, LENGTH)).astype(I32), rng.integers(0, 9, (M, VOCAB)).astype(I32)
    ids = rng.integers(0, 2, r).astype(I32)
    return [tokens, length, counts, rows, starts, positions, emit.astype(I32), ids]


def test_accept() -> None:
    """Runs of drafts accepted in part, more entries than one program has, full rows, prompts, padding."""
    operands = verifying(generator(), 300)
    run_case(case("row_accept", operands, {"limit": 5}))
    taken = OPS["row_accept"].ref(*operands, limit=5)[0]
    assert (taken >= 0).sum() > len(set(operands[3].tolist())), "some drafts are accepted"


def test_propose() -> None:
    """Histories over two ids, in which suffixes repeat; full rows, rows without drafts, short rows."""
    rng = generator()
    tokens, length, _, rows, starts, _, emit, _ = verifying(rng, 60)
    length[rows[10:20]] = rng.integers(0, 3, 10)
    tokens[rows[20:30]] = np.arange(LENGTH)
    drafts = np.stack([rng.integers(0, 9, M), rng.integers(0, 6, M), rng.integers(1, 4, M), rng.integers(3, 9, M)], 1)
    operands = [tokens, drafts.astype(I32), length, rows, starts, emit]
    run_case(case("row_propose", operands, {}))
    proposed = OPS["row_propose"].ref(*operands)[0]
    assert (proposed > 0).any() and (proposed == 0).any()


def test_drafts_of_a_model() -> None:
    """The place from which a draft model continues, and the drafts that it appends; full rows, padding."""
    tokens, length, _, rows, starts, positions, emit, ids = verifying(generator(), 300)
    reach = length[::-1].copy()
    run_case(case("row_rewind", [reach, length, rows], {}))
    run_case(case("row_extend", [tokens, reach, rows, starts, positions, emit, ids], {}))
