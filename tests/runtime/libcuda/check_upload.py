"""Upload of weights to the device: contents, hashes, threads; and random weights."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact import tiny
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.cpu_device import CpuDevice
from llmc_runtime.device.cuda.cuda_device import CudaDevice
from llmc_runtime.device.cuda.device_array import CudaMemory
from llmc_runtime.device.gpu import upload_work
from llmc_runtime.device.gpu.upload_work import BlockQueue
from llmc_runtime.device.gpu.weight_upload import MAPPED, PINNED, Upload, upload
from llmc_runtime.device.open_device import open_device
from llmc_runtime.engine.loader import open_engine
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.exec.buffer_layout import RandomWeights
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import TargetInfo, WeightFile

from bench.gpu import upload as bench
from llmc.artifact.write import write_artifact
from tests.runtime.libcuda import toy
from tests.runtime.libcuda.conftest import Driver

H100 = TargetInfo("cuda:sm_90", "sm_90", ())


def a_file(root: Path, name: str, size: int, block: int) -> tuple[WeightFile, np.ndarray]:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    (root / name).write_bytes(data.tobytes())
    blocks = [hashlib.sha256(data[at : at + block].tobytes()).hexdigest() for at in range(0, size, block)]
    return WeightFile(name, size, tuple(blocks), block), data


def send(
    device: CudaDevice, root: Path, files: list[WeightFile], check: bool = True, threads: int = 5, method: str = MAPPED
) -> tuple[dict[str, CudaMemory], Upload]:
    memories = {f.file: device._alloc(f.bytes) for f in files}
    at = {name: m.address for name, m in memories.items()}
    given = (device._cuda, device._enter, Folder(root), files, at)
    return memories, upload(*given, check=check, threads=threads, method=method)


@pytest.fixture(params=[MAPPED, PINNED])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def device(driver: Driver) -> Iterator[CudaDevice]:
    made = CudaDevice(H100)
    yield made
    made.close()


@pytest.mark.parametrize("block", [4096, 5000, 1 << 20, 16 << 20])
@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("span", [1, 3 << 20, 64 << 20])
def test_every_byte_arrives(
    device: CudaDevice, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    block: int, threads: int, span: int, method: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(upload_work, "SPAN_BYTES", span)
    sizes = {"a": (5 << 20) + 12345, "b": 17, "c": 2 << 20, "d": 0}
    made = [a_file(tmp_path, n, s if block > 5000 else -(-s // 50), block) for n, s in sizes.items()]
    for check in (True, False):
        memories, report = send(device, tmp_path, [f for f, _ in made], check, threads, method)
        for f, data in made:
            np.testing.assert_array_equal(device.read(memories[f.file]), data)
        assert report.nbytes == sum(f.bytes for f, _ in made) and report.rate > 0 and report.threads <= threads
        assert (report.method, report.fallback_reason) == (method, "") and str(report).endswith(f"threads, {method})")
    assert (driver.registrations > 0) == (method == MAPPED)


def test_registered_memory_is_limited(
    device: CudaDevice, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread registers one span at a time, and a span consists of whole blocks."""
    monkeypatch.setattr(upload_work, "SPAN_BYTES", 300 << 10)
    f, _ = a_file(tmp_path, "a", (4 << 20) + 1, 64 << 10)
    send(device, tmp_path, [f], threads=3)
    assert driver.registrations == -(-f.bytes // (256 << 10)) and driver.most_registered <= 3 * (256 << 10)


def test_the_first_wrong_block_is_named(device: CudaDevice, tmp_path: Path, method: str) -> None:
    f, data = a_file(tmp_path, "a", 9 << 20, 1 << 20)
    data[[3 << 20, 7 << 20]] ^= 1
    (tmp_path / "a").write_bytes(data.tobytes())
    for threads in (1, 5, 9):
        with pytest.raises(LlmcError, match=r"E107.*a is damaged: block 4 of 9 \(from byte 3145728\)"):
            send(device, tmp_path, [f], threads=threads, method=method)
    memories, _ = send(device, tmp_path, [f], check=False, method=method)
    np.testing.assert_array_equal(device.read(memories["a"]), data)


def test_nothing_is_copied_of_a_mapped_span_with_a_wrong_block(
    device: CudaDevice, driver: Driver, tmp_path: Path
) -> None:
    f, data = a_file(tmp_path, "a", 9 << 20, 1 << 20)
    data[-1] ^= 1
    (tmp_path / "a").write_bytes(data.tobytes())
    driver.log()
    with pytest.raises(LlmcError, match=r"E107.*block 9 of 9"):
        send(device, tmp_path, [f])
    assert driver.log() == [] and driver.registrations == 0


def test_a_gpu_that_does_not_register(driver: Driver, tmp_path: Path) -> None:
    """The device attribute rules registration out, so it is not attempted."""
    driver.registers(False)
    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    found = open_engine(open_artifact(tmp_path / "toy.llmc"), EngineOptions(""))
    assert re.search(r"weights \d+\.\d GB/s \(1 threads, pinned\)$", found.summary)
    found.close()


@pytest.mark.parametrize("status, name", [(801, "NOT_SUPPORTED"), (800, "NOT_PERMITTED"), (1, "INVALID_VALUE")])
@pytest.mark.parametrize("after", [0, 3])
def test_a_driver_that_refuses_to_register(
    device: CudaDevice, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    status: int, name: str, after: int,
) -> None:  # fmt: skip
    """Everything is copied through pinned memory, and the reason is reported."""
    monkeypatch.setattr(upload_work, "SPAN_BYTES", 1 << 20)
    f, data = a_file(tmp_path, "a", (9 << 20) + 5, 1 << 20)
    driver.fail("cuMemHostRegister", status, after)
    memories, report = send(device, tmp_path, [f])
    np.testing.assert_array_equal(device.read(memories["a"]), data)
    assert (
        report.method == PINNED
        and report.fallback_reason == f"cuMemHostRegister: CUDA_ERROR_{name}"
        and report.fallback_reason in str(report)
    )
    data[0] ^= 1
    (tmp_path / "a").write_bytes(data.tobytes())
    driver.fail("cuMemHostRegister", status, after)
    with pytest.raises(LlmcError, match=r"E107.*block 1 of 10"):
        send(device, tmp_path, [f])


@pytest.mark.parametrize("check", [True, False])
def test_a_file_that_is_too_short(device: CudaDevice, tmp_path: Path, method: str, check: bool) -> None:
    f, data = a_file(tmp_path, "a", 3 << 20, 1 << 20)
    (tmp_path / "a").write_bytes(data[: 2 << 20].tobytes())
    with pytest.raises(LlmcError, match=r"E106.*was truncated"):
        send(device, tmp_path, [f], check, method=method)


@pytest.mark.parametrize("late", [True, False])
def test_a_file_that_becomes_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Detected by the size before a block, and by the kernel if the file changes right after that check."""
    f, data = a_file(tmp_path, "a", 3 << 20, 1 << 20)
    work = BlockQueue(Folder(tmp_path), [f], mapped=True)
    _, block = next(iter(work))
    np.testing.assert_array_equal(work.load(block), data[: 1 << 20])
    _, block = next(iter(work))

    def cut() -> None:
        os.truncate(tmp_path / "a", 1 << 20)

    def looked(*given: Any) -> None:
        monkeypatch.undo()
        cut()

    if late:
        monkeypatch.setattr(BlockQueue, "_check_size", looked)
    else:
        cut()
    with pytest.raises(LlmcError, match=r"E106.*was truncated"):
        work.load(block)
    work.close()


def test_a_kernel_that_does_not_populate(device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_work, "_POPULATE_READ", 9999)
    f, data = a_file(tmp_path, "a", (3 << 20) + 77, 1 << 20)
    memories, report = send(device, tmp_path, [f])
    np.testing.assert_array_equal(device.read(memories["a"]), data)
    assert report.method == MAPPED


@pytest.mark.parametrize(
    "name", ["cuMemcpyHtoDAsync", "cuMemAllocHost", "cuMemHostRegister", "cuMemHostUnregister", "cuStreamCreate",
             "cuEventCreate", "cuEventRecord", "cuEventSynchronize"],
)  # fmt: skip
def test_a_failure_of_the_gpu_meanwhile(
    device: CudaDevice, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    if name in (("cuMemAllocHost",) if method == MAPPED else ("cuMemHostRegister", "cuMemHostUnregister")):
        pytest.skip("not called")
    monkeypatch.setattr(upload_work, "SPAN_BYTES", 1 << 20)
    f, _ = a_file(tmp_path, "a", 9 << 20, 1 << 20)
    driver.fail(name, 719, 1)
    with pytest.raises(LlmcError, match=r"E114.*CUDA_ERROR_LAUNCH_FAILED"):
        send(device, tmp_path, [f], method=method, threads=2)


def test_the_bench_measures_both_ways(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Restored after the test, as the benchmark sets it.
    monkeypatch.setattr(upload_work, "SPAN_BYTES", upload_work.SPAN_BYTES)
    out = tmp_path / "rows.json"
    options = ["--threads", "1,2", "--spans", "16", "--rounds", "1", "--dir", str(tmp_path), "--json", str(out)]
    assert bench.main(["0.02", *options]) == 0
    found = {(r["what"], r["threads"]): r for r in json.loads(out.read_text())["rows"]}
    assert {("floor: copy, registered", 1), ("mapped, hashed", 2), ("pinned, not hashed", 1)} <= found.keys()
    assert all(r["gb_s"] > 0 and not r["why"] for r in found.values())
    driver.registers(False)
    assert bench.main(["0.01", *options]) == 0
    whys = [r["why"] for r in json.loads(out.read_text())["rows"] if r["span"]]
    assert whys and set(whys) == {"cuMemHostRegister: CUDA_ERROR_NOT_SUPPORTED"}


def test_an_artifact_with_a_changed_weight(driver: Driver, tmp_path: Path) -> None:
    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    path = tmp_path / "toy.llmc/weights/00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for verify, detected in ((True, True), (False, False)):
        artifact = open_artifact(tmp_path / "toy.llmc", verify=verify)
        assert artifact.unchecked == verify
        device = open_device(artifact, 2)
        try:
            Executor(artifact, device)
        except LlmcError as error:
            assert detected and error.code == "E107" and "block 1 of 1 (from byte 0)" in error.cause
        else:
            assert not detected and device.describe()["upload_threads"] == 1
        device.close()


def test_a_rank_uploads_only_its_own_files(driver: Driver, tmp_path: Path) -> None:
    """The report is of all uploads."""
    from dataclasses import replace

    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    artifact = open_artifact(tmp_path / "toy.llmc")
    weights = artifact.manifest.weights
    files = tuple(replace(file, rank=1) for file in weights.files)
    manifest = replace(artifact.manifest, ranks=2, weights=replace(weights, files=files))
    device = CudaDevice(H100)
    uploaded = []
    for rank, names in ((0, []), (1, ["table"]), (1, ["table"])):
        device.place(replace(artifact, manifest=manifest, rank=rank), names)
        assert device._upload is not None
        uploaded.append(device._upload.nbytes)
    total = sum(file.bytes for file in files)
    assert uploaded == [0, total, 2 * total]
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
    moved = device.read(CudaMemory(found["table"], odd.data.nbytes, np.empty(0, np.uint8), device))
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
