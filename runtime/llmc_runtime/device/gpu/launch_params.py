"""The kernel parameters of a program's launches, in the form that the driver takes.

Each launch has a table with the addresses of its cells of 8 bytes, one per parameter. A tensor map is stored
separately, in 128 bytes. Launches without `params` pass what Triton's kernels take: after a map, the sizes (i32) and
the strides (i64, in elements) of its tensor; after the sizes, two null pointers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmc_runtime.device.gpu.driver import MAP_BYTES, GpuDriver
from llmc_runtime.format.expr import Expr
from llmc_runtime.format.launch_param import TensorMap
from llmc_runtime.format.program import Launch, Program

_SCRATCH = 2  # null pointers after the sizes: Triton's scratch arguments, which our kernels do not use
_CELL_BYTES = 8


class SizeTable:
    """The different size expressions of a program, `exprs`, which refer to them by index."""

    def __init__(self) -> None:
        self.exprs: list[Expr] = []
        self._indices: dict[str, int] = {}

    def index(self, size: Expr | None) -> int:
        """Return the index of a size expression, which is added if it is new. None is the size 1."""
        text = "1" if size is None else size.text
        index = self._indices.get(text)
        if index is None:
            index = self._indices[text] = len(self.exprs)
            self.exprs.append(Expr("1", (1,)) if size is None else size)
        return index


class LaunchParams:
    """The parameters of all launches of a program.

    `addresses` has one entry per buffer. `env` has the values of symbols for tensor maps, which are encoded here, so
    that the GPU has to be current. `update` sets the sizes, which are added to `sizes`.
    """

    def __init__(
        self, driver: GpuDriver, program: Program, addresses: Sequence[int], env: Mapping[str, int], sizes: SizeTable
    ) -> None:
        self._driver, self._program, self._addresses = driver, program, addresses
        self._env, self._top, self._sizes = env, program.top(), sizes
        self._values: list[int] = []  # of the cells
        self._cell_sizes: list[tuple[int, int]] = []  # (cell, index of the size that it holds)
        self._pointers: list[tuple[int, int]] = []  # (parameter, the cell that it points to instead of its own)
        self._mapped: list[tuple[int, int]] = []  # (parameter, the number of its tensor map)
        self._maps: list[bytes] = []
        self._encoded: dict[tuple[int, str, int], tuple[int, list[int]]] = {}  # see _map
        self._begins: list[int] = []  # the first cell of each launch
        for launch in program.launches:
            self._begins.append(len(self._values))
            if launch.params:
                self._add_params(launch)
            else:
                self._add_arguments(launch)
        self._place()

    def _place(self) -> None:
        """Copy everything to arrays. Invariant: they are never moved, as the driver reads them at launches."""
        self._cells = np.array([*self._values, 0], np.uint64)  # never empty
        first_cell = self._cells.ctypes.data
        self._table = first_cell + _CELL_BYTES * np.arange(len(self._cells), dtype=np.uint64)
        self._table_address = self._table.ctypes.data
        storage = np.zeros(MAP_BYTES * (len(self._maps) + 1), np.uint8)
        aligned = storage[-storage.ctypes.data % MAP_BYTES :]  # maps are aligned to their size
        aligned[: MAP_BYTES * len(self._maps)] = np.frombuffer(b"".join(self._maps), np.uint8)
        self._storage, first_map = aligned, aligned.ctypes.data
        for param, cell in self._pointers:
            self._table[param] = first_cell + _CELL_BYTES * cell
        for param, number in self._mapped:
            self._table[param] = first_map + MAP_BYTES * number
        self._size_cells = np.array([cell for cell, _ in self._cell_sizes], np.intp)
        self._size_indices = np.array([index for _, index in self._cell_sizes], np.intp)

    def address(self, index: int) -> int:
        """Return the address of the table of the launch number `index`."""
        return self._table_address + _CELL_BYTES * self._begins[index]

    def cells(self, index: int) -> np.ndarray:
        """Return the arguments and sizes of the launch number `index`, u64, which has no `params` and no tensor maps.
        The array changes with `update`.
        """
        launch, begin = self._program.launches[index], self._begins[index]
        return self._cells[begin : begin + len(launch.args) + len(launch.sizes)]

    def update(self, values: Sequence[int]) -> None:
        """Set the cells that hold sizes, from the values of all sizes."""
        if len(self._size_cells):
            self._cells[self._size_cells] = np.array(values, np.uint64)[self._size_indices]

    def _add_arguments(self, launch: Launch) -> None:
        """Add every argument, every size and the null pointers."""
        values, maps = self._values, {m.arg: m for m in launch.maps}
        for i, arg in enumerate(launch.args):
            values.append(self._addresses[arg])
            if i in maps:
                number, layout = self._map(maps[i], arg)
                self._mapped.append((len(values) - 1, number))
                values += layout
        for size in launch.sizes:
            self._add_size(size)
        values += [0] * _SCRATCH

    def _add_params(self, launch: Launch) -> None:
        """Add what `launch.params` lists. A "tensor" has two more cells, after those of all parameters: its address and
        its size.
        """
        values, addresses = self._values, self._addresses
        numbers = [self._map(m, launch.args[m.arg])[0] for m in launch.maps]
        tensors = []
        for param in launch.params:
            if param.kind == "size":
                self._add_size(param.size)
            elif param.kind == "arg":
                values.append(addresses[launch.args[param.index]] + param.offset(self._top))
            elif param.kind == "value":
                values.append(param.bits)
            else:
                if param.kind == "map":
                    self._mapped.append((len(values), numbers[param.index]))
                else:
                    tensors.append((len(values), param))
                values.append(0)  # unused: the table has another address
        for at, param in tensors:
            self._pointers.append((at, len(values)))
            values.append(addresses[launch.args[param.index]] + param.offset(self._top))
            self._add_size(param.size)

    def _add_size(self, size: Expr | None) -> None:
        self._cell_sizes.append((len(self._values), self._sizes.index(size)))
        self._values.append(0)

    def _map(self, m: TensorMap, buffer: int) -> tuple[int, list[int]]:
        """Encode the tensor map of a buffer, unless another launch has the same one, as those of a model's layers often
        do. Returns its number, and its tensor's sizes and strides in elements.
        """
        address, dtype = self._addresses[buffer], self._program.buffers[buffer].dtype
        key = id(m), dtype, address  # equal maps of an artifact are one object
        if key not in self._encoded:
            shape, strides = m.layout(self._env)
            self._encoded[key] = len(self._maps), [*shape, *strides]
            begin = address + m.offset(self._env)
            self._maps.append(self._driver.tensor_map(begin, dtype, shape, strides, m.box, m.swizzle))
        return self._encoded[key]
