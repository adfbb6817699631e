"""Ranks that exchange results by NCCL, simulated on a driver without GPUs: steps, graphs, errors and ranks that end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from artifact import tiny
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.cuda import nccl_group
from llmc_runtime.device.cuda.nccl_group import Nccl, NcclGroup
from llmc_runtime.device.device import Member
from llmc_runtime.device.open_device import open_device
from llmc_runtime.exec.executor import Executor
from llmc_runtime.exec.group_executor import GroupExecutor
from llmc_runtime.exec.load_executor import load_executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.nccl_call import NcclCall

from llmc.artifact.write import write_artifact
from tests.runtime.fake_driver import build
from tests.runtime.libcuda import toy
from tests.runtime.libcuda.check_ranks import DECODE, PROMPT, children, ended, refused
from tests.runtime.libcuda.conftest import Driver


@pytest.fixture(scope="session")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module nvidia.nccl, which has the simulated library."""
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "nvidia" / "nccl" / "lib").mkdir(parents=True)
    build(Path(__file__).with_name("libnccl.cpp"), folder / "nvidia" / "nccl" / "lib", "libnccl.so.2")
    return folder


@pytest.fixture
def artifact(library: Driver, nccl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The toy artifact for two ranks with NCCL, on a machine with two GPUs that cannot access each other."""
    monkeypatch.setenv("FAKE_GPUS", "2")
    monkeypatch.setenv("FAKE_GPU_PROGRESS", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(nccl), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(nccl))
    write_artifact(tmp_path / "two.llmc", toy.nccl_parts(tmp_path))
    with library.reset():
        library.reaches(False)
        yield tmp_path / "two.llmc"
    assert not children()


def tokens(executor: Executor, steps: int) -> list[int]:
    """Run the prompt and then steps of decoding; return the tokens, which those of one rank are."""
    known, start = [5, 6, 7], 3
    for step in [PROMPT, *[DECODE] * steps]:
        (token,) = executor.run(step).tokens
        assert token == tiny.expected(known, known[start:].count(1))
        known.append(token)
    return known[start:]


def test_steps_of_two_ranks(artifact: Path, library: Driver) -> None:
    executor = load_executor(artifact)
    assert isinstance(executor, GroupExecutor) and len(children()) == 1
    library.log()
    tokens(executor, 5)
    log = library.log()
    # The prompt is launched kernel by kernel, the last one after NCCL has ended; decode steps are captured once.
    first = log.index("launch")
    assert log[first : first + 5] == ["launch", "launch-pdl", "ncclAllGather-2x1", "ncclAllReduce-2x1", "launch"]
    assert log.count("ncclAllReduce-2x1") == 2 and log.count("graph5") == 1 and log.count("replay") == 5
    executor.close()


def test_graphs_of_all_ranks_on_request(artifact: Path, library: Driver) -> None:
    executor = load_executor(artifact)
    library.log()
    assert executor.prepare() == 3
    assert [x for x in library.log() if x.startswith("ncclAllGather")] == [f"ncclAllGather-2x{n}" for n in (1, 2, 4)]
    tokens(executor, 3)
    assert not [x for x in library.log() if x.startswith("graph")]
    executor.close()
    assert "ncclCommAbort" in library.log()  # it has returned, since the graphs were destroyed first


def test_careful_steps_without_graphs(artifact: Path, library: Driver) -> None:
    executor = load_executor(artifact, careful=True)
    library.log()
    tokens(executor, 2)
    log = library.log()
    assert log.count("ncclAllReduce-2x1") == 3 and "replay" not in log
    executor.close()


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("ncclGetUniqueId:0:2", "E143", "ncclGetUniqueId failed: unhandled system error: words of the library.*WARN"),
        ("ncclCommInitRank:1:2", "E143", "rank 1: NCCL: ncclCommInitRank failed.*words of the library"),
        ("ncclCommInitRank:0:2", "E143", "ncclCommInitRank failed"),
        ("ncclCommInitRank:1:-1", "E119", "the process of rank 1 was ended by SIGKILL"),
    ],
)
def test_a_start_that_fails(fault: str, code: str, words: str, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_FAIL", fault)
    begin = time.monotonic()
    refused(artifact, code, words)
    assert time.monotonic() - begin < 20


def test_ranks_that_do_not_connect_in_time(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_group, "INIT_SECONDS", 0.2)
    waits, before = threading.Event(), set(threading.enumerate())
    monkeypatch.setattr(Nccl, "init", lambda *args: waits.wait(20) and 0)
    aborted: list[int] = []
    monkeypatch.setattr(Nccl, "abort", lambda self, comm: aborted.append(comm))
    refused(artifact, "E143", "rank 0 could not connect to the others by NCCL within 0.2 s.*NCCL_DEBUG=INFO")
    waits.set()
    (thread,) = (t for t in set(threading.enumerate()) - before if t.name == "llmc-nccl-init")
    thread.join(20)
    assert aborted == [0]  # a communicator that is made too late


def test_a_library_that_is_missing_or_too_old(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_VERSION", "21003")
    refused(artifact, "E143", "is NCCL 2.10.3; ranks need 2.18.0 or newer.*pip install nvidia-nccl-cu13.*-cu12")
    monkeypatch.setattr(nccl_group, "LIBRARY", "libnccl-missing.so.2")
    refused(artifact, "E143", "cannot be loaded: libnccl-missing.so.2.*pip install nvidia-nccl-cu13.*LD_LIBRARY_PATH")


def test_a_call_that_fails(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = load_executor(artifact)
    executor.run(PROMPT)
    monkeypatch.setenv("FAKE_NCCL_FAIL", "ncclAllReduce:0:5")
    for _ in range(2):
        with pytest.raises(LlmcError, match=r"E143.*ncclAllReduce failed.*words of the library"):
            executor.run(DECODE)
    executor.close()


def test_an_error_in_the_background(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = load_executor(artifact)
    executor.run(PROMPT)
    monkeypatch.setenv("FAKE_NCCL_FAIL", "background:0:6")
    ended(executor, "NCCL: a collective failed: remote process exited")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_ends_the_group(number: signal.Signals, artifact: Path) -> None:
    executor = load_executor(artifact)
    executor.run(PROMPT)
    (pid,) = children()
    threading.Timer(0.1, lambda: os.kill(pid, number)).start()
    ended(executor, "rank 1 was ended by SIGKILL" if number == signal.SIGKILL else "rank 1 sent no heartbeat")


def test_groups_in_threads(artifact: Path, library: Driver) -> None:
    """Calls pass operand, result, count and dtype; a call after the end is refused, as is another dtype."""
    opened, results = open_artifact(artifact), {}
    ready: dict[int, bytes] = {}
    barrier = threading.Barrier(2)

    def run(rank: int) -> None:
        device = open_device(opened, 1, member=Member(rank, 2, -1, 5.0))
        group = device._group  # type: ignore[attr-defined]
        assert isinstance(group, NcclGroup)
        ready[rank] = device.group_handle
        barrier.wait()
        device.connect([ready[0], ready[1]])
        x, y = device.alloc(12), device.alloc(24)
        device.write(x, 0, np.array([1.5, rank, 2], np.float32))
        stream = device._stream  # type: ignore[attr-defined]
        group.call(NcclCall("ncclAllGather", "f32"), x.address, y.address, 3, stream)
        group.call(NcclCall("ncclAllReduce", "f32"), x.address, x.address, 3, stream)
        results[rank] = device, group, x, y

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ready[1] == b"" and len(ready[0]) == 128
    assert sorted(x for x in library.log() if x.startswith("nccl")) == [
        *["ncclAllGather-7x3"] * 2, *["ncclAllReduce-7x3"] * 2
    ]  # fmt: skip
    for device, group, _, _ in results.values():
        group.cancel()
        with pytest.raises(LlmcError, match="E119"):
            group.call(NcclCall("ncclAllReduce", "f32"), 0, 0, 3, None)
        device.close()
    with pytest.raises(LlmcError, match=r"E103.*NCCL has no dtype 'f64'"):
        NcclCall.load(b'{"function": "ncclAllReduce", "dtype": "f64"}', "kernels/x.json")
    with pytest.raises(LlmcError, match=r"E103.*unknown function 'ncclSend'"):
        NcclCall.load(b'{"function": "ncclSend", "dtype": "f32"}', "kernels/x.json")


def test_artifacts_for_peer_memory_name_the_option(artifact: Path, tmp_path: Path) -> None:
    programs = [toy.of_ranks(toy.program("step", False))]
    write_artifact(tmp_path / "peer.llmc", toy.parts(tmp_path, programs=tuple(programs)))
    refused(tmp_path / "peer.llmc", "E115", "cannot access the memory of GPU 1.*recompile with --collectives nccl")
