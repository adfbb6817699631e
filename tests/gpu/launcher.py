"""A GPU through the driver's interface, as the kernel tests use it: buffers, one launch, one late producer; no runtime.

It is written apart from the runtime's own device, so that a mistake there cannot hide one in a kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmc.codegen.backends.triton.triton_toolchain import Compiled

ALIGN = 256
ODD = 16  # buffers begin this far behind a multiple of ALIGN: no kernel may count on more than 16 bytes
DELAY_NS = 30_000
_MOST_STATIC = 48 << 10
_MAPPED = {"bf16": (9, 2), "f16": (6, 2), "i8": (0, 1), "f8e4m3": (0, 1)}  # CUtensorMapDataType, bytes of an element
_PRODUCER = r"""
extern "C" __global__ void produce(const unsigned char* from, unsigned char* to, long long n, long long delay) {
  asm volatile("griddepcontrol.launch_dependents;");
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < delay);
  for (long long i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}
"""


class Map:
    """A tensor map's 128 bytes, where the driver wants them: at a multiple of 64."""

    def __init__(self) -> None:
        self.room = ctypes.create_string_buffer(256)

    def getPtr(self) -> int:
        return -(-ctypes.addressof(self.room) // 128) * 128


class Card:
    """The first device. `exact`: every buffer is an allocation of its own size, for compute-sanitizer."""

    def __init__(self, exact: bool = False, nbytes: int = 64 << 20) -> None:
        from cuda.bindings import driver

        self.cu, self.exact = driver, exact
        self.ok(driver.cuInit(0))
        device = self.ok(driver.cuDeviceGet(0))
        self.ok(driver.cuCtxSetCurrent(self.ok(driver.cuDevicePrimaryCtxRetain(device))))
        kind = driver.CUdevice_attribute
        self.major = self.ok(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
        self.minor = self.ok(driver.cuDeviceGetAttribute(kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
        self.stream = self.ok(driver.cuStreamCreate(1))
        self.nbytes = nbytes
        self.live = 0 if exact else int(self.ok(driver.cuMemAlloc(nbytes)))
        self.staged = 0 if exact else int(self.ok(driver.cuMemAlloc(nbytes)))
        self.own: list[int] = []
        self.functions: dict[bytes, Any] = {}
        self.producer = None if exact or self.major < 9 else self._producer()

    def ok(self, answer: Any) -> Any:
        """The values of a driver call; RuntimeError with the driver's word where it failed."""
        status, *values = answer
        if status != self.cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver answers {status.name}")
        return values[0] if len(values) == 1 else values

    def function(self, compiled: Compiled, entry: str) -> Any:
        """The loaded entry, its limit of shared memory raised where it wants more than 48 KiB."""
        if compiled.binary not in self.functions:
            module = self.ok(self.cu.cuModuleLoadData(compiled.binary))
            fn = self.ok(self.cu.cuModuleGetFunction(module, entry.encode()))
            if compiled.shared > _MOST_STATIC:
                what = self.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self.ok(self.cu.cuFuncSetAttribute(fn, what, compiled.shared))
            self.functions[compiled.binary] = fn
        return self.functions[compiled.binary]

    def place(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Addresses for raw buffers of (bytes, offset of the body): their bodies begin ODD behind a multiple."""
        if self.exact:
            raise RuntimeError("exact buffers are placed one by one")
        out, at = [], 0
        for nbytes, body in sizes:
            start = -(-(at + body - ODD) // ALIGN) * ALIGN + ODD - body
            out.append(self.live + start)
            at = start + nbytes
        if at > self.nbytes:
            raise RuntimeError(f"a case needs {at} bytes, the card has {self.nbytes}")
        return out

    def alone(self, nbytes: int) -> int:
        """An allocation of exactly this size, until `free`."""
        self.own.append(int(self.ok(self.cu.cuMemAlloc(max(1, nbytes)))))
        return self.own[-1]

    def free(self) -> None:
        for address in self.own:
            self.ok(self.cu.cuMemFree(address))
        self.own.clear()

    def write(self, address: int, data: np.ndarray) -> None:
        """In the stream's order; the host's bytes have been taken when this returns."""
        if data.nbytes:
            self.ok(self.cu.cuMemcpyHtoDAsync(address, data.ctypes.data, data.nbytes, self.stream))

    def read(self, address: int, data: np.ndarray) -> None:
        if data.nbytes:
            self.ok(self.cu.cuMemcpyDtoH(data.ctypes.data, address, data.nbytes))

    def launch(
        self, fn: Any, compiled: Compiled, grid: Sequence[int], pointers: Sequence[Any], sizes: Sequence[int], pdl: bool
    ) -> None:
        """One launch with the calling convention "cuda-1": pointers (or `mapped` ones), then i32 sizes, then two null
        pointers."""
        given: list[tuple[Any, Any]] = []
        for p in pointers:
            given += p if isinstance(p, list) else [(p, ctypes.c_void_p)]
        given += [(n, ctypes.c_int) for n in sizes] + [(0, ctypes.c_void_p)] * 2
        args, types = zip(*given, strict=True)
        self._launch(fn, grid, compiled.threads, compiled.shared, (args, types), pdl)

    def launch_params(
        self, fn: Any, compiled: Compiled, grid: Sequence[int], params: Sequence[tuple[Any, Any]], pdl: bool,
        cluster: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """One launch with these parameters, as (value, C type), of clusters of so many blocks along x, y and z."""
        self._launch(fn, grid, compiled.threads, compiled.shared, tuple(zip(*params, strict=True)), pdl, cluster)

    def mapped(
        self, address: int, dtype: str, shape: Sequence[int], box: Sequence[int], swizzle: int
    ) -> list[tuple[Any, Any]]:
        """A tensor map in a pointer's place: the map, the tensor's sizes, its steps in elements; as (value, type)."""
        rank, steps = len(shape), [1]
        for n in reversed(shape[1:]):
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
            raise RuntimeError(f"the driver refuses a tensor map of {list(shape)} in boxes of {list(box)}: {status}")
        return [(made, None), *((n, ctypes.c_int) for n in shape), *((n, ctypes.c_longlong) for n in steps)]

    def produce_later(self, spans: Sequence[tuple[int, int]]) -> None:
        """Start a kernel that lets its dependents begin at once and copies staged bytes (address, n) much later."""
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_longlong)
        low = min(a for a, _ in spans)
        high = max(a + n for a, n in spans)
        args = (self.staged + low - self.live, low, high - low, DELAY_NS)
        self._launch(self.producer, (1, 1, 1), 256, 0, (args, types), False)

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

    def _producer(self) -> Any:
        """The late producer, compiled by NVRTC; None where that is not installed."""
        try:
            from cuda.bindings import nvrtc

            status, program = nvrtc.nvrtcCreateProgram(_PRODUCER.encode(), b"producer.cu", 0, [], [])
        except (ImportError, RuntimeError):
            return None
        options = [f"-arch=sm_{self.major}{self.minor}".encode()]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"the producer does not compile: {status.name}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = b" " * size
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return self.ok(self.cu.cuModuleGetFunction(self.ok(self.cu.cuModuleLoadData(cubin)), b"produce"))
