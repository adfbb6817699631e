"""Steps of the toy artifact on the HIP device: those of the CUDA device that name no GPU, graphs, uploads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from artifact import tiny
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.hip.hip_device import HipDevice
from llmc_runtime.device.open_device import open_device
from llmc_runtime.exec.executor import Executor
from llmc_runtime.sched.step import Step, Work

from llmc.artifact.write import write_artifact
from tests.runtime.libamdhip64 import toy
from tests.runtime.libamdhip64.conftest import Driver
from tests.runtime.libcuda.check_steps import (  # noqa: F401
    init,
    test_a_size_that_no_program_serves,
    test_all_graphs_on_request,
    test_any_thread_may_run_steps,
    test_closing_one_device_leaves_another_of_the_same_thread_usable,
    test_logprobs_are_fetched_where_wanted,
    test_no_more_than_depth_steps_are_under_way,
    test_padding_harms_no_row,
    test_prefill_in_chunks_then_decode,
    test_rows_hold_what_was_sent,
    test_rows_that_grow_together_take_one_copy,
    test_steps_are_launched_ahead,
    test_whether_a_step_has_ended_is_known_without_waiting,
)


@pytest.fixture
def executor(driver: Driver, tmp_path: Path) -> Iterator[Executor]:
    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    artifact = open_artifact(tmp_path / "toy.llmc")
    made = Executor(artifact, open_device(artifact, 2))
    driver.log()
    yield made
    made.close()
    made.close()


def test_the_description_of_the_device(executor: Executor) -> None:
    assert isinstance(executor.device, HipDevice) and executor.depth == 2
    facts = executor.device.describe()
    assert facts["name"] == "Fake GPU" and facts["arch"] == "gfx942" and facts["driver"] == "ROCm 7.2"
    assert facts["upload_way"] == "pinned"
    assert executor.capacity.pages == tiny.ROWS * tiny.M


def test_a_decode_step_sends_only_what_changed(executor: Executor, driver: Driver) -> None:
    executor.run(Step([init(r, [r + 1, 2], [r, 9 + r]) for r in range(3)], [], [Work(r, 2, True) for r in range(3)]))
    assert driver.log()[-4:] == ["launch", "launch", "down", "mark"]
    decode = Step([], [], [Work(r, 1, True) for r in range(3)])
    executor.run(decode)
    assert driver.log() == ["up", "graph2", "replay", "down", "mark"]  # one graph of two launches, for 4 rows
    executor.run(decode)
    assert driver.log() == ["replay", "down", "mark"]


@pytest.mark.parametrize("check", [False, True])
def test_weights_are_uploaded_whole(driver: Driver, tmp_path: Path, check: bool) -> None:
    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    artifact = open_artifact(tmp_path / "toy.llmc", verify=check)
    device = open_device(artifact, 2)
    found = device.place(artifact, ["table"])
    memory = device.alloc(4 * tiny.V)
    device._copy(memory.address, found["table"], memory.nbytes)  # type: ignore[attr-defined]
    assert device.read(memory).tobytes() == tiny.table().tobytes()
    assert "pinned" in device.upload_summary
    device.close()
