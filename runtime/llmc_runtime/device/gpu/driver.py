"""What the GPU devices need of a driver API: errors, memory, streams, events, kernels and graphs.

The functions of both APIs return (status, *values). An address is an int; handles of streams, events, modules,
functions and graphs are of the API's own types.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.program import Launch

MAP_BYTES = 128  # of a tensor map


class GpuDriver(ABC):
    """An initialized driver API.

    Class attributes are names of statuses: `out_of_memory`, `not_ready` for events, and `fatal` for errors of executed
    work after which the GPU is unusable to this process.
    """

    out_of_memory: str
    not_ready: str
    fatal: frozenset[str]
    lost = ""  # the error that made the GPU unusable; empty as long as it works

    def ok(self, result: tuple[Any, ...]) -> Any:
        """Return the values of a call's result. Raises LlmcError E203 if memory ran out, and E114 for other
        failures.
        """
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

    @abstractmethod
    def name(self, status: int) -> str:
        """Return the status's name, such as "CUDA_ERROR_ILLEGAL_ADDRESS" or "hipErrorIllegalAddress"."""

    @abstractmethod
    def _text(self, status: int) -> str:
        """Return the driver's description of a status."""

    @abstractmethod
    def device_count(self) -> int:
        """Return the number of GPUs that are visible to this process."""

    @abstractmethod
    def allocate(self, nbytes: int) -> tuple[Any, ...]:
        """Allocate device memory: (status, address)."""

    @abstractmethod
    def release(self, address: int) -> None:
        """Free device memory, ignoring errors."""

    @abstractmethod
    def pin(self, nbytes: int) -> int:
        """Allocate pinned host memory."""

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Free pinned host memory, ignoring errors."""

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

    @abstractmethod
    def free_memory(self) -> int:
        """Return the bytes of device memory that are free."""

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

    @abstractmethod
    def zero(self, address: int, nbytes: int, stream: Any) -> None:
        """Zero device memory, in the stream."""

    @abstractmethod
    def stream(self) -> Any:
        """Create a stream that does not synchronize with the default stream."""

    @abstractmethod
    def destroy_stream(self, stream: Any) -> None:
        """Destroy a stream, ignoring errors."""

    @abstractmethod
    def synchronize(self, stream: Any) -> tuple[Any, ...]:
        """Wait until a stream is idle: (status,)."""

    @abstractmethod
    def event(self) -> Any:
        """Create an event without timing."""

    @abstractmethod
    def destroy_event(self, event: Any) -> None:
        """Destroy an event, ignoring errors."""

    @abstractmethod
    def record(self, event: Any, stream: Any) -> None:
        """Record an event in a stream."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Block until a recorded event has completed."""

    @abstractmethod
    def completed(self, event: Any) -> bool:
        """Return whether a recorded event has completed, or never will because the GPU failed."""

    @abstractmethod
    def load_module(self, binary: bytes) -> Any:
        """Load a binary with kernels."""

    @abstractmethod
    def unload_module(self, module: Any) -> None:
        """Unload a binary, ignoring errors."""

    @abstractmethod
    def function(self, module: Any, entry: str) -> Any:
        """Return a kernel of a loaded binary."""

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

    @abstractmethod
    def end_capture(self, stream: Any) -> tuple[Any, ...]:
        """End the capture: (status, graph)."""

    @abstractmethod
    def instantiate(self, graph: Any) -> Any:
        """Make a captured graph executable."""

    @abstractmethod
    def destroy_graph(self, graph: Any) -> None:
        """Destroy a captured graph, ignoring errors."""

    @abstractmethod
    def destroy_executable(self, graph: Any) -> None:
        """Destroy an executable graph, ignoring errors."""

    @abstractmethod
    def upload_graph(self, graph: Any, stream: Any) -> None:
        """Prepare an executable graph on the GPU before its first launch."""

    @abstractmethod
    def launch_graph(self, graph: Any, stream: Any) -> tuple[Any, ...]:
        """Launch an executable graph: (status,)."""
