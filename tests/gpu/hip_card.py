"""An AMD GPU through HIP for the kernel tests: buffers and single launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from gpu.launcher import Card
from llmc_runtime.device.hip.driver import Hip, LaunchConfig

from llmc.codegen.backends.triton.triton_toolchain import Compiled


class HipCard(Card):
    """The first device. `arch` is its architecture, such as gfx942."""

    def __init__(self, nbytes: int = 64 << 20) -> None:
        self.hip, self.exact, self.nbytes, self.producer = Hip(), False, nbytes, None
        self.arch = self.hip.properties(0).arch.partition(":")[0]
        self.enter()
        self.stream = self.hip.stream()
        self.live = int(self.hip.ok(self.hip.allocate(nbytes)))
        self.staged = self.hip.pin(nbytes)  # of the host
        self.allocations: list[int] = []
        self.functions: dict[bytes, Any] = {}
        self.modules: list[Any] = []

    def enter(self) -> None:
        self.hip.set_device(0)

    def close(self) -> None:
        """Free everything."""
        for module in self.modules:
            self.hip.unload_module(module)
        self.hip.unpin(self.staged)
        self.hip.release(self.live)
        self.hip.destroy_stream(self.stream)

    def function(self, compiled: Compiled, entry: str) -> Any:
        if compiled.binary not in self.functions:
            self.modules.append(self.hip.load_module(compiled.binary))
            self.functions[compiled.binary] = self.hip.function(self.modules[-1], entry)
        return self.functions[compiled.binary]

    def write(self, address: int, data: np.ndarray) -> None:
        if data.nbytes:
            ctypes.memmove(self.staged, data.ctypes.data, data.nbytes)
            self.hip.copy_in(address, self.staged, data.nbytes, self.stream)
            self.wait()

    def read(self, address: int, data: np.ndarray) -> None:
        if data.nbytes:
            self.hip.read(data.ctypes.data, address, data.nbytes)

    def _launch(
        self, fn: Any, grid: Sequence[int], threads: int, shared: int, args: Any, pdl: bool, cluster: Sequence[int] = ()
    ) -> None:
        values = [kind(value) for value, kind in zip(*args, strict=True)]
        table = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        config = LaunchConfig(threads, shared, self.stream, *grid)
        self.hip.ok(self.hip.launch(config, fn, ctypes.addressof(table)))
        self.wait()  # the values are alive until here

    def wait(self) -> None:
        """Wait for the stream. Raises RuntimeError if a launch has failed."""
        try:
            self.hip.ok(self.hip.synchronize(self.stream))
        except Exception as error:
            raise RuntimeError(str(error)) from None
