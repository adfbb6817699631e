"""A program as launches that are ready to go: arguments in place, graphs of the sizes that recur; it loads no kernels.

Every parameter of every launch has a cell of 8 bytes, and every launch a list of the addresses of its cells, as the
driver takes them. A run changes the cells of sizes and the grids alone. A tensor map is 128 bytes elsewhere. Launches
without `params` pass what Triton's kernels take: behind a map, cells of its tensor's sizes (i32) and steps (i64, in
elements); behind the sizes, two null pointers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc_runtime.device.cuda_names import MAP_BYTES, Cuda
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.expr import Expr
from llmc_runtime.format.fields import REMEDY
from llmc_runtime.format.program import Launch, Program, TensorMap

_SCRATCH = 2  # null pointers behind the sizes: Triton's scratch memory, which none of our kernels uses
_MOST = (1 << 31) - 1


@dataclass(slots=True)
class _Ready:
    """One launch: `config` has its grid of the last run, `grid` where the three numbers are found."""

    launch: Launch
    function: Any
    config: Any
    params: int
    grid: tuple[int, int, int]


def _cells_of(x: Launch) -> int:
    """How many cells the parameters of a launch take."""
    return len(x.params) or len(x.args) + len(x.sizes) + _SCRATCH + sum(2 * len(m.box) for m in x.maps)


class CudaRun:
    """Runs one program in a stream: as one graph a size where every row has one token, launch by launch otherwise."""

    def __init__(
        self,
        cuda: Cuda,
        enter: Callable[[], None],
        stream: Any,
        program: Program,
        functions: Sequence[Any],
        addresses: Sequence[int],
        symbols: np.ndarray,
        careful: bool = False,
    ) -> None:
        """`functions`: one a launch; `addresses`: one a buffer; `symbols`: i64, read at every run; `enter` makes a
        thread use the GPU's context; `careful`: no graphs, and every launch is waited for, to tell which one fails."""
        self._careful, self._graphed = careful, program.uniform and not careful
        self._cuda, self._enter, self._stream = cuda, enter, stream
        self._program, self._symbols = program, symbols
        self._names = tuple(program.symbols)
        self._sizes: dict[str, int] = {}  # size text -> its index among the program's different sizes
        self._exprs: list[Expr] = []
        maps = [m for x in program.launches for m in x.maps]
        count = sum(map(_cells_of, program.launches))
        self._cells = np.zeros(max(1, count), np.uint64)  # invariant: never moved, the driver reads it at launches
        room = np.zeros(MAP_BYTES * (len(maps) + 1), np.uint8)
        self._maps = room[-room.ctypes.data % MAP_BYTES :]  # nor this; a map begins at a multiple of its size
        self._table = self._cells.ctypes.data + 8 * np.arange(max(1, count), dtype=np.uint64)
        self._ready: list[_Ready] = []
        enter()  # maps are made in the context, by whatever thread binds
        where, which = self._fill(functions, addresses)
        self._size_cells, self._size_index = np.array(where, np.intp), np.array(which, np.intp)
        self._last: bytes | None = None  # the symbols that cells and grids are set to
        self._graphs: dict[bytes, Any] = {}

    def _fill(self, functions: Sequence[Any], addresses: Sequence[int]) -> tuple[list[int], list[int]]:
        """Set pointers and make the launches; the cells that hold sizes, and the index of each one's size."""
        where: list[int] = []
        which: list[int] = []
        at = made = 0
        for launch, function in zip(self._program.launches, functions):
            params = int(self._table.ctypes.data) + 8 * at
            if launch.params:
                self._put_params(launch, addresses, at, made, where, which)
                at, made = at + len(launch.params), made + len(launch.maps)
                self._add(launch, function, params)
                continue
            maps = {m.arg: m for m in launch.maps}
            for i, arg in enumerate(launch.args):
                self._cells[at] = addresses[arg]
                at += 1
                if i in maps:
                    at = self._put_map(maps[i], self._program.buffers[arg].dtype, at, made)
                    made += 1
            for size in launch.sizes:
                where.append(at)
                which.append(self._index(size))
                at += 1
            at += _SCRATCH
            self._add(launch, function, params)
        return where, which

    def _add(self, launch: Launch, function: Any, params: int) -> None:
        """Make a launch ready whose list of cells is at the address `params`."""
        x, y, z = (*(self._index(g) for g in launch.grid), *[self._index(None)] * 3)[:3]
        config = self._cuda.launch_config(launch.threads, launch.shared, self._stream, launch.pdl)
        self._ready.append(_Ready(launch, function, config, params, (x, y, z)))

    def _put_params(
        self, launch: Launch, addresses: Sequence[int], at: int, made: int, where: list[int], which: list[int]
    ) -> None:
        """Set the cells from `at` on by `launch.params`, and make its tensor maps, numbered from `made`."""
        for i, m in enumerate(launch.maps):
            arg = launch.args[m.arg]
            self._make_map(m, self._program.buffers[arg].dtype, addresses[arg], made + i)
        for i, param in enumerate(launch.params):
            if param.kind == "arg":
                self._cells[at + i] = addresses[launch.args[param.index]]
            elif param.kind == "map":
                self._table[at + i] = self._maps.ctypes.data + MAP_BYTES * (made + param.index)
            elif param.kind == "size":
                where.append(at + i)
                which.append(self._index(param.size))
            else:
                self._cells[at + i] = param.bits

    def _put_map(self, m: TensorMap, dtype: str, at: int, number: int) -> int:
        """Make the tensor map of the address in the cell before `at` the parameter there, with its tensor's sizes and
        steps behind it: the cell behind those."""
        shape = self._make_map(m, dtype, int(self._cells[at - 1]), number)
        steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        self._table[at - 1] = self._maps.ctypes.data + MAP_BYTES * number
        self._cells[at : at + 2 * len(shape)] = [*shape, *steps]
        return at + 2 * len(shape)

    def _make_map(self, m: TensorMap, dtype: str, address: int, number: int) -> list[int]:
        """Make the tensor map of this number; its tensor's sizes."""
        top = self._program.top()
        shape, begin = [d(top) for d in m.shape], MAP_BYTES * number
        found = self._cuda.tensor_map(address, dtype, shape, m.box, m.swizzle)
        self._maps[begin : begin + MAP_BYTES] = np.frombuffer(found, np.uint8)
        return shape

    def _index(self, size: Expr | None) -> int:
        text = "1" if size is None else size.text
        if text not in self._sizes:
            self._sizes[text] = len(self._exprs)
            self._exprs.append(Expr("1", (1,)) if size is None else size)
        return self._sizes[text]

    def __call__(self) -> None:
        """Put one run into the stream. LlmcError E114 where a launch is refused."""
        self._enter()
        if not self._graphed:
            self._launch(self._cuda.cu.cuLaunchKernelEx)
            return
        graph = self._graphs.get(self._symbols.tobytes())
        if graph is None:
            graph = self._capture()
        status = self._cuda.cu.cuGraphLaunch(graph, self._stream)[0]
        if status:
            raise self._cuda.error(int(status))

    def prepare(self) -> None:
        """Build the graph of the present symbols, if there is none, and bring it to the device."""
        self._enter()
        if self._graphed and self._symbols.tobytes() not in self._graphs:
            self._cuda.ok(self._cuda.cu.cuGraphUpload(self._capture(), self._stream))

    def free(self) -> None:
        """Give the graphs back."""
        for graph in self._graphs.values():
            self._cuda.cu.cuGraphExecDestroy(graph)
        self._graphs.clear()

    def _capture(self) -> Any:
        cuda, cu = self._cuda, self._cuda.cu
        cuda.begin_capture(self._stream)
        try:
            self._launch(cu.cuLaunchKernelEx)
        except BaseException:
            status, graph = cu.cuStreamEndCapture(self._stream)
            if not status:
                cu.cuGraphDestroy(graph)
            raise
        graph = cuda.ok(cu.cuStreamEndCapture(self._stream))
        try:
            made = cuda.ok(cu.cuGraphInstantiate(graph, 0))
        finally:
            cu.cuGraphDestroy(graph)
        self._graphs[self._symbols.tobytes()] = made
        return made

    def _launch(self, launch: Callable[..., tuple[Any, ...]]) -> None:
        self._set()
        for ready in self._ready:
            config = ready.config
            if not (config.gridDimX and config.gridDimY and config.gridDimZ):
                continue  # nothing to compute, which the driver does not take
            status = launch(config, ready.function, ready.params, 0)[0]
            if self._careful and not status:
                status = self._cuda.cu.cuStreamSynchronize(self._stream)[0]
            if status:
                error = self._cuda.error(int(status))
                cause = f"{error.cause} at {ready.launch.op or ready.launch.entry} ({ready.launch.loc})"
                raise LlmcError(error.code, cause, error.remedy)

    def _set(self) -> None:
        """Bring cells and grids to the present symbols."""
        now = self._symbols.tobytes()
        if now == self._last:
            return
        env = dict(zip(self._names, self._symbols.tolist()))
        values = [e(env) for e in self._exprs]
        if values and not 0 <= min(values) <= max(values) <= _MOST:
            wrong = next(e.text for e, v in zip(self._exprs, values) if not 0 <= v <= _MOST)
            raise LlmcError("E113", f"program {self._program.name}: {wrong} is no size at {env}", REMEDY)
        self._last = None
        if len(self._size_cells):
            self._cells[self._size_cells] = np.array(values, np.uint64)[self._size_index]
        for ready in self._ready:
            config, (x, y, z) = ready.config, ready.grid
            config.gridDimX, config.gridDimY, config.gridDimZ = values[x], values[y], values[z]
        self._last = now
