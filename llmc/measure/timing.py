"""Times candidate kernels for a node on this machine, by programs with many copies of the node over distinct memory.

The copies' weights, activations and pages exceed the caches several times, so that each is read from memory as in a
model. Buffers hold random values: timings on zeros would mislead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
from llmc_runtime.device.device import Artifact, Device, Event, Memory, Run
from llmc_runtime.device.open_device import open_device
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import Limits, Source, TargetInfo
from llmc_runtime.format.program import RANK, Buffer, Program

from llmc import __version__
from llmc.artifact.write import Parts, write_artifact
from llmc.codegen.build import Built, build
from llmc.codegen.kernel import Kernel, Schedule
from llmc.codegen.scratch_dir import scratch
from llmc.codegen.tuning_records import sizes_of
from llmc.extension import Registry
from llmc.ir.contents import Step, fparams
from llmc.ir.dtype import DTYPES
from llmc.ir.example import named_operands, node_drawing
from llmc.ir.graph import Graph, Module, Node, Value
from llmc.passes.analysis import weight_only
from llmc.passes.base import Ctx
from llmc.passes.lower.specialize import with_sizes
from llmc.passes.pipeline import parse_pipeline, run_pipeline
from llmc.targets.target import Target

PASSES = "pack, lift-weights, memory"
CACHE_MULTIPLE = 4  # multiple of the last-level cache
MIN_SPREAD_BYTES = 96 << 20
MAX_COPIES, MAX_BYTES = 48, 4 << 30
ALIGN = 4096
ROUNDS = 5
PIECE_SECONDS = 0.01  # duration of each piece of a sustained measurement
ROUND_SECONDS = MappingProxyType({"cpu": 0.02, "cuda": 0.003, "hip": 0.003})
CODES = ("u8", "i8")
_TILE = 1 << 24
T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """A kernel and schedule to time for `node` of `graph`, at the sizes `env`."""

    node: Node
    graph: Graph
    env: Mapping[str, int]
    kernel: Kernel
    schedule: Schedule


@dataclass(frozen=True)
class Placed:
    """A candidate's program, its sizes, the offset of each buffer, and the total bytes."""

    program: Program
    candidate: Trial
    env: Mapping[str, int]
    places: Mapping[str, int]
    nbytes: int


def noise(size: int, rng: np.random.Generator) -> np.ndarray:
    """Return `size` bytes that are moderate numbers in bf16, f16 and f32: normally distributed bfloat16 values."""
    bits = rng.standard_normal(size // 2, np.float32).view(np.uint32)
    return np.ascontiguousarray((bits >> 16).astype(np.uint16)).view(np.uint8)


def unknown_operand(n: Node) -> str | None:
    """Return the first operand of interpreted integers whose content the op does not declare, or None."""
    slots = {s.name: s.dtype for s in n.op.operands}
    for name, v in named_operands(n):
        if DTYPES[v.type.dtype].kind == "i" and slots[name] != "t" and name not in n.op.holds:
            return name
    return None


def serving_step(n: Node, env: Mapping[str, int], context: int, page: int) -> Step:
    """Return the step on which a node is timed: rows that decode at position `context`, and the tokens of a prompt."""
    rows = env.get("R", 1)
    tokens = dict(sizes_of(n, env)).get("T", rows)
    return Step.serving(rows, max(tokens, rows), context, env.get("P", 1), page)


def copies_of(n: Node, env: Mapping[str, int], target: Target) -> int:
    """Return the number of copies that exceed the caches several times, within bounds."""
    copy_bytes = max(1, sum(int(v.type.nbytes.subs(env).const or 0) for v in [*n.operands, *n.results]))
    spread = max(CACHE_MULTIPLE * target.limits.l2, MIN_SPREAD_BYTES)
    return max(2, min(MAX_COPIES, -(-spread // copy_bytes), MAX_BYTES // copy_bytes))


def module_of(candidates: Sequence[Trial], symbols: Mapping[str, tuple[int, int]], target: Target) -> Module:
    """Return a module with one graph per candidate, @c0, @c1, ..., whose kernel choice is set.

    Of a model that is divided over ranks, these are the nodes of rank 0.
    """
    m = Module({}, {s: bounds for s, bounds in symbols.items() if s != RANK})
    for i, c in enumerate(candidates):
        g = m.graphs[f"c{i}"] = Graph(f"c{i}")
        g.ranges = dict(c.graph.ranges)
        weights = weight_only(c.graph)
        shared: dict[Value, Value] = {}
        for _ in range(copies_of(c.node, c.env, target)):
            _copy(g, c, weights, shared)
    return m


def _copy(g: Graph, c: Trial, weights: set[Value], shared: dict[Value, Value]) -> None:
    """Add a copy of the node.

    `shared` has the integer tables that copies share; a new version of one goes to the next copy. Weights of bytes are
    codes, not tables: each copy has its own, of any values.
    """
    node = c.node
    inputs: dict[Value, Value] = {}  # the node's operands -> the inputs of this copy
    for name, v in named_operands(node):
        if v in inputs:
            continue
        is_weight = v in weights
        is_table = DTYPES[v.type.dtype].kind != "f" and not (is_weight and v.type.dtype in CODES)
        if is_table and v in shared:
            inputs[v] = shared[v]
            continue
        inputs[v] = g.input(f"{g.name}.{name}.{len(g.inputs)}", v.type, weight=is_weight and not is_table)
        if is_table:
            shared[v] = inputs[v]
    attrs = {name: with_sizes(value, {RANK: 0}) for name, value in node.attrs.items()}
    copy = g.add(node.op, [inputs[v] for v in node.operands], attrs)
    copy.choice = {"kernel": c.kernel.name, **c.schedule}
    slots = [s.name for s in node.op.operands]
    states = [r for r in copy.results if r.type.state]
    for version, written in zip(states, node.op.writes, strict=True):
        state = node.operands[slots.index(written)]
        if state in shared:
            shared[state] = version
    g.outputs += [r for r in copy.results if not r.type.state]


class Sustained(NamedTuple):
    """The mean microseconds of a launch between two times of `time.perf_counter_ns`."""

    us: float
    begin: int
    end: int


class Timer:
    """Compiles and runs candidates.

    jobs: parallel compilations. context: tokens of each row in the KV cache. seconds: of a round, by default those of
    the target's family; a GPU lowers its clock in long rounds of large products. sustained_seconds: see `microseconds`.
    """

    def __init__(
        self, target: Target, registry: Registry, cache: Path, *, jobs: int | None, context: int, page: int,
        seconds: float | None = None, sustained_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self.target, self.registry, self.cache, self.jobs = target, registry, cache, jobs
        self.context, self.page = context, page
        self.seconds, self.sustained_seconds = seconds or ROUND_SECONDS[target.family], sustained_seconds
        self.tile = noise(_TILE, np.random.default_rng(0))

    def check_device(self) -> None:
        """Check that this machine has the target's device, without compiling anything. Raises LlmcError."""
        with scratch() as folder:
            open_device(self._artifact(Built((), {}), folder / "tune.llmc"), None).close()

    def microseconds(self, candidates: Sequence[Trial], symbols: Mapping[str, tuple[int, int]]) -> list[float]:
        """Return the time of one launch of each candidate: the median of ROUNDS rounds, or, if `sustained_seconds` is
        set, the time of `sustained` over that many seconds.

        Raises Diagnostic E5xx if one does not compile, and LlmcError for errors of the device.
        """
        if self.sustained_seconds:
            return [r.us for r in self.sustained(candidates, symbols, self.sustained_seconds)]
        return self._measured(candidates, symbols, self._median)

    def sustained(
        self, candidates: Sequence[Trial], symbols: Mapping[str, tuple[int, int]], seconds: float
    ) -> list[Sustained]:
        """Run each candidate for `seconds` without a pause, one after the other, and time its second half.

        A GPU that is at its power limit lowers its clock, which takes some tenths of a second. Errors: as microseconds.
        """
        return self._measured(candidates, symbols, partial(_sustained, seconds))

    def _measured(
        self, candidates: Sequence[Trial], symbols: Mapping[str, tuple[int, int]],
        measure: Callable[[Device, Run, int], T],
    ) -> list[T]:  # fmt: skip
        """Return measure(device, a function that runs the program once, its launches) of each candidate."""
        built = self._build(candidates, symbols)
        with scratch() as folder:
            artifact = self._artifact(built, folder / "tune.llmc")
            device = open_device(artifact, None)
            try:
                device.load(artifact)
                by_name = {p.name: p for p in built.programs}
                placed = [self._placed(by_name[f"c{i}"], c) for i, c in enumerate(candidates)]
                memory = device.alloc(max(p.nbytes for p in placed))  # candidates take turns with the same memory
                return [measure(device, self._bound(device, memory, p), len(p.program.launches)) for p in placed]
            finally:
                device.close()

    def compile(self, candidates: Sequence[Trial], symbols: Mapping[str, tuple[int, int]]) -> None:
        """Compile the candidates into the cache. It needs no device; raises Diagnostic E5xx if one does not compile."""
        self._build(candidates, symbols)

    def _build(self, candidates: Sequence[Trial], symbols: Mapping[str, tuple[int, int]]) -> Built:
        m = module_of(candidates, symbols, self.target)
        ctx = Ctx(self.registry.opset(), self.target, self.registry.kernels)
        run_pipeline(m, parse_pipeline(PASSES, self.registry.passes), ctx)
        self.cache.mkdir(parents=True, exist_ok=True)
        return build(m, self.target, self.cache, self.registry.kernels, self.registry.toolchains, jobs=self.jobs)

    def _artifact(self, built: Built, path: Path) -> Artifact:
        t = self.target
        parts = Parts(
            compiler=f"llmc {__version__}", source=Source("tune", "tune"),
            target=TargetInfo(t.name, t.arch, tuple(sorted(t.features))), limits=Limits(1, 1, 1), vocab_size=1,
            eos_token_ids=(), page_size=self.page, states=(), kernels=built.kernels.values(), programs=(), weights=0,
        )  # fmt: skip
        write_artifact(path, parts)
        folder = Folder(path)
        return Artifact(folder, folder.manifest(), built.programs, {})

    def _placed(self, program: Program, c: Trial) -> Placed:
        """Lay out the buffers of a candidate's program, and set the sizes that it runs with."""
        low, high = program.symbols.get("P", (1, 1))
        need = c.env.get("R", 1) * (-(-self.context // self.page) + 1)
        env = {**c.env, "P": max(low, min(high, need))}
        env = {s: env[s] for s in program.symbols}
        return Placed(program, c, env, *_places(program, env, () if self.target.family == "cpu" else _pairs(c)))

    def _median(self, device: Device, run: Run, launches: int) -> float:
        """Return the median time of a launch in microseconds, over ROUNDS rounds of equal length."""

        def seconds(times: int) -> float:
            begin = time.perf_counter()
            for _ in range(times):
                run()
            device.wait(device.mark())
            return time.perf_counter() - begin

        seconds(1)
        times = max(1, min(200, round(self.seconds / max(seconds(1), 1e-6))))
        return statistics.median(seconds(times) for _ in range(ROUNDS)) / times / launches * 1e6

    def _bound(self, device: Device, memory: Memory, p: Placed) -> Run:
        """Return a function that runs a candidate's program once, on random inputs."""
        device.repeat(memory.part(0, p.nbytes), self.tile, 0)
        self._fill(device, memory, p)
        symbols = np.array([p.env[s] for s in p.program.symbols], np.int64)
        addresses = [memory.address + p.places[b.name] for b in p.program.buffers]
        symbols_of = {s: (p.env[s], p.env[s]) for s in p.program.symbols}  # buffers are exactly this large
        run = device.bind(replace(p.program, uniform=True, symbols=symbols_of), addresses, symbols)
        device.prepare(run)
        return run

    def _fill(self, device: Device, memory: Memory, p: Placed) -> None:
        """Write valid values to the inputs and states of integers, bools and sampling parameters."""
        c, env = p.candidate, p.env
        step = serving_step(c.node, {**c.env, **env}, self.context, self.page)
        rng = np.random.default_rng(0)  # equal contents for all candidates: other experts would take other times
        d = node_drawing(c.node, {**c.env, **env}, step, rng, exact=False)
        for b in p.program.buffers:
            if b.alias is None and b.kind in ("input", "state"):
                name = b.name.split(".")[1]
                if DTYPES[b.dtype].kind == "f" and c.node.op.holds.get(name) is not fparams:
                    continue  # any floats do: the noise stays
                data = d.draw(name, tuple(size(env) for size in b.shape), b.dtype)
                if data.size:
                    device.write(memory, p.places[b.name], data.view(np.uint8) if data.dtype == bool else data)


def _sustained(seconds: float, device: Device, run: Run, launches: int) -> Sustained:
    """Run for `seconds` in pieces, of which two are under way so that the device always has work."""

    def once() -> int:
        begin = time.perf_counter_ns()
        run()
        device.wait(device.mark())
        return time.perf_counter_ns() - begin

    once()
    piece = max(1, round(PIECE_SECONDS * 1e9 / once()))
    begin, ends = time.perf_counter_ns(), list[int]()
    marks: list[Event] = []  # end events of the pieces that are still running
    while len(ends) < 2 or ends[-1] - begin < seconds * 1e9:
        for _ in range(piece):
            run()
        marks.append(device.mark())
        if len(marks) == 2:
            device.wait(marks.pop(0))
            ends.append(time.perf_counter_ns())
    device.wait(marks.pop())
    late = [end for end in ends if end - begin >= seconds * 5e8]
    late = late if len(late) > 1 else ends[-2:]
    return Sustained((late[-1] - late[0]) / (len(late) - 1) / piece / launches / 1e3, late[0], late[-1])


def _pairs(c: Trial) -> list[tuple[int, int]]:
    """Return the (operand, result) argument pairs that may share memory if the kernel works in place, as they do in a
    model.
    """
    count = len(c.node.operands)
    return [(i, count + r) for i, r in c.kernel.inplace(c.node, c.schedule)]


def _places(
    program: Program, env: Mapping[str, int], pairs: Sequence[tuple[int, int]] = ()
) -> tuple[dict[str, int], int]:
    """Return the offset of each buffer of a program in one allocation, and its size; each pair of arguments shares an
    offset.
    """
    at = -(-program.arena_bytes // ALIGN) * ALIGN
    places: dict[str, int] = {}
    by_name: dict[str, Buffer] = {b.name: b for b in program.buffers}
    for b in program.buffers:
        if b.kind == "arena":
            places[b.name] = b.offset
        elif b.alias is None:
            places[b.name] = at
            at += -(-max(1, b.bytes(env)) // ALIGN) * ALIGN
    for b in program.buffers:
        root = b
        while root.alias is not None:
            root = by_name[root.alias]
        places[b.name] = places[root.name]
    for launch in program.launches:
        for i, r in pairs:
            places[program.buffers[launch.args[r]].name] = places[program.buffers[launch.args[i]].name]
    return places, at
