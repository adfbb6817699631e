"""Failures of GPUs: no driver, no GPU, old drivers, too little memory, wrong architectures, kernels that do not
load.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from artifact import tiny
from kernel_cache import library
from llmc_runtime.artifact import Artifact, open_artifact
from llmc_runtime.device.cuda.cuda_device import CudaDevice, check_arch
from llmc_runtime.device.cuda.driver import Cuda
from llmc_runtime.device.open_device import open_device
from llmc_runtime.engine.loader import open_engine
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import TargetInfo

from llmc.artifact.write import write_artifact
from tests.runtime import gpu_faults
from tests.runtime.gpu_faults import DECODE, STEP, opened
from tests.runtime.libcuda import toy
from tests.runtime.libcuda.conftest import Driver

H100 = TargetInfo("cuda:sm_90", "sm_90", ())


@pytest.fixture
def artifact(driver: Driver, tmp_path: Path) -> Artifact:
    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    return open_artifact(tmp_path / "toy.llmc")


class NoLibrary:
    """The bindings on a machine without libcuda."""

    def cuInit(self, flags: int) -> Any:
        raise RuntimeError("Failed to dlopen libcuda.so.1")


def test_no_driver() -> None:
    with pytest.raises(LlmcError, match=r"E115.*no NVIDIA driver found.*libcuda.so.1.*\n.*cpu:native"):
        Cuda(NoLibrary())


def test_no_gpu(artifact: Artifact, driver: Driver) -> None:
    driver.gpu(count=0)
    opened(artifact, "E115", "finds no GPU")


def test_each_engine_has_a_gpu_of_its_own(artifact: Artifact, driver: Driver) -> None:
    driver.gpu(count=2)
    device = open_device(artifact, 1, index=1)
    assert isinstance(device, CudaDevice) and device.number == 1
    device.close()
    with pytest.raises(LlmcError, match=r"E115.*engine 2 needs a GPU of its own, and 2 are visible.*\n.*size 2"):
        open_device(artifact, 1, index=2)


def test_a_driver_that_does_not_start(artifact: Artifact, driver: Driver) -> None:
    driver.fail("cuInit", 803)
    with pytest.raises(LlmcError, match=r"E115.*CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"):
        open_device(artifact, 1)


def test_an_old_driver(artifact: Artifact, driver: Driver) -> None:
    driver.gpu(version=11040)
    opened(artifact, "E116", r"supports CUDA 11.4; kernels for sm_90 need 12.3")


def test_another_architecture(artifact: Artifact, driver: Driver) -> None:
    driver.gpu(major=10)
    opened(artifact, "E117", r"for cuda:sm_90 \(sm_90\); this GPU is sm_100 \(Fake GPU\)\n.*--target cuda:sm_100")
    driver.gpu(major=8, minor=6)
    opened(artifact, "E117", r"this GPU is sm_86 .*\n.*--target cuda:sm_80")


@pytest.mark.parametrize(
    "arch, gpu, fits",
    [
        ("sm_80", "sm_80", True), ("sm_80", "sm_86", True), ("sm_80", "sm_90", False), ("sm_86", "sm_80", False),
        ("sm_90", "sm_90", True), ("sm_90a", "sm_90", True), ("sm_90", "sm_100", False), ("sm_100", "sm_103", False),
        ("sm_100", "sm_100", True), ("sm_120", "sm_121", False), ("gfx942", "sm_90", False),
    ],
)  # fmt: skip
def test_architectures_that_can_run_an_artifact(arch: str, gpu: str, fits: bool) -> None:
    try:
        check_arch(TargetInfo(f"cuda:{arch}", arch, ()), gpu, "")
    except LlmcError as error:
        assert error.code == "E117" and not fits
    else:
        assert fits


def test_too_little_memory(artifact: Artifact, driver: Driver) -> None:
    driver.gpu(nbytes=1 << 20)
    opened(artifact, "E205", r"1.0 MiB free; .* are needed: weights 2.0 MiB, rows .*, KV of one sequence of 32 tokens")
    gpu_faults.too_little_memory_for_a_text(artifact, driver)


def test_a_kv_cache_larger_than_what_is_left(artifact: Artifact, driver: Driver) -> None:
    gpu_faults.kv_cache_larger_than_what_is_left(artifact, driver)


def test_memory_that_is_refused_all_the_same(artifact: Artifact, driver: Driver) -> None:
    for after in range(0, 12, 3):
        driver.fail("cuMemAlloc", 2, after)
        opened_once(artifact, driver, "E203")


@pytest.mark.parametrize("name", ["cuStreamCreate", "cuMemAllocHost", "cuEventCreate", "cuDevicePrimaryCtxRetain"])
def test_a_gpu_that_fails_while_it_is_opened(artifact: Artifact, driver: Driver, name: str) -> None:
    driver.fail(name, 2)
    opened_once(artifact, driver, "E203")
    driver.fail(name, 999)
    opened_once(artifact, driver, "E114")


def opened_once(artifact: Artifact, driver: Driver, code: str) -> None:
    with pytest.raises(LlmcError, match=code):
        open_engine(artifact, EngineOptions(""))
    assert driver.used == 0


@pytest.mark.parametrize("binary, words", [(b"not a cubin at all", "INVALID_IMAGE"), (None, "NOT_FOUND")])
def test_a_kernel_that_does_not_load(driver: Driver, tmp_path: Path, binary: bytes | None, words: str) -> None:
    parts = toy.parts(tmp_path)
    bad = replace(parts.kernels[0], binary=binary or library("int nothing;", "-O1"))
    write_artifact(tmp_path / "toy.llmc", replace(parts, kernels=(bad, parts.kernels[1])))
    opened(open_artifact(tmp_path / "toy.llmc"), "E112", rf"{bad.hash}.cubin cannot be loaded: CUDA_ERROR_{words}")


def test_kernels_of_another_kind(driver: Driver, tmp_path: Path) -> None:
    parts = toy.parts(tmp_path)
    for change, words in (({"abi": "cuda-9"}, "'cuda-9'"), ({"shared": 300 << 10}, "needs 307200 bytes of shared")):
        odd = (replace(parts.kernels[0], **change), parts.kernels[1])  # type: ignore[arg-type]
        folder = tmp_path / f"{len(words)}.llmc"
        write_artifact(folder, replace(parts, kernels=odd))
        opened(open_artifact(folder), "E112", words)
    gpu_faults.launches_of_no_kernel(parts, tmp_path)


def test_a_failure_amid_steps(artifact: Artifact, driver: Driver) -> None:
    executor = Executor(artifact, open_device(artifact, 2))
    executor.run(STEP)
    driver.fail("kernel", 700)
    first, second = executor.launch(DECODE), executor.launch(DECODE)
    with pytest.raises(LlmcError, match=r"E114: the GPU failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        executor.wait(first)
    for again in (lambda: executor.run(STEP), executor.settle, lambda: executor.wait(second)):
        with pytest.raises((LlmcError, RuntimeError), match=r"ILLEGAL_ADDRESS|waited for once"):
            again()
    executor.close()


@pytest.mark.parametrize("name", ["cuLaunchKernelEx", "cuGraphLaunch", "cuGraphInstantiate", "cuMemcpyHtoDAsync"])
def test_a_launch_that_is_refused(artifact: Artifact, driver: Driver, name: str) -> None:
    executor = Executor(artifact, open_device(artifact, 2))
    executor.run(STEP)
    driver.fail(name, 1)
    with pytest.raises(LlmcError, match=r"E114.*CUDA_ERROR_INVALID_VALUE"):
        executor.run(DECODE)
    executor.settle()
    assert executor.run(STEP).tokens == [tiny.expected([1, 2, 3])]  # nothing is left in an inconsistent state
    executor.close()


def test_a_refused_launch_says_where(artifact: Artifact, driver: Driver) -> None:
    gpu_faults.refused_launch_says_where(artifact, driver, "cuLaunchKernelEx", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")


def test_a_careful_device_names_the_kernel(artifact: Artifact, driver: Driver) -> None:
    executor = Executor(artifact, open_device(artifact, 2, careful=True))
    executor.run(STEP)
    driver.log()
    executor.run(DECODE)
    assert driver.log() == ["up", "launch", "launch-pdl", "down", "mark"]
    driver.fail("kernel", 700, 1)
    with pytest.raises(LlmcError, match=r"E114.*ILLEGAL_ADDRESS.* at toy \(model.toy\)"):
        executor.run(DECODE)
    executor.close()


def test_a_size_that_does_not_fit(driver: Driver, tmp_path: Path) -> None:
    gpu_faults.size_that_does_not_fit(toy.parts(tmp_path), tmp_path)


def test_every_request_is_reported_of_a_failure(artifact: Artifact, driver: Driver) -> None:
    gpu_faults.every_request_is_reported(artifact, driver, "CUDA_ERROR_LAUNCH_FAILED")
