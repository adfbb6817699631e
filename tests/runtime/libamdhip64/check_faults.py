"""Failures of AMD GPUs: no ROCm, no GPU, old ROCm, too little memory, wrong architectures, kernels that do not load or
fail.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from artifact import tiny
from kernel_cache import library
from llmc_runtime.artifact import Artifact, open_artifact
from llmc_runtime.device.hip.driver import Hip
from llmc_runtime.device.hip.hip_device import HipDevice
from llmc_runtime.device.open_device import open_device
from llmc_runtime.engine.loader import open_engine
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format.errors import LlmcError

from llmc.artifact.write import write_artifact
from tests.runtime import gpu_faults
from tests.runtime.gpu_faults import DECODE, STEP, opened
from tests.runtime.libamdhip64 import toy
from tests.runtime.libamdhip64.conftest import Driver


@pytest.fixture
def artifact(driver: Driver, tmp_path: Path) -> Artifact:
    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    return open_artifact(tmp_path / "toy.llmc")


class NoLibrary:
    """The bindings on a machine without libamdhip64."""

    def hipInit(self, flags: int) -> Any:
        raise RuntimeError("failed to dlopen 'libamdhip64.so'")


def test_no_library() -> None:
    with pytest.raises(LlmcError, match=r"E115.*no ROCm found.*libamdhip64.so.*\n.*LD_LIBRARY_PATH.*cpu:native"):
        Hip(NoLibrary())


def test_no_gpu(artifact: Artifact, driver: Driver) -> None:
    driver.gpu(count=0)
    opened(artifact, "E115", r"finds no AMD GPU .*\n.*/dev/kfd")


def test_each_engine_has_a_gpu_of_its_own(artifact: Artifact, driver: Driver) -> None:
    driver.gpu(count=2)
    device = open_device(artifact, 1, index=1)
    assert isinstance(device, HipDevice) and device.number == 1
    device.close()
    with pytest.raises(LlmcError, match=r"E115.*engine 2 needs a GPU .*2 are visible.*\n.*HIP_VISIBLE_DEVICES"):
        open_device(artifact, 1, index=2)


def test_a_driver_that_does_not_start(artifact: Artifact, driver: Driver) -> None:
    driver.fail("hipInit", 3)
    with pytest.raises(LlmcError, match=r"E115.*ROCm does not start: hipErrorNotInitialized"):
        open_device(artifact, 1)


def test_an_old_driver(artifact: Artifact, driver: Driver, tmp_path: Path) -> None:
    driver.gpu(version=50221153)
    opened(artifact, "E116", r"has ROCm 5.2; kernels for gfx942 need 6.3")
    driver.gpu(version=60443484, arch="gfx950")
    write_artifact(tmp_path / "new.llmc", toy.parts(tmp_path, target="hip:gfx950"))
    opened(open_artifact(tmp_path / "new.llmc"), "E116", r"has ROCm 6.4; kernels for gfx950 need 7.0")


@pytest.mark.parametrize("arch", ["gfx90a:sramecc+:xnack-", "gfx950", "gfx1100"])
def test_another_architecture(artifact: Artifact, driver: Driver, arch: str) -> None:
    driver.gpu(arch=arch)
    name = arch.partition(":")[0]
    opened(artifact, "E117", rf"for hip:gfx942 \(gfx942\); this GPU is {name} \(Fake GPU\)\n.*--target hip:{name}")


def test_too_little_memory(artifact: Artifact, driver: Driver) -> None:
    driver.gpu(nbytes=1 << 20)
    opened(artifact, "E205", r"1.0 MiB free; .* are needed: weights 2.0 MiB, rows .*, KV of one sequence of 32 tokens")
    gpu_faults.too_little_memory_for_a_text(artifact, driver)


def test_a_kv_cache_larger_than_what_is_left(artifact: Artifact, driver: Driver) -> None:
    gpu_faults.kv_cache_larger_than_what_is_left(artifact, driver)


def test_memory_that_is_refused_all_the_same(artifact: Artifact, driver: Driver) -> None:
    for after in range(0, 12, 3):
        driver.fail("hipMalloc", 2, after)
        opened_once(artifact, driver, "E203")


@pytest.mark.parametrize(
    "name", ["hipStreamCreateWithFlags", "hipHostMalloc", "hipEventCreateWithFlags", "hipSetDevice"]
)
def test_a_gpu_that_fails_while_it_is_opened(artifact: Artifact, driver: Driver, name: str) -> None:
    driver.fail(name, 2)
    opened_once(artifact, driver, "E203")
    driver.fail(name, 999)
    opened_once(artifact, driver, "E114")


def opened_once(artifact: Artifact, driver: Driver, code: str) -> None:
    with pytest.raises(LlmcError, match=code):
        open_engine(artifact, EngineOptions(""))
    assert driver.used == 0


@pytest.mark.parametrize("binary, words", [(b"not a code object", "InvalidImage"), (None, "NotFound")])
def test_a_kernel_that_does_not_load(driver: Driver, tmp_path: Path, binary: bytes | None, words: str) -> None:
    parts = toy.parts(tmp_path)
    bad = replace(parts.kernels[0], binary=binary or library("int nothing;", "-O1"))
    write_artifact(tmp_path / "toy.llmc", replace(parts, kernels=(bad, parts.kernels[1])))
    opened(open_artifact(tmp_path / "toy.llmc"), "E112", rf"{bad.hash}.hsaco cannot be loaded: hipError{words}")


def test_kernels_of_another_kind(driver: Driver, tmp_path: Path) -> None:
    parts = toy.parts(tmp_path)
    for change, words in (({"abi": "cuda-1"}, "'cuda-1'"), ({"shared": 65 << 10}, "needs 66560 bytes of shared")):
        odd = (replace(parts.kernels[0], **change), parts.kernels[1])  # type: ignore[arg-type]
        folder = tmp_path / f"{len(words)}.llmc"
        write_artifact(folder, replace(parts, kernels=odd))
        opened(open_artifact(folder), "E112", words)
    gpu_faults.launches_of_no_kernel(parts, tmp_path)


def test_launches_that_only_other_gpus_have(driver: Driver, tmp_path: Path) -> None:
    parts = toy.parts(tmp_path)
    step = parts.programs[2]
    early = replace(step, launches=(step.launches[0], replace(step.launches[1], pdl=True)))
    write_artifact(tmp_path / "early.llmc", replace(parts, programs=(*parts.programs[:2], early)))
    opened(open_artifact(tmp_path / "early.llmc"), "E113", "uses a dependent launch")
    with pytest.raises(LlmcError, match=r"E113.*uses a cluster of blocks"):
        Hip().launch_config(replace(step.launches[0], cluster=(2, 1, 1)), None)
    with pytest.raises(LlmcError, match=r"E113.*a tensor map"):
        Hip().tensor_map(256, "bf16", (8, 8), (8, 1), (8, 8), 0)


def test_a_failure_amid_steps(artifact: Artifact, driver: Driver) -> None:
    executor = Executor(artifact, open_device(artifact, 2))
    executor.run(STEP)
    driver.fail("kernel", 700)
    first, second = executor.launch(DECODE), executor.launch(DECODE)
    with pytest.raises(LlmcError, match=r"E114: the GPU failed: hipErrorIllegalAddress"):
        executor.wait(first)
    for again in (lambda: executor.run(STEP), executor.settle, lambda: executor.wait(second)):
        with pytest.raises((LlmcError, RuntimeError), match=r"IllegalAddress|waited for once"):
            again()
    driver.lib.fake_reset()  # the process would end here: HIP frees nothing after such an error
    executor.close()


@pytest.mark.parametrize(
    "name", ["hipModuleLaunchKernel", "hipGraphLaunch", "hipGraphInstantiateWithFlags", "hipMemcpyAsync"]
)
def test_a_launch_that_is_refused(artifact: Artifact, driver: Driver, name: str) -> None:
    executor = Executor(artifact, open_device(artifact, 2))
    executor.run(STEP)
    driver.fail(name, 1)
    with pytest.raises(LlmcError, match=r"E114.*hipErrorInvalidValue"):
        executor.run(DECODE)
    executor.settle()
    assert executor.run(STEP).tokens == [tiny.expected([1, 2, 3])]  # nothing is left in an inconsistent state
    executor.close()


def test_a_careful_device_names_the_kernel(artifact: Artifact, driver: Driver) -> None:
    executor = Executor(artifact, open_device(artifact, 2, careful=True))
    executor.run(STEP)
    driver.log()
    executor.run(DECODE)
    assert driver.log() == ["up", "launch", "launch", "down", "mark"]
    driver.fail("kernel", 700, 1)
    with pytest.raises(LlmcError, match=r"E114.*IllegalAddress.* at toy \(model.toy\)"):
        executor.run(DECODE)
    driver.lib.fake_reset()
    executor.close()


def test_a_refused_launch_says_where(artifact: Artifact, driver: Driver) -> None:
    gpu_faults.refused_launch_says_where(artifact, driver, "hipModuleLaunchKernel", "hipErrorLaunchOutOfResources")


def test_a_size_that_does_not_fit(driver: Driver, tmp_path: Path) -> None:
    gpu_faults.size_that_does_not_fit(toy.parts(tmp_path), tmp_path)


def test_every_request_is_reported_of_a_failure(artifact: Artifact, driver: Driver) -> None:
    gpu_faults.every_request_is_reported(artifact, driver, "hipErrorLaunchFailure")
