"""A GPU through the CUDA driver API for the kernel tests: buffers, single launches, and a delayed producer kernel.

It shares no code with the runtime's CUDA device, so that an error there cannot hide one in a kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmc.codegen.backends.triton.triton_toolchain import Compiled

ALIGN = 256
ODD = 16  # buffers begin this many bytes after a multiple of ALIGN: kernels may assume an alignment of 16 bytes
DELAY_NS = 30_000
_DEFAULT_SHARED = 48 << 10
_MAPPED = {"bf16": (9, 2), "f16": (6, 2), "i8": (0, 1), "f8e4m3": (0, 1)}  # CUtensorMapDataType, bytes of an element
_PRODUCER = r"""
extern "C" __global__ void produce(const unsigned char* from, unsigned char* to, long long n, long long delay) {
  asm volatile("griddepcontrol.launch_dependents;");
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < delay);
  for (long long i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}

extern "C" __global__ void pass_on() {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
"""


class Map:
    """The 128 bytes of a tensor map, aligned as the driver requires (to a multiple of 64)."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(256)

    def getPtr(self) -> int:
        return -(-ctypes.addressof(self.buffer) // 128) * 128


class Packed:
    """A parameter that is passed as bytes."""

    def __init__(self, data: bytes) -> None:
        self.buffer = ctypes.create_string_buffer(data, len(data))

    def getPtr(self) -> int:
        return ctypes.addressof(self.buffer)


class Card:
    """The first device.

    exact: allocate every buffer separately, with its exact size, for compute-sanitizer. sample: run every Nth case.
    every_thread_arrives: the value of this constant of CUDA C++ kernels (hopper.cuh).
    """

    def __init__(
        self, exact: bool = False, nbytes: int = 64 << 20, sample: int = 1, every_thread_arrives: bool = False
    ) -> None:
        from cuda.bindings import driver

        self.cu, self.exact, self.sample = driver, exact, sample
        self.every_thread_arrives = every_thread_arrives
        self.ok(driver.cuInit(0))
        device = self.ok(driver.cuDeviceGet(0))
        self._context = self.ok(driver.cuDevicePrimaryCtxRetain(device))
        self.enter()
        kind = driver.CUdevice_attribute
        self.major = self.ok(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
        self.minor = self.ok(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
        self.stream = self.ok(driver.cuStreamCreate(1))
        self.nbytes = nbytes
        self.live = 0 if exact else int(self.ok(driver.cuMemAlloc(nbytes)))
        self.staged = 0 if exact else int(self.ok(driver.cuMemAlloc(nbytes)))
        self.allocations: list[int] = []
        self.functions: dict[bytes, Any] = {}
        self.producer, self.passes_on = (None, None) if exact or self.major < 9 else self._producer()

    def enter(self) -> None:
        """Make the device's context current, which an engine that is closed does not leave current."""
        self.ok(self.cu.cuCtxSetCurrent(self._context))

    def ok(self, answer: Any) -> Any:
        """Return the results of a driver call; raises RuntimeError with the status if it failed."""
        status, *values = answer
        if status != self.cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver returned {status.name}")
        return values[0] if len(values) == 1 else values

    def function(self, compiled: Compiled, entry: str) -> Any:
        """Load the entry; raise its limit of dynamic shared memory if it needs more than 48 KiB."""
        if compiled.binary not in self.functions:
            module = self.ok(self.cu.cuModuleLoadData(compiled.binary))
            fn = self.ok(self.cu.cuModuleGetFunction(module, entry.encode()))
            if compiled.shared > _DEFAULT_SHARED:
                what = self.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self.ok(self.cu.cuFuncSetAttribute(fn, what, compiled.shared))
            self.functions[compiled.binary] = fn
        return self.functions[compiled.binary]

    def place(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Return addresses of buffers (bytes, offset of the body), with bodies ODD bytes after a multiple of ALIGN."""
        if self.exact:
            raise RuntimeError("with exact=True, buffers are allocated one by one")
        out, at = [], 0
        for nbytes, body in sizes:
            start = -(-(at + body - ODD) // ALIGN) * ALIGN + ODD - body
            out.append(self.live + start)
            at = start + nbytes
        if at > self.nbytes:
            raise RuntimeError(f"a case needs {at} bytes, the card has {self.nbytes}")
        return out

    def allocate(self, nbytes: int) -> int:
        """Allocate exactly this many bytes until `free`; return the address."""
        self.allocations.append(int(self.ok(self.cu.cuMemAlloc(max(1, nbytes)))))
        return self.allocations[-1]

    def free(self) -> None:
        for address in self.allocations:
            self.ok(self.cu.cuMemFree(address))
        self.allocations.clear()

    def write(self, address: int, data: np.ndarray) -> None:
        """Copy to the device in stream order; the host array may be reused when this returns."""
        if data.nbytes:
            self.ok(self.cu.cuMemcpyHtoDAsync(address, data.ctypes.data, data.nbytes, self.stream))

    def read(self, address: int, data: np.ndarray) -> None:
        if data.nbytes:
            self.ok(self.cu.cuMemcpyDtoH(data.ctypes.data, address, data.nbytes))

    def launch(
        self, fn: Any, compiled: Compiled, grid: Sequence[int], pointers: Sequence[Any], sizes: Sequence[int], pdl: bool
    ) -> None:
        """Launch by the calling convention "cuda-1": pointers or tensor maps, i32 sizes, two null pointers."""
        params: list[tuple[Any, Any]] = []
        for p in pointers:
            params += p if isinstance(p, list) else [(p, ctypes.c_void_p)]
        params += [(n, ctypes.c_int) for n in sizes] + [(0, ctypes.c_void_p)] * 2
        args, types = zip(*params, strict=True)
        self._launch(fn, grid, compiled.threads, compiled.shared, (args, types), pdl)

    def launch_params(
        self, fn: Any, compiled: Compiled, grid: Sequence[int], params: Sequence[tuple[Any, Any]], pdl: bool,
        cluster: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Launch with parameters as (value, C type). cluster: blocks of a cluster along x, y and z."""
        self._launch(fn, grid, compiled.threads, compiled.shared, tuple(zip(*params, strict=True)), pdl, cluster)

    def mapped(
        self, address: int, dtype: str, shape: Sequence[int], box: Sequence[int], swizzle: int,
        strides: Sequence[int] = (),
    ) -> list[tuple[Any, Any]]:  # fmt: skip
        """Return the parameters of a tensor map as (value, C type): the map, sizes, and strides in elements.

        strides: of all axes but the last; empty means row-major.
        """
        rank, steps = len(shape), [*strides, 1] if strides else [1]
        for n in reversed(shape[1:] if not strides else ()):
            steps.insert(0, steps[0] * n)
        kind, size = _MAPPED[dtype]
        u64, u32 = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        made = Map()
        status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
            ctypes.c_void_p(made.getPtr()), kind, rank, ctypes.c_void_p(address),
            u64(*shape[::-1]), u64(*(size * n for n in steps[:-1][::-1])), u32(*box[::-1]), u32(*[1] * rank), 0,
            swizzle, 0, 0,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"the driver rejects a tensor map of {list(shape)} in boxes of {list(box)}: {status}")
        return [(made, None), *((n, ctypes.c_int) for n in shape), *((n, ctypes.c_longlong) for n in steps)]

    def produce_delayed(self, spans: Sequence[tuple[int, int]], apart: bool = False) -> None:
        """Launch a kernel that starts its dependents at once and copies the staged (address, bytes) after DELAY_NS.

        apart: launch another one after it, which starts its dependents before it waits.
        """
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_longlong)
        low = min(a for a, _ in spans)
        high = max(a + n for a, n in spans)
        args = (self.staged + low - self.live, low, high - low, DELAY_NS)
        self._launch(self.producer, (1, 1, 1), 256, 0, (args, types), False)
        if apart:
            self._launch(self.passes_on, (1, 1, 1), 32, 0, ((), ()), True)

    def _launch(
        self, fn: Any, grid: Sequence[int], threads: int, shared: int, args: Any, pdl: bool, cluster: Sequence[int] = ()
    ) -> None:
        cu = self.cu
        c = cu.CUlaunchConfig()
        c.gridDimX, c.gridDimY, c.gridDimZ = grid
        c.blockDimX, c.blockDimY, c.blockDimZ = threads, 1, 1
        c.sharedMemBytes, c.hStream = shared, self.stream
        attributes = []
        if pdl:
            a = cu.CUlaunchAttribute()
            a.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            a.value.programmaticStreamSerializationAllowed = 1
            attributes.append(a)
        if cluster:
            a = cu.CUlaunchAttribute()
            a.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z = cluster
            attributes.append(a)
        if attributes:
            c.attrs, c.numAttrs = attributes, len(attributes)
        self.ok(cu.cuLaunchKernelEx(c, fn, args, 0))

    def wait(self) -> None:
        self.ok(self.cu.cuStreamSynchronize(self.stream))

    def _producer(self) -> tuple[Any, Any]:
        """Compile the delayed producer, and the kernel that may follow it, by NVRTC; None if that is not installed."""
        try:
            from cuda.bindings import nvrtc

            status, program = nvrtc.nvrtcCreateProgram(_PRODUCER.encode(), b"producer.cu", 0, [], [])
        except (ImportError, RuntimeError):
            return None, None
        options = [f"-arch=sm_{self.major}{self.minor}".encode()]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"the producer does not compile: {status.name}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = b" " * size
        nvrtc.nvrtcGetCUBIN(program, cubin)
        module = self.ok(self.cu.cuModuleLoadData(cubin))
        produce, pass_on = (self.ok(self.cu.cuModuleGetFunction(module, x)) for x in (b"produce", b"pass_on"))
        return produce, pass_on
