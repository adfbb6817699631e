"""The interface of a GPU's driver API: errors, memory, streams, events, kernels and graphs.

The functions of both APIs return (status, *values), and most have the same parameters and, after a prefix, the same
names: `GpuDriver` calls these. An address is an int; handles of streams, events, modules, functions and graphs are of
the API's own types.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.program import Launch

MAP_BYTES = 128  # bytes of a tensor map
OR_CPU = "or compile for the CPU: llmc compile MODEL --target cpu:native"
_NON_BLOCKING, _NO_TIMING = 1, 2  # flags of streams and events


class GpuDriver(ABC):
    """An initialized driver API.

    Class attributes: `api`, its name; `prefix` of its functions; `renamed`, the functions whose names after the prefix
    differ from HIP's; `statuses`, its enumeration of statuses. Names of statuses: `out_of_memory`, `not_ready` for
    events, and `fatal` for errors of executed work after which the GPU is unusable to this process.
    """

    api: str
    prefix: str
    statuses: str
    renamed: Mapping[str, str] = MappingProxyType({})
    out_of_memory: str
    not_ready: str
    fatal: frozenset[str]
    lost = ""  # the error that made the GPU unusable; empty as long as it works

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        """Call a function of the API by HIP's name without the prefix: (status, *values)."""
        return getattr(self._bindings, self.prefix + self.renamed.get(name, name))(*args)

    def ok(self, result: tuple[Any, ...]) -> Any:
        """Return the values of a call's result. Raises LlmcError E203 if memory ran out, E114 for other failures."""
        if result[0]:
            raise self.error(int(result[0]))
        return result[1] if len(result) == 2 else result[1:]

    def error(self, status: int) -> LlmcError:
        """Return the error for a status other than success."""
        name = self.name(status)
        if name == self.out_of_memory:
            remedy = "stop other programs on the GPU, or reduce --kv-cache-memory-bytes"
            return LlmcError("E203", "the GPU has too little free memory", remedy)
        cause = self.lost or f"the GPU failed: {name} ({self._text(status)})"
        if name in self.fatal:
            self.lost = cause
        return LlmcError("E114", cause, "start the program again; if it fails again, run llmc verify on the artifact")

    def name(self, status: int) -> str:
        """Return the status's name, such as "CUDA_ERROR_ILLEGAL_ADDRESS" or "hipErrorIllegalAddress"."""
        try:
            return str(getattr(self._bindings, self.statuses)(status).name)
        except ValueError:  # the driver is newer than the bindings
            return f"{self.api} error {status}"

    @abstractmethod
    def _text(self, status: int) -> str:
        """Return the driver's description of a status."""

    def device_count(self) -> int:
        """Return the number of GPUs that are visible to this process."""
        return int(self.ok(self._call("GetDeviceCount")))

    @abstractmethod
    def allocate(self, nbytes: int) -> tuple[Any, ...]:
        """Allocate device memory: (status, address)."""

    def release(self, address: int) -> None:
        """Free device memory, ignoring errors."""
        self._call("Free", address)

    @abstractmethod
    def pin(self, nbytes: int) -> int:
        """Allocate pinned host memory."""

    def unpin(self, address: int) -> None:
        """Free pinned host memory, ignoring errors."""
        self._call("HostFree", address)

    def register(self, address: int, nbytes: int) -> str:
        """Pin pages of mapped memory for reading by the GPU. Returns "", or the reason why the driver refuses.

        Raises LlmcError E114 if the GPU has failed. `unregister` reverts it.
        """
        return "the driver API cannot register memory that is mapped for reading"

    def unregister(self, address: int) -> tuple[Any, ...]:
        """Release registered memory: (status,)."""
        raise NotImplementedError("nothing can be registered")

    def can_access(self, number: int, other: int) -> bool:
        """Return whether the GPU of this number can access the memory of another one."""
        return False

    def share(self, address: int) -> bytes:
        """Return a handle by which another process can open this allocation."""
        raise NotImplementedError("memory cannot be shared")

    def open_shared(self, handle: bytes) -> tuple[Any, ...]:
        """Map an allocation of another process: (status, address)."""
        raise NotImplementedError("memory cannot be shared")

    def close_shared(self, address: int) -> None:
        """Unmap an allocation of another process, ignoring errors."""
        raise NotImplementedError("memory cannot be shared")

    def free_memory(self) -> int:
        """Return the bytes of device memory that are free."""
        free, _ = self.ok(self._call("MemGetInfo"))
        return int(free)

    @abstractmethod
    def copy_in(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy pinned host memory to the device, in the stream."""

    @abstractmethod
    def copy_out(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy device memory to pinned host memory, in the stream."""

    @abstractmethod
    def copy_within(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy device memory to device memory, in the stream."""

    @abstractmethod
    def read(self, target: int, source: int, nbytes: int) -> None:
        """Copy device memory to any host memory, and wait for the end."""

    def zero(self, address: int, nbytes: int, stream: Any) -> None:
        """Zero device memory, in the stream."""
        self.ok(self._call("MemsetAsync", address, 0, nbytes, stream))

    def stream(self) -> Any:
        """Create a stream that does not synchronize with the default stream."""
        return self.ok(self._call("StreamCreateWithFlags", _NON_BLOCKING))

    def destroy_stream(self, stream: Any) -> None:
        """Destroy a stream, ignoring errors."""
        self._call("StreamDestroy", stream)

    def synchronize(self, stream: Any) -> tuple[Any, ...]:
        """Wait until a stream is idle: (status,)."""
        return self._call("StreamSynchronize", stream)

    def event(self) -> Any:
        """Create an event without timing."""
        return self.ok(self._call("EventCreateWithFlags", _NO_TIMING))

    def destroy_event(self, event: Any) -> None:
        """Destroy an event, ignoring errors."""
        self._call("EventDestroy", event)

    def record(self, event: Any, stream: Any) -> None:
        """Record an event in a stream."""
        self.ok(self._call("EventRecord", event, stream))

    def wait(self, event: Any) -> None:
        """Block until a recorded event has completed."""
        self.ok(self._call("EventSynchronize", event))

    def completed(self, event: Any) -> bool:
        """Return whether a recorded event has completed, or never will because the GPU failed."""
        return self.name(int(self._call("EventQuery", event)[0])) != self.not_ready

    def load_module(self, binary: bytes) -> Any:
        """Load a binary with kernels."""
        return self.ok(self._call("ModuleLoadData", binary))

    def unload_module(self, module: Any) -> None:
        """Unload a binary, ignoring errors."""
        self._call("ModuleUnload", module)

    def function(self, module: Any, entry: str) -> Any:
        """Return a kernel of a loaded binary."""
        return self.ok(self._call("ModuleGetFunction", module, entry.encode()))

    def allow_shared(self, function: Any, nbytes: int) -> None:
        """Allow launches of the kernel with `nbytes` of dynamic shared memory, if that takes a call."""
        return

    @abstractmethod
    def launch_config(self, launch: Launch, stream: Any) -> Any:
        """Return the configuration of a launch in a stream, with a grid of 1.

        Its fields gridDimX, gridDimY and gridDimZ are set before each launch. Raises LlmcError E113 if the launch needs
        a feature that the API lacks.
        """

    def tensor_map(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
    ) -> bytes:
        """Encode a tensor map of `MAP_BYTES`. Raises LlmcError E113 if the API has none."""
        raise LlmcError("E113", "a launch passes a tensor map, which the GPU does not have", "recompile the artifact")

    @abstractmethod
    def launch(self, config: Any, function: Any, params: int) -> tuple[Any, ...]:
        """Launch a kernel, whose parameters are at the addresses in the table at `params`: (status,)."""

    @abstractmethod
    def begin_capture(self, stream: Any) -> None:
        """Capture what this thread submits to the stream as a graph from now on."""

    def end_capture(self, stream: Any) -> tuple[Any, ...]:
        """End the capture: (status, graph)."""
        return self._call("StreamEndCapture", stream)

    def instantiate(self, graph: Any) -> Any:
        """Make a captured graph executable."""
        return self.ok(self._call("GraphInstantiateWithFlags", graph, 0))

    def destroy_graph(self, graph: Any) -> None:
        """Destroy a captured graph, ignoring errors."""
        self._call("GraphDestroy", graph)

    def destroy_executable(self, graph: Any) -> None:
        """Destroy an executable graph, ignoring errors."""
        self._call("GraphExecDestroy", graph)

    def upload_graph(self, graph: Any, stream: Any) -> None:
        """Prepare an executable graph on the GPU before its first launch."""
        self.ok(self._call("GraphUpload", graph, stream))

    def launch_graph(self, graph: Any, stream: Any) -> tuple[Any, ...]:
        """Launch an executable graph: (status,)."""
        return self._call("GraphLaunch", graph, stream)


def dotted(version: int) -> str:
    """Print a version 1000 * major + 10 * minor."""
    return f"{version // 1000}.{version % 1000 // 10}"
