"""Weights on their way to the device: every byte, every hash, by several threads; and random ones."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact import tiny
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device import cuda_upload
from llmc_runtime.device.choose import open_device
from llmc_runtime.device.cpu import CpuDevice
from llmc_runtime.device.cuda import CudaDevice, CudaMemory
from llmc_runtime.exec.executor import Executor
from llmc_runtime.exec.random_weights import RandomWeights
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import TargetInfo, WeightFile

from llmc.artifact.write import write_artifact
from tests.runtime.libcuda import toy
from tests.runtime.libcuda.conftest import Driver

H100 = TargetInfo("cuda:sm_90", "sm_90", ())


def a_file(root: Path, name: str, size: int, block: int) -> tuple[WeightFile, np.ndarray]:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    (root / name).write_bytes(data.tobytes())
    blocks = [hashlib.sha256(data[at : at + block].tobytes()).hexdigest() for at in range(0, size, block)]
    return WeightFile(name, size, tuple(blocks), block), data


def send(device: CudaDevice, root: Path, files: list[WeightFile], check: bool = True, threads: int = 5) -> Any:
    memories = {f.file: device._alloc(f.bytes) for f in files}
    at = {name: m.address for name, m in memories.items()}
    return memories, cuda_upload.upload(
        device._cuda, device._enter, Folder(root), files, at, check=check, threads=threads
    )


@pytest.mark.parametrize("block", [4096, 1 << 20, 16 << 20])
@pytest.mark.parametrize("threads", [1, 5])
def test_every_byte_arrives(driver: Driver, tmp_path: Path, block: int, threads: int) -> None:
    sizes = {"a": (5 << 20) + 12345, "b": 17, "c": 2 << 20}
    made = [a_file(tmp_path, n, s if block > 4096 else s // 50 + 1, block) for n, s in sizes.items()]
    device = CudaDevice(H100)
    memories, report = send(device, tmp_path, [f for f, _ in made], threads=threads)
    for f, data in made:
        np.testing.assert_array_equal(device.read(memories[f.file]), data)
    assert report.nbytes == sum(f.bytes for f, _ in made) and report.rate > 0 and report.threads <= threads
    device.close()


def test_the_first_wrong_block_is_named(driver: Driver, tmp_path: Path) -> None:
    f, data = a_file(tmp_path, "a", 9 << 20, 1 << 20)
    data[[3 << 20, 7 << 20]] ^= 1
    (tmp_path / "a").write_bytes(data.tobytes())
    device = CudaDevice(H100)
    with pytest.raises(LlmcError, match=r"E107.*a is damaged: block 4 of 9 \(from byte 3145728\)"):
        send(device, tmp_path, [f], threads=1)
    with pytest.raises(LlmcError, match=r"E107.*is damaged: block [48] of 9"):
        send(device, tmp_path, [f])
    memories, _ = send(device, tmp_path, [f], check=False)
    np.testing.assert_array_equal(device.read(memories["a"]), data)
    device.close()


def test_a_file_that_becomes_shorter(driver: Driver, tmp_path: Path) -> None:
    f, data = a_file(tmp_path, "a", 3 << 20, 1 << 20)
    (tmp_path / "a").write_bytes(data[: 2 << 20].tobytes())
    device = CudaDevice(H100)
    with pytest.raises(LlmcError, match=r"E106.*became shorter"):
        send(device, tmp_path, [f])
    device.close()


@pytest.mark.parametrize("name", ["cuMemcpyHtoDAsync", "cuMemAllocHost", "cuStreamCreate", "cuEventRecord"])
def test_a_failure_of_the_gpu_meanwhile(driver: Driver, tmp_path: Path, name: str) -> None:
    f, _ = a_file(tmp_path, "a", 9 << 20, 1 << 20)
    device = CudaDevice(H100)
    driver.fail(name, 719, 3)
    with pytest.raises(LlmcError, match=r"E114.*CUDA_ERROR_LAUNCH_FAILED"):
        send(device, tmp_path, [f])
    device.close()


def test_an_artifact_with_a_changed_weight(driver: Driver, tmp_path: Path) -> None:
    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    path = tmp_path / "toy.llmc/weights/00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for verify, told in ((True, True), (False, False)):
        artifact = open_artifact(tmp_path / "toy.llmc", verify=verify)
        assert artifact.unchecked == verify
        device = open_device(artifact, 2)
        try:
            Executor(artifact, device)
        except LlmcError as error:
            assert told and error.code == "E107" and "block 1 of 1 (from byte 0)" in error.cause
        else:
            assert not told and device.describe()["upload_threads"] == 1
        device.close()


def test_a_weight_at_an_odd_place_is_moved(driver: Driver, tmp_path: Path) -> None:
    from dataclasses import replace

    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    artifact = open_artifact(tmp_path / "toy.llmc")
    tensor = artifact.tensors["table"]
    odd = replace(tensor, begin=tensor.begin + 4, data=tensor.data[4:])
    device = CudaDevice(H100)
    found = device.place(replace(artifact, tensors={"table": odd, "even": tensor}), ["table", "even"])
    assert found["table"] % 64 == 0
    moved = device.read(CudaMemory(found["table"], odd.data.nbytes, np.empty(0, np.uint8)))
    np.testing.assert_array_equal(moved, tiny.table().view(np.uint8)[4:])
    device.close()


@pytest.mark.parametrize("dtype, rank", [("bf16", 2), ("f32", 2), ("u8", 2), ("bf16", 1), ("f32", 1), ("i32", 1)])
def test_random_bytes_are_those_of_the_cpu(driver: Driver, dtype: str, rank: int) -> None:
    driver.gpu(nbytes=1 << 32)
    ours, theirs = CudaDevice(H100), CpuDevice(1)
    for size in (64, 4096, (1 << 20) - 64, (2 << 20) + 192, (19 << 20) + 64):
        want, found = theirs.alloc(size), ours.alloc(size)
        for device, memory, source in ((theirs, want, RandomWeights(3)), (ours, found, RandomWeights(3))):
            device.repeat(memory, *source.tile(f"layer.{size}", dtype, rank, size))  # type: ignore[attr-defined]
        np.testing.assert_array_equal(ours.read(found), want.host)
    ours.close()
