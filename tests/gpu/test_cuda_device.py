"""The CUDA device and the executor on a GPU: copies, uploads, launches, graphs, failures. NVRTC compiles kernels."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact import tiny
from draw import generator
from gpu import toy
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.cpu_device import CpuDevice
from llmc_runtime.device.cuda.cuda_device import CudaDevice
from llmc_runtime.device.gpu import weight_upload
from llmc_runtime.exec.buffer_layout import RandomWeights
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format import expr
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import TargetInfo, WeightFile
from llmc_runtime.format.program import Buffer, Launch, Program
from llmc_runtime.sched.step import RowInit, RowPages, RowParams, Step, Work

from llmc.artifact.write import write_artifact

pytestmark = pytest.mark.gpu

CHAIN = """
extern "C" __global__ void add(const unsigned* x, unsigned* y, int n, int by, void* a, void* b) {
  WAIT
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * 3 + by;
}
"""
FAULT = """
extern "C" __global__ void fault(int* x, int n, void* a, void* b) { *(volatile int*)(long long)n = n; }
"""
RAGGED = 100


def installed_arch() -> str:
    from cuda.bindings import driver

    driver.cuInit(0)
    kind = driver.CUdevice_attribute
    which = (kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    return "sm_{}{}".format(*(driver.cuDeviceGetAttribute(w, 0)[1] for w in which))


def open_gpu() -> CudaDevice:
    arch = installed_arch()
    return CudaDevice(TargetInfo(f"cuda:{arch}", arch, ()))


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    made = open_gpu()
    yield made
    made.close()


@pytest.fixture
def rng() -> np.random.Generator:
    return generator()


def test_copies(device: CudaDevice, rng: np.random.Generator) -> None:
    for size in (1, 4, 4093, 1 << 20, (9 << 20) + 5):  # the last one takes several slots
        memory = device.alloc(size)
        assert not device.read(memory).any() and memory.address % 256 == 0
        data = rng.integers(0, 256, size, np.uint8)
        device.write(memory, 0, data)
        part = memory.part(size // 3, size)
        device.zero(part, 0, part.nbytes // 2)
        data[size // 3 : size // 3 + part.nbytes // 2] = 0
        view = device.fetch(memory, 0, size)
        device.wait(device.mark())
        np.testing.assert_array_equal(view, data)
        np.testing.assert_array_equal(device.read(part), data[size // 3 :])
    assert device.free_memory() > 0 and device.describe()["arch"] == device.arch


def test_random_weights_match_cpu(device: CudaDevice) -> None:
    cpu = CpuDevice(1)
    for dtype, rank in (("bf16", 2), ("u8", 2), ("f32", 1)):
        for size in (4096, (19 << 20) + 64):
            want, found = cpu.alloc(size), device.alloc(size)
            for d, memory, source in ((cpu, want, RandomWeights(3)), (device, found, RandomWeights(3))):
                d.repeat(memory, *source.tile("w", dtype, rank, size))  # type: ignore[attr-defined]
            np.testing.assert_array_equal(device.read(found), want.host)


def test_upload(device: CudaDevice, rng: np.random.Generator, tmp_path: Path) -> None:
    """All upload methods, whose rates are printed; after the first upload, the files are in the page cache."""
    block, sizes = 16 << 20, {"a": (1 << 30) + 12345, "b": (5 << 20) + 3}
    files, datas = [], {}
    for name, size in sizes.items():
        data = datas[name] = rng.integers(0, 1 << 32, -(-size // 4), np.uint32).view(np.uint8)[:size]
        (tmp_path / name).write_bytes(data.data)
        hashes = tuple(hashlib.sha256(data[at : at + block].data).hexdigest() for at in range(0, size, block))
        files.append(WeightFile(name, size, hashes, block))
    memories = {f.file: device._alloc(f.bytes) for f in files}
    bases = {name: m.address for name, m in memories.items()}

    def send(check: bool, method: str = device._method) -> Any:
        args = (device._cuda, device._enter, Folder(tmp_path), files, bases)
        return weight_upload.upload(*args, check=check, threads=device.threads, method=method)

    for check, method in [(c, w) for w in (device._method, weight_upload.PINNED) for c in (True, True, False)]:
        report = send(check, method)
        print(f"checked {check}: {report}")
        assert report.method == method or report.fallback_reason
        for name, data in datas.items():
            assert np.array_equal(device.read(memories[name]), data)
            device.zero(memories[name], 0, memories[name].nbytes)
        device.wait(device.mark())
    bad = datas["a"].copy()
    bad[3 * block + 7] ^= 1
    (tmp_path / "a").write_bytes(bad.data)
    with pytest.raises(LlmcError, match=r"E107.*a is damaged: block 4 of 65"):
        send(True)


def chain(device: CudaDevice, length: int, uniform: bool, pdl: bool, symbols: np.ndarray) -> tuple[Any, Any, Any]:
    """Return (input, output, run): `run` computes x * 3 + i for i below `length` on T * 1000 elements."""
    made = toy.kernel(CHAIN, "add", device.arch)
    module = device._cuda.ok(device._cuda.cu.cuModuleLoadData(made.binary))
    device._modules.append(module)
    device._functions[made.hash, "add"] = device._cuda.ok(device._cuda.cu.cuModuleGetFunction(module, b"add"))
    memories = [device.alloc(RAGGED * 4000) for _ in range(length + 1)]
    count = expr.parse("T*1000")
    buffers = tuple(Buffer(f"b{i}", "arena", "i32", (count,), expr.parse("T*4000")) for i in range(length + 1))
    grid = (expr.parse("ceil(T*1000, 128)"),)
    launches = tuple(
        Launch(made.hash, "add", (i, i + 1), (count, expr.of(i)), grid, 128, pdl=pdl) for i in range(length)
    )
    sizes = {"T": (1, RAGGED), "R": (1, RAGGED)}
    program = Program("chain", sizes, sizes, buffers, launches, 0, uniform)
    return memories[0], memories[-1], device.bind(program, [m.address for m in memories], symbols)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("pdl", [False, True])
def test_dependent_launches(device: CudaDevice, rng: np.random.Generator, uniform: bool, pdl: bool) -> None:
    """As launches and as a graph, with and without dependent launches; sizes change while runs are in flight."""
    symbols = np.ones(2, np.int64)
    before, after, run = chain(device, 60, uniform, pdl and int(device.arch[3:]) >= 90, symbols)
    in_flight: list[Any] = []
    for i in range(40):
        tokens = (100, 1, 37)[i % 3]
        x = rng.integers(0, 1 << 16, tokens * 1000, np.int32)
        symbols[:] = tokens
        device.write(before, 0, x)
        run()
        in_flight.append((x, device.fetch(after, 0, x.nbytes), device.mark()))
        if len(in_flight) == 2:
            x, found, event = in_flight.pop(0)
            want = x
            with np.errstate(over="ignore"):
                for step in range(60):
                    want = want * np.int32(3) + np.int32(step)
            device.wait(event)
            np.testing.assert_array_equal(found.view(np.int32), want)
    symbols[:] = 50
    device.prepare(run)


def init(row: int, tokens: list[int], pages: list[int], **params: Any) -> RowInit:
    return RowInit(row, tokens, 0, len(tokens), RowParams(**params), pages)


@pytest.mark.parametrize("weights", ["packed", "random"])
def test_artifact_steps_match_cpu(tmp_path: Path, rng: np.random.Generator, weights: str) -> None:
    """Chunked prefill, decoding, padding, growing rows and log-probabilities; the CPU artifact is the reference."""
    random = {} if weights == "packed" else {"weights": 7}
    write_artifact(tmp_path / "cpu.llmc", tiny.parts(tmp_path, **random))
    write_artifact(tmp_path / "gpu.llmc", toy.parts(tmp_path, installed_arch(), **random))
    cpu = Executor(open_artifact(tmp_path / "cpu.llmc"), CpuDevice(1), 1024)
    gpu = Executor(open_artifact(tmp_path / "gpu.llmc"), open_gpu())
    print(gpu.capacity, dict(gpu.device.describe()))
    assert gpu.prepare() == 3
    prompts = {r: [int(t) for t in rng.integers(0, tiny.V, 3 + r)] for r in range(4)}
    inits = [init(r, t, [r, 10 + r], want_logprobs=r == 1) for r, t in prompts.items()]
    steps = [Step(inits[:3], [], [Work(0, 3, True), Work(1, 2, False), Work(2, 5, True)])]
    steps += [Step([], [], [Work(1, 2, True), Work(2, 1, True)]), Step([inits[3]], [], [Work(3, 6, True)])]
    steps += [Step([], [], [Work(r, 1, True) for r in live]) for live in ([2], [0, 3, 1], [2, 1])]
    steps += [Step([], [RowPages(r, 2, [20 + r]) for r in (1, 3, 0)], [Work(0, 1, True), Work(3, 1, True)])]
    want = [cpu.run(s) for s in steps]
    found, tickets = [], []
    for step in steps:
        tickets.append(gpu.launch(step))
        if len(tickets) == 2:
            found.append(gpu.wait(tickets.pop(0)))
    found.append(gpu.wait(tickets.pop()))
    assert [f.tokens for f in found] == [w.tokens for w in want]
    assert [f.logprobs for f in found] == [w.logprobs for w in want]
    for role, table in gpu.rows._tables.items():
        np.testing.assert_array_equal(table.view, cpu.rows._tables[role].view, role)
    cpu.close()
    gpu.close()


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_memory_exchange(device: CudaDevice, rng: np.random.Generator, name: str) -> None:
    """As bytes by the array interface; as arrays by DLPack, while a copy into them is still pending."""
    other = pytest.importorskip(name)
    view: Any = other.asarray if name == "cupy" else lambda x: other.as_tensor(x, device="cuda")
    host: Any = other.asnumpy if name == "cupy" else lambda x: x.cpu().numpy()
    if name == "torch" and not other.cuda.is_available():
        pytest.skip("torch without CUDA")
    for size in (4096, 64 << 20):
        memory, data = device.alloc(size), rng.integers(0, 1 << 14, size // 4, np.int32)
        device.write(memory, 0, data)
        if name == "torch":  # it ignores the stream in the array interface
            device.wait(device.mark())
        np.testing.assert_array_equal(host(view(memory)), data.view(np.uint8))
        data += 1
        device.write(memory, 0, data)
        shape = (4, -1, 128)
        for dtype, bits in (("i32", data), ("f32", data.view(np.float32)), ("u8", data.view(np.uint8))):
            found = other.from_dlpack(memory.array(dtype, bits.reshape(shape).shape))
            np.testing.assert_array_equal(host(found), bits.reshape(shape))
        found[:] = 7
        other.cuda.get_current_stream().synchronize() if name == "cupy" else other.cuda.synchronize()
        assert (device.read(memory) == 7).all()
    if name == "torch":
        memory = device.alloc(64)
        device.write(memory, 0, np.full(32, 0x3FC0, np.uint16))
        found = other.from_dlpack(memory.array("bf16", (4, 8)))
        assert found.dtype == other.bfloat16 and found.shape == (4, 8) and (found == 1.5).all()
    del found


def test_kernel_does_not_load(tmp_path: Path) -> None:
    parts = toy.parts(tmp_path, installed_arch())
    old = parts.kernels[0]
    for i, change in enumerate(({"binary": b"\x7fELF" + b"no" * 50}, {"entry": "missing"}, {"shared": 1 << 20})):
        folder = tmp_path / f"{i}.llmc"
        write_artifact(folder, replace(parts, kernels=(replace(old, **change), *parts.kernels[1:])))  # type: ignore[arg-type]
        made = open_gpu()
        with pytest.raises(LlmcError, match=r"E112.*(cannot be loaded|bytes of shared memory)") as error:
            Executor(open_artifact(folder), made)
        print(error.value)
        made.close()


def test_out_of_memory(device: CudaDevice) -> None:
    with pytest.raises(LlmcError, match=r"E203.*cannot allocate"):
        device.alloc(device.free_memory() + (1 << 30))
    memory = device.alloc(1 << 20)
    assert not device.read(memory).any()


def test_wrong_architecture() -> None:
    with pytest.raises(LlmcError, match=r"E117.*this GPU is sm_"):
        CudaDevice(TargetInfo("cuda:sm_70", "sm_70", ()))


def fail() -> None:
    """Run a kernel with an invalid address; check that every later call raises E114 and none hangs."""
    device = open_gpu()
    made = toy.kernel(FAULT, "fault", device.arch)
    cuda = device._cuda
    function = cuda.ok(cuda.cu.cuModuleGetFunction(cuda.ok(cuda.cu.cuModuleLoadData(made.binary)), b"fault"))
    device._functions[made.hash, "fault"] = function
    launch = Launch(made.hash, "fault", (0,), (expr.of("T"),), (expr.of(1),), 1, op="fault")
    buffers = (Buffer("x", "arena", "i32", (expr.of(1),), expr.of(4)),)
    sizes = {"T": (1, 64)}
    run = device.bind(
        Program("p", sizes, sizes, buffers, (launch,), 0), [device.alloc(4).address], np.ones(1, np.int64)
    )
    run()
    for call in (lambda: device.wait(device.mark()), run, lambda: device.alloc(64)):
        try:
            call()
        except LlmcError as error:
            assert error.code == "E114" and "CUDA_ERROR_" in error.cause, error
        else:
            raise AssertionError("no error was raised")
    device.close()
    device.close()
    print("closed")


def test_failed_kernel() -> None:
    """In a separate process, because the failure destroys the context."""
    here = Path(__file__).resolve().parents[1]
    paths = [str(here), str(here.parent), str(here.parent / "runtime")]
    code = f"import sys; sys.path[:0] = {paths!r}; from gpu import test_cuda_device as t; t.fail()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "closed" in done.stdout, done.stdout + done.stderr
