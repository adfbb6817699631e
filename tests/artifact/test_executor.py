"""A step on a real artifact: the folder is written, opened, loaded and run on the CPU device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact import tiny
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.cpu_device import CpuDevice
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format import expr
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.step import RowInit, RowPages, RowParams, Step, Work

from llmc.artifact.write import write_artifact


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path))
    made = Executor(open_artifact(tmp_path / "toy.llmc"), CpuDevice(1), kv_bytes=64 * 16)
    yield made
    made.close()


def init(row: int, tokens: list[int], num_prompt: int, pages: list[int], computed: int = 0, **params: Any) -> RowInit:
    return RowInit(row, tokens, computed, num_prompt, RowParams(**params), pages)


def test_capacity_follows_the_budget(executor: Executor) -> None:
    assert executor.capacity.pages == tiny.ROWS * tiny.M  # no more than the rows can use
    assert str(executor.capacity).startswith("KV cache: 128 tokens in 32 pages of 4")


def test_two_rows_prefill_in_chunks_and_decode(executor: Executor) -> None:
    a, b = [5, 6, 7, 8, 9, 10], [3, 1, 4]
    step = Step([init(1, a, 6, [9, 4]), init(3, b, 3, [7])], [], [Work(1, 4, False), Work(3, 3, True)])
    out = executor.run(step)
    assert out.tokens == [None, tiny.expected(b)] and out.logprobs == [None, None]
    b.append(tiny.expected(b))
    out = executor.run(Step([], [], [Work(3, 1, True), Work(1, 2, True)]))
    assert out.tokens == [tiny.expected(b), tiny.expected(a)]
    a, b = [*a, tiny.expected(a)], [*b, tiny.expected(b)]
    # both rows decode now, one of them into a new page
    out = executor.run(Step([], [RowPages(3, 1, [2])], [Work(1, 1, True), Work(3, 1, True)]))
    assert out.tokens == [tiny.expected(a), tiny.expected(b)]


def test_logprobs_go_to_rows_that_want_them(executor: Executor) -> None:
    inits = [init(0, [1, 2], 2, [0], want_logprobs=True), init(1, [2, 1], 2, [1])]
    out = executor.run(Step(inits, [], [Work(1, 2, True), Work(0, 2, True)]))
    assert out.logprobs[0] is None
    found = out.logprobs[1]
    assert found is not None and found.rank == 1 and found.logprob == -0.5 * out.tokens[1]  # type: ignore[operator]
    assert list(found.top_ids) == [(out.tokens[1] + k) % tiny.V for k in range(tiny.TOP)]  # type: ignore[operator]
    assert list(found.top_logprobs) == [found.logprob - k for k in range(tiny.TOP)]


def test_a_row_is_rebuilt_whole(executor: Executor) -> None:
    """A resumed row counts its earlier output as output, and keeps no state of the request that used it before."""
    executor.run(Step([init(2, [1] * 5, 5, [3, 5])], [], [Work(2, 5, True)]))
    tables = executor.rows._tables
    assert tables["counts"].view[2].sum() == 1
    tokens = [40, 33, 2, 1, 1, 63]
    params = {"temperature": 0.5, "top_k": 7, "seed": (1 << 63) + 5, "min_tokens": 2, "stops": (9, 11)}
    executor.run(Step([init(2, tokens, 2, [6, 8], computed=4, repetition_penalty=1.5, **params)]))
    counts = np.zeros(tiny.V, np.int32)
    counts[[2, 63]], counts[1] = 1, 2
    np.testing.assert_array_equal(tables["counts"].view[2], counts)
    assert list(tables["seen"].view[2].view(np.uint32)) == [0, 1 << 8 | 1 << 1]
    assert list(tables["tokens"].view[2][:6]) == tokens and tables["length"].view[2, 0] == 4
    assert list(tables["iparams"].view[2]) == [7, 5, -(1 << 31), 2, 4, 0, 0, 0]
    np.testing.assert_allclose(tables["fparams"].view[2], [0.5, 1, 0, 1.5, 0, 0, 0, 0])
    assert list(tables["stops"].view[2][:3]) == [9, 11, -1]


def test_a_step_that_no_program_serves(executor: Executor) -> None:
    with pytest.raises(LlmcError, match=r"E614.*no program serves a step of 49 tokens in 1 rows"):
        executor.run(Step([], [], [Work(0, 49, True)]))


def test_a_step_that_fails(executor: Executor) -> None:
    with pytest.raises(LlmcError, match=r"E114.*program step failed: Invalid argument"):
        executor.run(Step([], [], [Work(0, 47, True)]))


def test_no_work_is_no_step(executor: Executor) -> None:
    assert executor.run(Step()).tokens == []


def test_too_little_memory_for_a_page(tmp_path: Path) -> None:
    write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path))
    with pytest.raises(LlmcError, match=r"E202.*15 B; a page of 4 tokens takes 16 B"):
        Executor(open_artifact(tmp_path / "toy.llmc"), CpuDevice(1), kv_bytes=15)


def test_random_weights_are_the_same_each_time(tmp_path: Path) -> None:
    write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path, weights=7))
    found = []
    for _ in range(2):
        executor = Executor(open_artifact(tmp_path / "toy.llmc"), CpuDevice(1), kv_bytes=1024)
        found.append(executor.run(Step([init(0, [1, 2], 2, [0])], [], [Work(0, 2, True)])).tokens)
        executor.close()
    assert found[0] == found[1]


def test_an_artifact_without_weights_is_reported(tmp_path: Path) -> None:
    write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path, weights=None))
    with pytest.raises(LlmcError, match="E111"):
        Executor(open_artifact(tmp_path / "toy.llmc"), CpuDevice(1))


@pytest.mark.parametrize("shape", [(), ("R",), ("R", "R", "R"), ("R", 1 << 40)])
def test_likely_ids_that_are_no_matrix_of_their_size(shape: tuple[object, ...], tmp_path: Path) -> None:
    parts, dims = tiny.parts(tmp_path), tuple(expr.of(str(d)) for d in shape)
    programs = [
        replace(p, buffers=tuple(replace(b, shape=dims) if b.name == "top_ids" else b for b in p.buffers))
        for p in parts.programs
    ]
    write_artifact(tmp_path / "toy.llmc", replace(parts, programs=programs))
    with pytest.raises(LlmcError, match=r"E113.*top_ids has the shape"):
        Executor(open_artifact(tmp_path / "toy.llmc"), CpuDevice(1), kv_bytes=64 * 16)
