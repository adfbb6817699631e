"""Kernels of speculative decoding compared with references: acceptance, drafts, penalties that count drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels import harness, triton_harness
from kernels.harness import Case
from kernels.test_triton_state import VOCAB, M, verifying

from llmc.codegen.backends.cpp.state import DRAFT, SAMPLE
from llmc.codegen.backends.triton.sample import ROW_PENALIZE
from llmc.extension import load
from llmc.ir.example import example_graph
from llmc.ir.ops import OPS

LEVELS = ("cpu:native", "cpu:portable")


def penalties(rng: np.random.Generator) -> list[Any]:
    """Operands of row_penalize: rows with up to 5 drafts of few ids, so that an id is often drafted twice."""
    tokens, length, counts, rows, starts, positions, _, _ = verifying(rng, 60)
    f, i = np.zeros((M, 8), np.float32), np.zeros((M, 8), np.int32)
    f[:, 1], f[:, 3] = 1.0, rng.choice([1.0, 1.5], M)
    f[:, 4:6] = rng.choice([0.0, 0.7, -0.4], (M, 2))
    i[:, 3], i[:, 6] = rng.integers(0, 2, M) * np.minimum(length + 2, 900), rng.integers(0, 4, M)
    seen = rng.integers(-(2**31), 2**31, (M, -(-VOCAB // 32))).astype(np.int32)
    counts = (counts * (rng.random(counts.shape) < 0.2)).astype(np.int32)
    bias_ids = np.sort(np.argsort(rng.random((M, VOCAB)), 1)[:, :4], 1).astype(np.int32)
    biases = rng.choice([-2.5, 3.0], (M, 4)).astype(np.float32)
    logits = rng.standard_normal((60, VOCAB)).astype(np.float32) * 3
    tokens[:] = rng.integers(0, 4, tokens.shape)
    return [logits, rows, f, i, seen, counts, bias_ids, biases, starts, positions, tokens]


def drawn(rng: np.random.Generator) -> dict[str, list[Any]]:
    """Operands of row_mask and row_sample for rows with drafts: each entry has the mask, the minimum length and the
    random numbers of its own position.
    """
    tokens, length, _, rows, starts, positions, _, _ = verifying(rng, 60)
    f, i, words = np.zeros((M, 8), np.float32), np.zeros((M, 8), np.int32), -(-VOCAB // 32)
    f[:, 0], f[:, 1], f[:, 3] = 1.0, rng.choice([0.7, 1.0], M), 1.0
    i[:, 1:3], i[:, 4], i[:, 7] = (
        rng.integers(-(2**31), 2**31, (M, 2)),
        length + rng.integers(0, 6, M),
        rng.integers(0, 7, M),
    )
    stops = rng.integers(-1, VOCAB, (M, 32)).astype(np.int32)
    allowed = rng.integers(-(2**31), 2**31, (M, 6 * words)).astype(np.int32)
    logits = rng.standard_normal((60, VOCAB)).astype(np.float32)
    return {
        "row_mask": [logits, rows, starts, positions, i, stops, allowed],
        "row_sample": [logits, rows, starts, positions, tokens, f, i],
    }


def case(op: str, kernel: Any, arrays: list[Any], schedule: dict[str, Any], **attrs: Any) -> Case:
    return Case(op, example_graph(OPS[op], arrays, attrs).graphs["main"], kernel, schedule, arrays)


@pytest.mark.parametrize("level", LEVELS)
def test_cpu(level: str, tmp_path: Path) -> None:
    rng = generator()
    tokens, length, counts, rows, starts, positions, emit, ids = verifying(rng, 120)
    drafts = np.stack([rng.integers(0, 9, M), rng.integers(0, 6, M), rng.integers(1, 4, M), rng.integers(3, 9, M)], 1)
    accept = [tokens, length, counts, rows, starts, positions, emit, ids]
    cases = [
        case("row_accept", DRAFT, accept, {}, limit=5),
        case("row_propose", DRAFT, [tokens, drafts.astype(np.int32), length, rows, starts, emit], {}),
        case("row_rewind", DRAFT, [length[::-1].copy(), length, rows], {}),
        case("row_extend", DRAFT, [tokens, length[::-1].copy(), rows, starts, positions, emit, ids], {}),
        case("row_penalize", SAMPLE, penalties(rng), {}),
        *(case(op, SAMPLE, operands, {}) for op, operands in drawn(rng).items()),
    ]
    compiled = harness.compile_cases(cases, load().target(level), tmp_path)
    for c in cases:
        harness.run_case(c, *compiled[c.name])


def test_triton_penalties() -> None:
    triton_harness.run_case(case("row_penalize", ROW_PENALIZE, penalties(generator()), {"block": 256, "warps": 4}))


def test_drafts_change_penalties() -> None:
    """The operands make a difference, so that the tests above can fail."""
    operands = penalties(np.random.default_rng(4))
    plain, drafted = OPS["row_penalize"].ref(*operands[:8]), OPS["row_penalize"].ref(*operands)
    assert (plain != drafted).any(-1).sum() > 10
