"""A device for artifacts of Triton targets that runs their kernels in Triton's CPU interpreter, without a GPU.

It follows the calling conventions "cuda-1" and "hip-1" (pointers in the order of the arguments, then the sizes), and
pads steps to the sizes of device graphs, so that a tiny model can be tested end to end. Otherwise it equals the
CPU device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from kernels.triton_harness import TORCH_DTYPES, descriptor, interpreting
from llmc_runtime.artifact import Artifact
from llmc_runtime.device.cpu_device import CpuDevice
from llmc_runtime.device.device import Run
from llmc_runtime.format.program import Buffer, Program

from llmc.codegen.backends.triton.triton_toolchain import load_entry


class InterpretDevice(CpuDevice):
    """The interpreting device. `launches` records (op, loc) of executed launches.

    The arena is filled with garbage, to detect kernels that rely on zeros.
    """

    name = "interpret"
    replays = True

    def __init__(self) -> None:
        super().__init__(1)
        self.launches: list[tuple[str, str]] = []
        self._entries: dict[tuple[str, str], Any] = {}

    def load(self, artifact: Artifact) -> None:
        with interpreting():
            for kernel in artifact.manifest.kernels:
                assert kernel.abi in ("cuda-1", "hip-1"), kernel
                text = artifact.read(kernel.source).decode()
                self._entries[kernel.hash, kernel.entry] = load_entry(text, kernel.entry)

    def bind(self, program: Program, addresses: Sequence[int], symbols: np.ndarray) -> Run:
        names = list(program.symbols)
        env = {**program.top(), "P": dict(zip(names, symbols.tolist())).get("P", 1)}
        tensors = [tensor(b, address, env) for b, address in zip(program.buffers, addresses)]
        for b, t in zip(program.buffers, tensors):
            if b.kind == "arena" and b.alias is None and t.numel():
                t.view(torch.uint8).fill_(0xAB)

        def step() -> None:
            now = dict(zip(names, symbols.tolist()))
            with interpreting():
                for x in program.launches:
                    grid = tuple(g(now) for g in x.grid)
                    if all(grid):
                        run = self._entries[x.kernel, x.entry]
                        given = [tensors[a] for a in x.args]
                        assert not any(m.strides or m.offset(env) for m in x.maps), "descriptors are row-major here"
                        for m in x.maps:
                            given[m.arg] = descriptor(given[m.arg], [d(env) for d in m.shape], m.box)
                        run[grid](*given, *[s(now) for s in x.sizes])
                        self.launches.append((x.op, x.loc))

        return step


def tensor(b: Buffer, address: int, env: dict[str, int]) -> torch.Tensor:
    """View the device's bytes as a one-dimensional tensor of the buffer's dtype, without keeping them alive."""
    nbytes = b.bytes(env)
    if not nbytes:
        return torch.empty(0, dtype=TORCH_DTYPES[b.dtype])
    held = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    return torch.from_numpy(held).view(TORCH_DTYPES[b.dtype])
