"""Runs a program on a GPU's stream: prepared launches, and graphs for sizes that recur.

A run only updates the grids and the sizes among the parameters of its launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmc_runtime.device.gpu.device_group import LibraryCall
from llmc_runtime.device.gpu.driver import GpuDriver
from llmc_runtime.device.gpu.launch_params import LaunchParams, SizeTable
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.group_memory import PROGRAMS
from llmc_runtime.format.json_fields import REMEDY
from llmc_runtime.format.program import GROUP, Launch, Program

_INT32_MAX = (1 << 31) - 1
# Graphs of a program whose sequences have several tokens, which are captured for sizes that recur:
_MAX_GRAPHS = 32  # maximum number of graphs
_MAX_SEEN = 256  # a size recurs if it is among this many latest different sizes
_IDLE_RUNS = 1000  # runs without use after which a graph may be replaced by that of another size


@dataclass(slots=True)
class _PreparedLaunch:
    """A prepared launch. `submit` submits it to the stream, (status,), with the grid of `config`."""

    launch: Launch
    submit: Callable[[], tuple[Any, ...]]
    config: Any


@dataclass(slots=True)
class _Grid:
    """The grid of launches with the same `config`: indices of its three sizes, and the maximum number of blocks along
    x.
    """

    config: Any
    sizes: tuple[int, int, int]
    max_blocks: int


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
        env = {**program.top(), **allocated}  # sizes for tensor maps
        self._sizes = SizeTable()
        self._launches: list[_PreparedLaunch] = []
        self._grids: list[_Grid] = []
        self._configs: dict[tuple[Any, ...], Any] = {}  # of launches that differ in kernel and parameters only
        enter()  # encoding a tensor map needs it, whichever thread binds
        self._params = LaunchParams(driver, program, addresses, env, self._sizes)
        self._prepare_launches(functions)
        self._current: bytes | None = None  # the symbol values that the cells and grids are set for; None: unknown
        self._graphs: dict[bytes, Any] = {}  # by symbol values, the one that was used last at the end
        self._used: dict[bytes, int] = {}  # the number of the run that used a graph last
        self._seen: dict[bytes, None] = {}  # symbol values that ran without a graph, in order of their first run
        self._runs = 0

    def _prepare_launches(self, functions: Sequence[Any]) -> None:
        """Prepare the launches of kernels and of libraries.

        A kernel does not start before a library's launch in front of it has ended: a library may submit more than
        kernels, and programmatic dependent launch is for two kernels.
        """
        group = {i for i, buffer in enumerate(self._program.buffers) if buffer.kind == GROUP}
        after_library = False
        for i, (launch, function) in enumerate(zip(self._program.launches, functions)):
            max_blocks = _INT32_MAX if group.isdisjoint(launch.args) else PROGRAMS
            config: Any
            if isinstance(function, LibraryCall):
                config = SimpleNamespace(gridDimX=1, gridDimY=1, gridDimZ=1)
                self._grids.append(_Grid(config, self._grid_sizes(launch), max_blocks))
                submit = partial(function, self._params.cells(i), self._stream)
            else:
                config = self._config(replace(launch, pdl=False) if after_library else launch, max_blocks)
                submit = partial(self._driver.launch, config, function, self._params.address(i))
            after_library = isinstance(function, LibraryCall)
            self._launches.append(_PreparedLaunch(launch, submit, config))

    def _config(self, launch: Launch, max_blocks: int) -> Any:
        """Return the configuration of a kernel's launch, which it shares with similar launches."""
        sizes = self._grid_sizes(launch)
        key = launch.threads, launch.shared, launch.pdl, launch.cluster, sizes, max_blocks
        if key not in self._configs:
            self._configs[key] = self._driver.launch_config(launch, self._stream)
            self._grids.append(_Grid(self._configs[key], sizes, max_blocks))
        return self._configs[key]

    def _grid_sizes(self, launch: Launch) -> tuple[int, int, int]:
        """Return the indices of the sizes of a launch's grid."""
        x, y, z = map(self._sizes.index, (*launch.grid, None, None, None)[:3])
        return x, y, z

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
        """Capture the launches for the current symbols as a graph, and return the executable graph."""
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
        """Submit all launches with the current symbols. A failure names the launch's op and module."""
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
        values = [e(env) for e in self._sizes.exprs]
        if values and not 0 <= min(values) <= max(values) <= _INT32_MAX:
            invalid = next(e.text for e, v in zip(self._sizes.exprs, values) if not 0 <= v <= _INT32_MAX)
            raise LlmcError(
                "E113", f"program {self._program.name}: {invalid} is negative or too large at {env}", REMEDY
            )
        self._current = None  # unknown if an assignment fails
        self._params.update(values)
        for grid in self._grids:
            x, y, z = grid.sizes
            grid.config.gridDimX = min(values[x], grid.max_blocks)
            grid.config.gridDimY = values[y]
            grid.config.gridDimZ = values[z]
        self._current = symbols
