"""Runs the code objects of an artifact without a GPU: their Triton texts in Triton's CPU interpreter."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import numpy as np
import torch
from kernels.triton_harness import TORCH_DTYPES, interpreting
from llmc_runtime.artifact import Artifact

from llmc.codegen.backends.triton.triton_toolchain import load_entry
from llmc.codegen.code_object import read_kernel
from tests.runtime.libamdhip64.conftest import Driver

_DESCRIBE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int), ctypes.c_int
)
_EXECUTE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_uint),
)  # fmt: skip


class CodeObjects:
    """The code objects of artifacts. `launches` counts what ran by entry; `errors` are those of the functions that the
    library called, which cannot raise them.

    Steps run inside `interpreting()`. The bytes that a launch passes are cut up by the code object's own table of
    parameters, so that a table that differs from the text does not run.
    """

    def __init__(self, driver: Driver, artifact: Artifact | None = None) -> None:
        self._driver = driver
        self.launches: dict[str, int] = {}
        self.errors: list[BaseException] = []
        self._kernels: dict[str, tuple[Any, tuple[str, ...]]] = {}
        if artifact is not None:
            self.add(artifact)
        self._describe, self._execute = _DESCRIBE(self._sizes), _EXECUTE(self._run)  # kept alive here
        driver.lib.fake_code_objects(self._describe, self._execute)

    def add(self, artifact: Artifact) -> None:
        """Add the kernels of an artifact."""
        dtypes: dict[tuple[str, str], tuple[str, ...]] = {}
        for p in artifact.programs:
            dtypes |= {(x.kernel, x.entry): tuple(p.buffers[a].dtype for a in x.args) for x in p.launches}
        for k in artifact.manifest.kernels:
            text = artifact.read(k.source).decode()
            self.add_kernel(artifact.read(k.file), text, k.entry, dtypes[k.hash, k.entry])

    def add_kernel(self, binary: bytes, text: str, entry: str, dtypes: tuple[str, ...]) -> None:
        """Add a kernel: its code object and text, and the dtypes of the buffers that it takes."""
        with interpreting():
            self._kernels[hashlib.sha256(binary).hexdigest()] = load_entry(text, entry), dtypes

    def _sizes(self, image: int, nbytes: int, entry: bytes, out: Any, most: int) -> int:
        try:
            sizes = read_kernel(ctypes.string_at(image, nbytes), entry.decode()).sizes
            for i, size in enumerate(sizes[:most]):
                out[i] = size
        except BaseException as error:  # of a function that C++ calls
            self.errors.append(error)
            return -1
        return len(sizes)

    def _run(self, image: int, nbytes: int, entry: bytes, params: Any, grid: Any) -> None:
        try:
            self._interpret(ctypes.string_at(image, nbytes), entry.decode(), params, tuple(grid[:3]))
        except BaseException as error:  # of a function that C++ calls
            self.errors.append(error)

    def _interpret(self, binary: bytes, entry: str, params: Any, grid: tuple[int, ...]) -> None:
        function, dtypes = self._kernels[hashlib.sha256(binary).hexdigest()]
        sizes = read_kernel(binary, entry).sizes
        values = [int.from_bytes(ctypes.string_at(p, n), "little") for p, n in zip(params, sizes)]
        assert values[-2:] == [0, 0], "Triton's scratch arguments are null"
        pointers, numbers = values[: len(dtypes)], values[len(dtypes) : -2]
        assert sizes[: len(dtypes)] == (8,) * len(dtypes) and set(sizes[len(dtypes) : -2]) <= {4}
        function[grid](*map(self._tensor, pointers, dtypes), *numbers)
        self.launches[entry] = self.launches.get(entry, 0) + 1

    def _tensor(self, address: int, dtype: str) -> torch.Tensor:
        """View device memory from an address to the end of its allocation."""
        kind = TORCH_DTYPES[dtype]
        nbytes = self._driver.extent(address) // kind.itemsize * kind.itemsize
        held = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        return torch.from_numpy(held).view(kind)
