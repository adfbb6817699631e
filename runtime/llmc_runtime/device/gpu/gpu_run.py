"""Runs a program on a GPU's stream: prepared launch parameters, and graphs for sizes that recur.

Every parameter of every launch occupies a cell of 8 bytes, and every launch has a table with the addresses of its
cells, which is the form that the driver takes. A run only updates the grids and the cells that hold sizes. A tensor
map is stored separately, in 128 bytes. Launches without `params` pass what Triton's kernels take: after a map, the
sizes (i32) and the strides (i64, in elements) of its tensor; after the sizes, two null pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmc_runtime.device.gpu.device_group import LibraryCall
from llmc_runtime.device.gpu.driver import MAP_BYTES, GpuDriver
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.expr import Expr
from llmc_runtime.format.group_memory import PROGRAMS
from llmc_runtime.format.json_fields import REMEDY
from llmc_runtime.format.launch_param import TensorMap
from llmc_runtime.format.program import GROUP, Launch, Program

_SCRATCH = 2  # null pointers after the sizes: Triton's scratch arguments, which our kernels do not use
_INT32_MAX = (1 << 31) - 1
# Graphs of a program whose sequences have several tokens, which are captured for sizes that recur:
_MAX_GRAPHS = 32  # maximum number of graphs
_MAX_SEEN = 256  # a size recurs if it is among this many latest different sizes
_IDLE_RUNS = 1000  # runs without use after which a graph may be replaced by that of another size


@dataclass(slots=True)
class _PreparedLaunch:
    """A prepared launch.

    submit:      submits it to the stream: (status,)
    config:      holds the grid of the last run
    grid:        indices of the three sizes of the grid
    max_blocks:  maximum number of blocks along x
    """

    launch: Launch
    submit: Callable[[], tuple[Any, ...]]
    config: Any
    grid: tuple[int, int, int]
    max_blocks: int


def _num_cells(launch: Launch) -> int:
    """Return the number of cells for the parameters of a launch.

    A "tensor" parameter has two more cells, which follow those of all parameters: its address and its size.
    """
    if launch.params:
        return len(launch.params) + 2 * sum(p.kind == "tensor" for p in launch.params)
    return len(launch.args) + len(launch.sizes) + _SCRATCH + sum(2 * len(m.box) for m in launch.maps)


class GpuRun:
    """Runs one program on a stream.

    If every sequence in the program has one token (`program.uniform`), each set of sizes is captured as a graph once
    and replayed. Other programs run in many sizes: one that recurs is captured and replayed, and otherwise the kernels
    are launched one by one.
    """

    def __init__(
        self,
        driver: GpuDriver,
        enter: Callable[[], None],
        stream: Any,
        program: Program,
        functions: Sequence[Any],
        addresses: Sequence[int],
        symbols: np.ndarray,
        careful: bool = False,
    ) -> None:
        """`functions` has one entry per launch, `addresses` one per buffer. `symbols`, i64, is read at every run.
        `enter` makes the GPU current in the calling thread. `careful` disables graphs and synchronizes after every
        launch, to find the one that fails.
        """
        self._careful = careful
        self._driver, self._enter, self._stream = driver, enter, stream
        self._program, self._symbols = program, symbols
        self._names = tuple(program.symbols)
        allocated = {s: int(v) for s, v in zip(self._names, symbols) if s in program.state_symbols()}
        self._env = {**program.top(), **allocated}  # sizes for tensor maps
        self._sizes: dict[str, int] = {}  # size expression as text -> its index in self._exprs
        self._exprs: list[Expr] = []
        maps = [m for x in program.launches for m in x.maps]
        count = sum(map(_num_cells, program.launches))
        self._cells = np.zeros(max(1, count), np.uint64)  # invariant: never moved, as the driver reads it at launches
        storage = np.zeros(MAP_BYTES * (len(maps) + 1), np.uint8)
        self._maps = storage[-storage.ctypes.data % MAP_BYTES :]  # never moved either; maps are aligned to their size
        self._table = self._cells.ctypes.data + 8 * np.arange(max(1, count), dtype=np.uint64)
        self._cell_sizes: list[tuple[int, int]] = []  # (cell, index of the size that it holds)
        self._launches: list[_PreparedLaunch] = []
        enter()  # encoding a tensor map needs it, whichever thread binds
        self._prepare_launches(functions, addresses)
        self._size_cells = np.array([cell for cell, _ in self._cell_sizes], np.intp)
        self._size_index = np.array([size for _, size in self._cell_sizes], np.intp)
        self._current: bytes | None = None  # the symbol values that the cells and grids are set for; None: unknown
        self._graphs: dict[bytes, Any] = {}  # by symbol values, the one that was used last at the end
        self._used: dict[bytes, int] = {}  # the number of the run that used a graph last
        self._seen: dict[bytes, None] = {}  # symbol values that ran without a graph, in order of their first run
        self._runs = 0

    def _prepare_launches(self, functions: Sequence[Any], addresses: Sequence[int]) -> None:
        """Write the pointers, prepare the launches, and list the cells that hold sizes."""
        at = num_maps = 0
        for launch, function in zip(self._program.launches, functions):
            params = int(self._table.ctypes.data) + 8 * at
            if launch.params:
                self._write_params(launch, addresses, at, num_maps)
                at, num_maps = at + _num_cells(launch), num_maps + len(launch.maps)
                self._add_launch(launch, function, params)
                continue
            maps = {m.arg: m for m in launch.maps}
            for i, arg in enumerate(launch.args):
                self._cells[at] = addresses[arg]
                at += 1
                if i in maps:
                    at = self._write_map(maps[i], self._program.buffers[arg].dtype, at, num_maps)
                    num_maps += 1
            for size in launch.sizes:
                self._cell_sizes.append((at, self._expr_index(size)))
                at += 1
            at += _SCRATCH
            self._add_launch(launch, function, params)

    def _add_launch(self, launch: Launch, function: Any, params: int) -> None:
        """Prepare a launch, whose list of cells is at the address `params`."""
        x, y, z = (*(self._expr_index(g) for g in launch.grid), *[self._expr_index(None)] * 3)[:3]
        shares = any(self._program.buffers[a].kind == GROUP for a in launch.args)
        config, submit = self._submission(launch, function, params)
        self._launches.append(_PreparedLaunch(launch, submit, config, (x, y, z), PROGRAMS if shares else _INT32_MAX))

    def _submission(self, launch: Launch, function: Any, params: int) -> tuple[Any, Callable[[], tuple[Any, ...]]]:
        """Return the configuration of a launch, and the function that submits it.

        A kernel does not start before a library's launch in front of it has ended: a library may submit more than
        kernels, and programmatic dependent launch is for two kernels.
        """
        if isinstance(function, LibraryCall):
            at = (params - self._table.ctypes.data) // 8
            cells = self._cells[at : at + len(launch.args) + len(launch.sizes)]
            return SimpleNamespace(gridDimX=1, gridDimY=1, gridDimZ=1), partial(function, cells, self._stream)
        if self._launches and isinstance(self._launches[-1].config, SimpleNamespace):
            launch = replace(launch, pdl=False)
        config = self._driver.launch_config(launch, self._stream)
        return config, partial(self._driver.launch, config, function, params)

    def _write_params(self, launch: Launch, addresses: Sequence[int], at: int, num_maps: int) -> None:
        """Set the cells from `at` on by `launch.params`, and make its tensor maps, numbered from `num_maps`."""
        for i, m in enumerate(launch.maps):
            arg = launch.args[m.arg]
            self._make_map(m, self._program.buffers[arg].dtype, addresses[arg], num_maps + i)
        top = self._program.top()
        descriptor = at + len(launch.params)  # the next free pair of cells: address and size of a tensor
        for i, param in enumerate(launch.params):
            if param.kind == "arg":
                self._cells[at + i] = addresses[launch.args[param.index]] + param.offset(top)
            elif param.kind == "tensor":
                self._cells[descriptor] = addresses[launch.args[param.index]] + param.offset(top)
                self._cell_sizes.append((descriptor + 1, self._expr_index(param.size)))
                self._table[at + i] = self._cells.ctypes.data + 8 * descriptor
                descriptor += 2
            elif param.kind == "map":
                self._table[at + i] = self._maps.ctypes.data + MAP_BYTES * (num_maps + param.index)
            elif param.kind == "size":
                self._cell_sizes.append((at + i, self._expr_index(param.size)))
            else:
                self._cells[at + i] = param.bits

    def _write_map(self, m: TensorMap, dtype: str, at: int, number: int) -> int:
        """Encode the tensor map for the address in cell `at - 1` and make it that cell's parameter.

        The tensor's sizes and strides are written from cell `at` on. Returns the index of the next cell.
        """
        shape, strides = self._make_map(m, dtype, int(self._cells[at - 1]), number)
        self._table[at - 1] = self._maps.ctypes.data + MAP_BYTES * number
        self._cells[at : at + 2 * len(shape)] = [*shape, *strides]
        return at + 2 * len(shape)

    def _make_map(self, m: TensorMap, dtype: str, address: int, number: int) -> tuple[list[int], list[int]]:
        """Encode tensor map `number` of a buffer at `address`. Returns its tensor's sizes and strides in elements."""
        env, begin = self._env, MAP_BYTES * number
        shape, strides = m.layout(env)
        encoded = self._driver.tensor_map(address + m.offset(env), dtype, shape, strides, m.box, m.swizzle)
        self._maps[begin : begin + MAP_BYTES] = np.frombuffer(encoded, np.uint8)
        return shape, strides

    def _expr_index(self, size: Expr | None) -> int:
        text = "1" if size is None else size.text
        if text not in self._sizes:
            self._sizes[text] = len(self._exprs)
            self._exprs.append(Expr("1", (1,)) if size is None else size)
        return self._sizes[text]

    def __call__(self) -> None:
        """Submit one run to the stream. Raises LlmcError E114 if a launch fails."""
        self._enter()
        self._runs += 1
        key = self._symbols.tobytes()
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self._graphs[key] = graph
        elif self._should_capture(key):
            graph = self._capture()
        if graph is None:
            self._launch()
            return
        self._used[key] = self._runs
        self._driver.ok(self._driver.launch_graph(graph, self._stream))

    def prepare(self) -> None:
        """Capture the graph for the current symbol values, if it does not exist yet, and upload it to the GPU."""
        self._enter()
        key = self._symbols.tobytes()
        if not self._careful and key not in self._graphs:
            self._driver.upload_graph(self._capture(), self._stream)
            self._used[key] = self._runs

    def _should_capture(self, key: bytes) -> bool:
        """Whether to capture a graph for symbol values that have none; makes room for it."""
        if self._careful:
            return False
        if self._program.uniform:
            return True
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > _MAX_SEEN:
                del self._seen[next(iter(self._seen))]
            return False
        if len(self._graphs) >= _MAX_GRAPHS:
            oldest = next(iter(self._graphs))
            if self._runs - self._used[oldest] < _IDLE_RUNS:
                return False
            self._driver.destroy_executable(self._graphs.pop(oldest))
            del self._used[oldest]
        del self._seen[key]
        return True

    def free(self) -> None:
        """Destroy the graphs."""
        for graph in self._graphs.values():
            self._driver.destroy_executable(graph)
        self._graphs.clear()
        self._used.clear()

    def _capture(self) -> Any:
        driver = self._driver
        driver.begin_capture(self._stream)
        try:
            self._launch()
        except BaseException:
            status, graph = driver.end_capture(self._stream)
            if not status:
                driver.destroy_graph(graph)
            raise
        graph = driver.ok(driver.end_capture(self._stream))
        try:
            executable = driver.instantiate(graph)
        finally:
            driver.destroy_graph(graph)
        self._graphs[self._symbols.tobytes()] = executable
        return executable

    def _launch(self) -> None:
        self._update_sizes()
        for prepared in self._launches:
            config = prepared.config
            if not (config.gridDimX and config.gridDimY and config.gridDimZ):
                continue  # an empty grid: nothing to compute, and the driver rejects it
            status = prepared.submit()[0]
            if self._careful and not status:
                status = self._driver.synchronize(self._stream)[0]
            if status:
                error = self._driver.error(int(status))
                cause = f"{error.cause} at {prepared.launch.op or prepared.launch.entry} ({prepared.launch.loc})"
                raise LlmcError(error.code, cause, error.remedy)

    def _update_sizes(self) -> None:
        """Update the cells and grids to the current symbol values."""
        symbols = self._symbols.tobytes()
        if symbols == self._current:
            return
        env = dict(zip(self._names, self._symbols.tolist()))
        values = [e(env) for e in self._exprs]
        if values and not 0 <= min(values) <= max(values) <= _INT32_MAX:
            invalid = next(e.text for e, v in zip(self._exprs, values) if not 0 <= v <= _INT32_MAX)
            raise LlmcError(
                "E113", f"program {self._program.name}: {invalid} is negative or too large at {env}", REMEDY
            )
        self._current = None  # unknown if an assignment fails
        if len(self._size_cells):
            self._cells[self._size_cells] = np.array(values, np.uint64)[self._size_index]
        for prepared in self._launches:
            config = prepared.config
            x, y, z = prepared.grid
            config.gridDimX = min(values[x], prepared.max_blocks)
            config.gridDimY = values[y]
            config.gridDimZ = values[z]
        self._current = symbols
