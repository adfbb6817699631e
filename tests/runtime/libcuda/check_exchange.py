"""Exchange of device memory with other frameworks: the fields of DLPack, ownership, and stream synchronization."""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from llmc_runtime.device import dlpack
from llmc_runtime.device.cuda.cuda_device import CudaDevice
from llmc_runtime.device.cuda.device_array import CudaMemory
from llmc_runtime.device.gpu.device_memory import Pinned
from llmc_runtime.format.dtypes import DTYPE_BITS
from llmc_runtime.format.manifest import TargetInfo

from tests.runtime.libcuda.conftest import Driver

TORCH = {
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "u16": torch.uint16, "u32": torch.uint32, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64,
    "bf16": torch.bfloat16, "bool": torch.bool, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
    "f8e8m0": torch.float8_e8m0fnu, "f8e4m3fnuz": torch.float8_e4m3fnuz,
}  # fmt: skip
SHAPES = [(), (1,), (7,), (3, 5), (2, 1, 4, 3), (0,), (4, 0, 2)]


class Thing:
    """An object whose destruction can be observed."""


@pytest.fixture
def device(driver: Driver) -> Iterator[CudaDevice]:
    made = CudaDevice(TargetInfo("cuda:sm_90", "sm_90", ()))
    yield made
    made.close()


def filled(device: CudaDevice, nbytes: int) -> tuple[CudaMemory, np.ndarray]:
    """Random zeros and ones, which are distinguishable bytes in every type."""
    data = np.random.default_rng().integers(0, 2, nbytes, np.uint8)
    memory = device.alloc(nbytes)
    device.write(memory, 0, data)
    return memory, data


def test_every_type_of_whole_bytes_is_there() -> None:
    assert dlpack.TYPES.keys() == {t for t, bits in DTYPE_BITS.items() if bits % 8 == 0} == TORCH.keys()


@pytest.mark.parametrize("dtype", dlpack.TYPES)
@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 3)])
def test_the_fields(device: CudaDevice, dtype: str, max_version: tuple[int, int] | None) -> None:
    for shape in SHAPES:
        nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
        memory = device.alloc(nbytes)
        made = memory.array(dtype, shape).__dlpack__(max_version=max_version)
        tensor = dlpack.tensor_of(made)
        assert tensor.data == (memory.address if nbytes else None) and tensor.byte_offset == 0
        assert (tensor.device_type, tensor.device_id) == (2, 0) == memory.array(dtype, shape).__dlpack_device__()
        kinds = {"i": 0, "u": 1, "f": 2}
        assert tensor.code == {"bf16": 4, "bool": 6, "f8e4m3": 10, "f8e4m3fnuz": 11, "f8e5m2": 12, "f8e8m0": 14}.get(
            dtype, kinds[dtype[0]] if dtype[0] in kinds else -1
        )
        assert (tensor.bits, tensor.lanes, tensor.ndim) == (DTYPE_BITS[dtype], 1, len(shape))
        assert tuple(tensor.shape[: len(shape)]) == shape
        if tensor.strides and math.prod(shape) > 1:
            want = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            assert tuple(tensor.strides[: len(shape)]) == want
        name = "dltensor_versioned" if max_version and max_version >= (1, 0) else "dltensor"
        assert f'"{name}"' in repr(made)
        if name == "dltensor_versioned":
            pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
            head = dlpack.Versioned.from_address(
                pointer(("PyCapsule_GetPointer", ctypes.pythonapi))(made, name.encode())
            )
            assert (head.major, head.flags) == (1, 0) and head.deleter, "neither read-only nor a copy"


@pytest.mark.parametrize("dtype", dlpack.TYPES)
@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_consumer_reads_and_writes_it(device: CudaDevice, dtype: str, max_version: tuple[int, int] | None) -> None:
    """The device's memory is host memory here, and is exported as the CPU's so that torch can use it."""
    for shape in SHAPES:
        nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
        memory, data = filled(device, nbytes)
        device.read(memory)
        made = dlpack.capsule(memory.address, dtype, shape, (dlpack.CPU, 0), memory, max_version)
        found = torch.from_dlpack(made)
        assert found.dtype == TORCH[dtype] and found.shape == shape and found.is_contiguous()
        np.testing.assert_array_equal(found.reshape(-1).view(torch.uint8).numpy(), data)
        found.view(torch.uint8 if shape else found.dtype).fill_(0)
        assert not device.read(memory).any()


@pytest.mark.parametrize("max_version", [None, (1, 0)])
@pytest.mark.parametrize("taken", [False, True])
def test_the_owner_lives_as_long_as_it_must(max_version: tuple[int, int] | None, taken: bool) -> None:
    data, owner = np.arange(6, dtype=np.float32), Thing()
    watch = weakref.ref(owner)
    held = dlpack.capsule(data.ctypes.data, "f32", (6,), (dlpack.CPU, 0), owner, max_version)
    if taken:
        held = torch.from_dlpack(held)[2:]
    del owner
    gc.collect()
    assert watch() is not None
    del held
    gc.collect()
    assert watch() is None


def test_an_exception_on_its_way_past_a_capsule_stays_whole() -> None:
    data, owner = np.arange(6, dtype=np.float32), Thing()
    watch = weakref.ref(owner)

    def fail(thing: Any) -> None:
        made = dlpack.capsule(data.ctypes.data, "f32", (6,), (dlpack.CPU, 0), thing)
        raise KeyError(repr(made))

    try:
        fail(owner)
    except KeyError as error:
        assert "dltensor" in str(error)
    del owner
    gc.collect()
    assert watch() is None


def test_the_memory_holds_its_device(driver: Driver) -> None:
    device = CudaDevice(TargetInfo("cuda:sm_90", "sm_90", ()))
    made, watch = device.alloc(64).__dlpack__(), weakref.ref(device)
    close = device.close
    del device
    gc.collect()
    assert watch() is not None
    close()
    del close, made
    gc.collect()
    assert watch() is None


def test_the_consumers_stream_waits(device: CudaDevice, driver: Driver) -> None:
    cuda = device._cuda
    for waits in (True, False):
        memory = device.alloc(4096)
        device.read(memory)
        data = np.random.default_rng().integers(1, 256, 4096, np.uint8)
        device.write(memory, 0, data)
        theirs, pinned = cuda.stream(), Pinned(cuda, 4096)
        made = memory.__dlpack__(stream=int(theirs) if waits else -1)
        cuda.ok(cuda.cu.cuMemcpyDtoHAsync(pinned.address, memory.address, 4096, theirs))
        cuda.ok(cuda.cu.cuStreamSynchronize(theirs))
        np.testing.assert_array_equal(pinned.array, data if waits else np.zeros(4096, np.uint8))
        pinned.free()
        cuda.cu.cuStreamDestroy(theirs)
        del made


def test_which_stream_waits(device: CudaDevice, driver: Driver) -> None:
    array = device.alloc(64).array("bf16", (4, 8))
    for stream, want in ((None, ["legacy-waits"]), (1, ["legacy-waits"]), (2, ["thread-waits"]), (-1, [])):
        driver.log()
        array.__dlpack__(stream=stream)
        assert [x for x in driver.log() if x.endswith("waits")] == want
    array.__dlpack__(stream=device.stream_handle)
    assert "waits" not in driver.log(), "its own stream is in order anyway"
    for wrong in (0, -2, True, 1.0, "1"):
        with pytest.raises(ValueError, match="is invalid"):
            array.__dlpack__(stream=wrong)  # type: ignore[arg-type]


def test_impossible_exports_are_refused(device: CudaDevice) -> None:
    memory = device.alloc(64)
    memory.__dlpack__(dl_device=(2, 0), copy=False)
    for options in ({"dl_device": (1, 0)}, {"dl_device": (2, 1)}, {"copy": True}):
        with pytest.raises(BufferError):
            memory.__dlpack__(**options)
    for dtype, shape in (("bf16", (31,)), ("f32", (-4, -4)), ("u8", ())):
        with pytest.raises(ValueError, match=r"needs .* bytes, not 64"):
            memory.array(dtype, shape)
    with pytest.raises(ValueError, match="u4 cannot be exported"):
        memory.array("u4", (128,))
    device.close()
    with pytest.raises(BufferError, match="closed"):
        memory.__dlpack__()
    with pytest.raises(BufferError, match="closed"):
        memory.__cuda_array_interface__  # noqa: B018


def test_the_cuda_array_interface(device: CudaDevice) -> None:
    memory = device.alloc(96)
    want = {"data": (memory.address, False), "version": 3, "stream": device.stream_handle}
    assert memory.__cuda_array_interface__ == {**want, "shape": (96,), "typestr": "|u1"}
    part = memory.part(32, 96)
    for dtype, shape, typestr in (("f32", (2, 8), "<f4"), ("i64", (8,), "<i8"), ("bool", (64,), "|b1")):
        found = part.array(dtype, shape).__cuda_array_interface__
        assert found == {**want, "data": (memory.address + 32, False), "shape": shape, "typestr": typestr}
        assert np.dtype(typestr).itemsize * 8 == DTYPE_BITS[dtype]
    assert device.alloc(0).__cuda_array_interface__["data"] == (0, False)
    assert not hasattr(part.array("bf16", (32,)), "__cuda_array_interface__")
