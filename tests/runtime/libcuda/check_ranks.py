"""Two ranks on a driver without GPUs, in two processes: memory that they share, steps, and ranks that fail."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from artifact import tiny
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.gpu import gpu_group
from llmc_runtime.device.open_device import open_device
from llmc_runtime.exec import rank_group
from llmc_runtime.exec.executor import Executor
from llmc_runtime.exec.group_executor import GroupExecutor
from llmc_runtime.exec.load_executor import load_executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.step import RowInit, RowParams, Step, Work

from llmc.artifact.write import write_artifact
from tests.runtime.libcuda import toy
from tests.runtime.libcuda.conftest import Driver

PROMPT = Step([RowInit(0, [5, 6, 7], 0, 3, RowParams(), list(range(tiny.M)))], [], [Work(0, 3, True)])
DECODE = Step([], [], [Work(0, 1, True)])


@pytest.fixture
def artifact(library: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The toy artifact for two ranks, on a machine with two GPUs."""
    monkeypatch.setenv("FAKE_GPUS", "2")
    monkeypatch.setenv("FAKE_GPU_PROGRESS", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.folder))
    programs = (
        toy.program("decode1", True, (1, 1)),
        toy.program("decode", True, (2, tiny.ROWS)),
        toy.program("step", False),
    )
    write_artifact(tmp_path / "two.llmc", toy.parts(tmp_path, programs=tuple(map(toy.of_ranks, programs))))
    with library.reset():
        yield tmp_path / "two.llmc"
    assert not children()


def children() -> list[int]:
    """The processes that this one has started and that run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"rank_process" in (entry / "cmdline").read_bytes():
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                found += [int(entry.name)] if int(status[1]) == os.getpid() and status[0] != "Z" else []
        except OSError:  # it has ended meanwhile
            continue
    return found


def refused(path: Path, code: str, words: str) -> None:
    with pytest.raises(LlmcError, match=f"(?s){code}.*{words}"):
        load_executor(path)


def test_steps_of_two_ranks(artifact: Path) -> None:
    executor = load_executor(artifact)
    assert isinstance(executor, GroupExecutor) and len(children()) == 1
    known = [5, 6, 7]
    for step in [PROMPT, *[DECODE] * 5]:
        (token,) = executor.run(step).tokens
        assert token == tiny.expected(known, known[3:].count(1))
        known.append(token)
    executor.close()


def test_steps_overlap_on_every_rank(artifact: Path) -> None:
    executor = load_executor(artifact)
    assert executor.depth == 2
    known, tickets = [5, 6, 7], [executor.launch(PROMPT)]
    for _ in range(12):
        tickets.append(executor.launch(DECODE))
        (token,) = executor.wait(tickets.pop(0)).tokens
        assert token == tiny.expected(known, known[3:].count(1))
        known.append(token)
    executor.settle()
    assert executor.run(Step([RowInit(0, [9], 0, 1, RowParams(), [0])], [], [Work(0, 1, True)])).tokens == [
        tiny.expected([9])
    ]
    executor.close()


def test_graphs_of_all_ranks_on_request(artifact: Path) -> None:
    executor = load_executor(artifact)
    assert executor.prepare() == 3
    assert executor.run(PROMPT).tokens == [tiny.expected([5, 6, 7])]
    executor.close()


def test_the_ranks_of_an_engine_have_adjacent_gpus(artifact: Path, library: Driver) -> None:
    library.gpu(count=6)
    opened = open_artifact(artifact)
    from llmc_runtime.device.device import Member

    for engine, rank in ((0, 0), (0, 1), (2, 0), (2, 1)):
        device = open_device(opened, 1, index=engine, member=Member(rank, 2, -1, 1.0))
        assert library.device == 2 * engine + rank
        device.close()
    with pytest.raises(LlmcError, match=r"E115.*engine 3 needs 2 GPUs of its own.*6 are visible.*\n.*size 3"):
        open_device(opened, 1, index=3, member=Member(0, 2, -1, 1.0))


def test_too_few_gpus(artifact: Path, library: Driver) -> None:
    library.gpu(count=1)
    refused(artifact, "E115", "engine 0 needs 2 GPUs of its own, one per rank, and 1 are visible.*fewer ranks")


def test_gpus_that_cannot_access_each_other(artifact: Path, library: Driver) -> None:
    library.reaches(False)
    refused(artifact, "E115", "GPU 0 cannot access the memory of GPU 1.*nvidia-smi topo.*CUDA_VISIBLE_DEVICES")


def test_memory_of_a_rank_that_cannot_be_opened(artifact: Path, library: Driver) -> None:
    library.fail("cuIpcOpenMemHandle", 201)
    refused(artifact, "E115", "the memory of rank 1 cannot be opened: CUDA_ERROR_INVALID_CONTEXT.*--ipc=host")


def test_memory_that_cannot_be_shared(artifact: Path, library: Driver) -> None:
    library.fail("cuIpcGetMemHandle", 801)
    refused(artifact, "E114", "CUDA_ERROR_NOT_SUPPORTED")


def test_a_program_for_ranks_on_one_gpu(artifact: Path) -> None:
    opened = open_artifact(artifact)
    device = open_device(opened, 1)
    with pytest.raises(LlmcError, match=r"E113.*memory of a group"):
        Executor(opened, device)
    device.close()


def ended(executor: Executor, words: str) -> None:
    """Every call fails with E119.

    The row starts again in each step: if it kept growing until the rank has ended, the kernel would leave its pages.
    """
    for _ in range(2):
        with pytest.raises(LlmcError) as failed:
            while True:
                executor.run(PROMPT)
        assert failed.value.code == "E119" and re.search(words, failed.value.cause), failed.value
    executor.close()


def test_a_killed_rank_ends_the_group(artifact: Path) -> None:
    executor = load_executor(artifact)
    executor.run(PROMPT)
    (pid,) = children()
    threading.Timer(0.1, lambda: os.kill(pid, signal.SIGKILL)).start()
    begin = time.monotonic()
    ended(executor, "rank 1 was ended by SIGKILL")
    assert time.monotonic() - begin < 5


def test_a_rank_that_hangs_is_noticed_by_the_kernels(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_group, "LIMIT_SECONDS", 0.3)
    monkeypatch.setattr(rank_group, "REPORT_SECONDS", 0.1)  # both together are shorter than the limit of heartbeats
    executor: Any = load_executor(artifact)
    executor.run(PROMPT)
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    try:
        ended(executor, "rank 0 waited longer than 0.3 s")
    finally:
        os.kill(pid, signal.SIGCONT) if Path(f"/proc/{pid}").exists() else None
