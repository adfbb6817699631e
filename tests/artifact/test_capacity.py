"""Sizes that are settled before anything runs: rows of a device graph, and pages of the KV cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from artifact import tiny
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.cpu_device import CpuDevice
from llmc_runtime.exec.buffer_layout import need_of
from llmc_runtime.exec.capacity import Need, plan_kv
from llmc_runtime.exec.entry_points import bucket, buckets, token_bucket
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.expr import parse as parse_size
from llmc_runtime.format.manifest import RECURRENT, State
from llmc_runtime.sched.step import RowInit, RowParams, Step, Work

from llmc.artifact.write import write_artifact

STEP = Step([RowInit(0, [1, 2, 3], 0, 3, RowParams(), [0])], [], [Work(0, 3, True)])


def test_rows_of_a_graph() -> None:
    assert [bucket(r, 99) for r in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33)] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 40]
    assert bucket(18, 20) == 20


def test_tokens_of_a_step_with_prompts() -> None:
    found = [token_bucket(t, 8192) for t in (1, 3, 5, 9, 16, 17, 250, 256, 257, 320, 321, 8129)]
    assert found == [1, 4, 8, 16, 16, 32, 256, 256, 320, 320, 384, 8192]
    assert token_bucket(117, 120) == 120


def test_sizes_of_a_program() -> None:
    p = tiny.program("decode", "ab" * 16, "cd" * 16, True)
    for serves, most, want in (
        ((1, 1), 64, [1]), ((2, 16), 64, [2, 4, 8, 16]), ((17, 128), 50, [24, 32, 40, 48, 50]),
        ((5, 5), 64, [5]), ((9, 64), 8, []),
    ):  # fmt: skip
        sizes = list(buckets(replace(p, serves={"R": serves}), most))
        assert sizes == want
        for rows in range(serves[0], min(serves[1], most) + 1):
            assert bucket(rows, min(serves[1], most)) in sizes


def test_the_pool_of_a_device_with_memory_of_its_own(tmp_path: Path) -> None:
    write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path))
    artifact = open_artifact(tmp_path / "toy.llmc")
    m = replace(artifact.manifest, kv=replace(artifact.manifest.kv, bytes_per_page=1 << 20))
    assert need_of(artifact) == Need(
        2 << 20, 16 << 20, 2 << 20
    )  # in grains of 2 MiB: a file, 8 states, inputs and outputs
    need = Need(50 << 20, 10 << 20, 4 << 20)
    assert plan_kv(m, None, 84 << 20, 0.9, need).pages == 18  # 0.9 of 20
    assert plan_kv(m, None, 1 << 40, 0.9, need).pages == tiny.ROWS * tiny.M
    assert plan_kv(m, 20 << 20, 84 << 20, 0.9, need).pages == 20
    for kv_bytes, free, words in (
        (
            None,
            64 << 20,
            "64.0 MiB free; 72.0 MiB are needed: weights 50.0 MiB, rows 10.0 MiB, intermediate results 4.0",
        ),
        (
            21 << 20,
            84 << 20,
            "needs 21.0 MiB; 20.0 MiB of 84.0 MiB are left .*\n.* at most 20.0 MiB, .* 80 tokens",
        ),
        (None, 40 << 20, "weights take less than 40.0 MiB"),
    ):
        with pytest.raises(LlmcError, match=rf"(?s)E205.*{words}"):
            plan_kv(m, kv_bytes, free, 0.9, need)
    with pytest.raises(LlmcError, match="E202"):
        plan_kv(m, 5, 1 << 40, 0.9, need)


def test_the_memory_of_snapshots(tmp_path: Path) -> None:
    """By default two per row, in a quarter of what is left; they are subtracted before the KV cache."""
    state = State("row.memory.0", "f32", tuple(parse_size(str(n)) for n in (tiny.ROWS, 1 << 18)), RECURRENT)
    parts = tiny.parts(tmp_path)
    write_artifact(tmp_path / "toy.llmc", replace(parts, states=(*parts.states, state)))
    m = open_artifact(tmp_path / "toy.llmc").manifest
    m, need = replace(m, kv=replace(m.kv, bytes_per_page=1 << 20)), Need(50 << 20, 10 << 20, 4 << 20)
    assert m.bytes_per_snapshot == 1 << 20
    for kv_bytes, free, asked, snapshots, pages in (
        (None, 84, None, 4, 14), (None, 84, 0, 0, 18), (None, 84, 9, 9, 9), (None, 1 << 20, None, 2 * tiny.ROWS, None),
        (17 << 20, 84, None, 3, 17), (20 << 20, 84, None, 0, 20),
    ):  # fmt: skip
        found = plan_kv(m, kv_bytes, free << 20, 0.9, need, asked)
        assert (found.snapshots, found.pages) == (snapshots, pages or tiny.ROWS * tiny.M)
        assert found.snapshot_bytes == snapshots << 20
    with pytest.raises(LlmcError, match=r"(?s)E205: 19 state snapshots need 19.0 MiB.* less than 18"):
        plan_kv(m, None, 84 << 20, 0.9, need, 19)
    with pytest.raises(LlmcError, match=r"(?s)E205.*state snapshots 9.0 MiB"):
        plan_kv(m, 12 << 20, 84 << 20, 0.9, need, 9)


def test_tickets_on_a_device_of_depth_one(tmp_path: Path) -> None:
    write_artifact(tmp_path / "toy.llmc", tiny.parts(tmp_path))
    executor = Executor(open_artifact(tmp_path / "toy.llmc"), CpuDevice(1), 1024)
    ticket = executor.launch(STEP)
    with pytest.raises(RuntimeError, match="1 steps are in flight"):
        executor.launch(STEP)
    assert executor.wait(ticket).tokens == [tiny.expected([1, 2, 3])]
    with pytest.raises(RuntimeError, match="waited for once"):
        executor.wait(ticket)
    executor.launch(STEP)
    executor.settle()
    assert executor.run(STEP).tokens == [tiny.expected([1, 2, 3])] and executor.prepare() == 0
    executor.close()
