"""Time every launch of a step alone on the device, and compare it with its lower bound, grouped by kernel.

A step decodes `batch` rows, optionally with the next tokens of a prompt. A group's launches of all layers run
repeatedly in a separate program on the real buffers of the step. As in a step, the weights of other layers are read in
between, so that those of a layer are not in the cache when they are read again. Products of experts need the places of
rows that only a step writes: each of them runs twice within a step, and its time is the increase of the step's.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.device import Device
from llmc_runtime.device.open_device import open_device
from llmc_runtime.engine.engine import Engine
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format.program import Launch, Program
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig

from bench.gpu import floors
from bench.gpu.floors import Roof
from bench.gpu.rows import Row
from bench.shapes import Shape

LAUNCHES = 400  # of one timed program
EXPERTS = ("moe_up", "moe_down", "moe_gather_up", "moe_gather_down")  # ends of the names of products of experts
ROUTING = ("topk_map", "topk_route", "moe_route")  # without them, products of experts would read any address
ROUNDS = 7
STEPS = 64


@dataclass(frozen=True)
class Bound:
    """What `bind` received for a program: the addresses of its buffers, and the array of its sizes."""

    program: Program
    addresses: tuple[int, ...]
    symbols: np.ndarray


@dataclass(frozen=True)
class Load:
    """A step of `batch` rows after prompts of `prompt` tokens; with `tokens`, of that many with part of a prompt.
    `temperature`: that of every row.
    """

    batch: int
    prompt: int = 128
    tokens: int = 0
    temperature: float = 0.0

    @property
    def name(self) -> str:
        rows = f"b{self.batch}+{self.tokens - self.batch}" if self.tokens else f"b{self.batch}"
        return f"{rows} at temperature {self.temperature:g}" if self.temperature else rows

    @property
    def rows(self) -> int:
        return self.batch + (self.tokens > 0)

    def attended(self, op: str, apart: bool) -> tuple[float, int]:
        """(pairs of a query and a key that it sees, tokens of KV in use) of a step's attention; `apart`: single tokens
        have an op of their own. Two chunks of the prompt precede the step."""
        streams, chunk = self.batch * (self.prompt + STEPS), max(0, self.tokens - self.batch)
        parts = ((streams, streams), (chunk * 2.5 * chunk, 3 * chunk))
        counted = parts[:1] if op.endswith("_single") else parts[1:] if apart else parts
        return sum(p for p, _ in counted), sum(n for _, n in counted)


class Bench:
    """An artifact on its device with the requests of a load in progress, and the executor's bound arguments."""

    def __init__(self, path: Path, load: Load) -> None:
        artifact = open_artifact(path, verify=False)
        self.device: Device = open_device(artifact, None)
        self.bound: list[Bound] = []
        original = self.device.bind

        def bind(program: Program, addresses: Sequence[int], symbols: np.ndarray) -> Any:
            self.bound.append(Bound(program, tuple(addresses), symbols))
            return original(program, addresses, symbols)

        self.device.bind = bind  # type: ignore[method-assign]
        self.executor = Executor(artifact, self.device, None)
        self.bind = original
        m = artifact.manifest
        config = SchedulerConfig(
            num_pages=self.executor.capacity.pages, page_size=m.kv.page_size, max_model_len=m.limits.max_model_len,
            max_num_seqs=m.limits.max_num_seqs, max_num_batched_tokens=load.tokens or m.limits.max_num_batched_tokens,
            vocab_size=m.vocab_size, eos_token_ids=(), prefix_caching=False, context=artifact.digest,
        )  # fmt: skip
        self.engine = Engine(Scheduler(config, lambda: 0), self.executor)
        self._vocab, self._temperature = m.vocab_size, load.temperature
        for i in range(load.batch):
            self._add(str(i), load.prompt, config.max_model_len - load.prompt)
        self._steps(STEPS + load.batch * load.prompt // config.max_num_batched_tokens + 2)
        if load.tokens:
            self._add("prompt", min(config.max_model_len - 1, 8 * load.tokens), 1)
            self._steps(3)
        self.executor.settle()
        self.step = self._bound_for({"T": load.tokens or load.batch, "R": load.rows})

    def _add(self, name: str, length: int, new: int) -> None:
        ids = [random.randrange(3, self._vocab) for _ in range(length)]
        params = SamplingParams(temperature=self._temperature, max_tokens=new, ignore_eos=True)
        self.engine.add(Request(name, ids, params))

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def _bound_for(self, sizes: dict[str, int]) -> Bound:
        """Return the first program that ran a step of these sizes, or of larger ones, as graphs exist for some sizes
        only.
        """
        for b in self.bound:
            ran = dict(zip(b.program.symbols, b.symbols.tolist()))
            if b.program.fits(sizes) and all(ran.get(s, n) >= n for s, n in sizes.items()):
                return b
        raise RuntimeError(f"no program ran a step of {sizes}: the model has too short a context for it")

    def env(self) -> dict[str, int]:
        return dict(zip(self.step.program.symbols, self.step.symbols.tolist()))

    def seconds(self, launches: Sequence[Launch]) -> float:
        """Return the seconds of one of these launches: the median over rounds of a program that cycles through them."""
        many = [launches[i % len(launches)] for i in range(max(len(launches), LAUNCHES))]
        return self._median(many) / len(many)

    def seconds_in_step(self, launches: Sequence[Launch]) -> float:
        """Return the seconds of one of these launches: the increase of the step's time if each of them runs twice.

        The step runs without its last launch, so that the requests do not advance.
        """
        places = {id(x) for x in launches}
        step = [x for x in self.step.program.launches if x.op != "row_finish"]
        doubled = [x for each in step for x in [each] * (2 if id(each) in places else 1)]
        return (self._median(doubled) - self._median(step)) / len(launches)

    def step_seconds(self) -> float:
        """Return the seconds of the whole step, replayed as a graph. The requests advance: call this last."""
        return self._median(self.step.program.launches)

    def seconds_without(self, launches: Sequence[Launch] = ()) -> float:
        """Return the seconds of the step without these launches, and without the last one, which advances requests."""
        left_out = {id(x) for x in launches}
        return self._median([x for x in self.step.program.launches[:-1] if id(x) not in left_out])

    def _median(self, launches: Sequence[Launch]) -> float:
        program = replace(self.step.program, launches=tuple(launches))
        run = self.bind(program, self.step.addresses, self.step.symbols)
        self.device.prepare(run)
        times = []
        for _ in range(ROUNDS + 1):
            begin = time.perf_counter()
            run()
            self.device.wait(self.device.mark())
            times.append(time.perf_counter() - begin)
        run.free()
        return statistics.median(times[1:])

    def close(self) -> None:
        self.executor.close()


def groups(program: Program) -> dict[tuple[str, str], list[Launch]]:
    """Return (kernel, place without layer numbers) -> its launches, in order."""
    launches: dict[tuple[str, str], list[Launch]] = {}
    for x in program.launches:
        place = ".".join(p for p in x.loc.split(".") if not p.isdigit())
        launches.setdefault((x.kernel, place), []).append(x)
    return launches


def kernel_rows(path: Path, shape: Shape, load: Load, roof: Roof) -> Iterator[Row]:
    """Return a row per group, one of their sum, and one of the whole step; a launch's floor is its roofline time.

    `in_step_us` of a group is what the step's time shrinks by without it: launches overlap, so this may be less than
    the time of the group alone. It is not measured for the first launch, whose tables the others read, for launches
    that choose experts, and for products of experts: the next launch may read the choice before its wait.
    """
    bench, suite = Bench(path, load), "mixed" if load.tokens else "kernels"
    try:
        env = bench.env()
        page = bench.executor.capacity.page_size
        program = bench.step.program
        apart = any(x.op.endswith("_single") for x in program.launches)
        groups_of = groups(program)
        alone = _seconds_alone(bench, groups_of)
        whole = bench.seconds_without()
        floor = 0.0
        seen: Counter[str] = Counter()
        for (kernel, place), launches in groups_of.items():
            each = alone[kernel, place]
            group_floor = sum(_floor(x, env, load.attended(x.op, apart), page, roof) for x in launches)
            if launches[0].op.endswith(EXPERTS):
                group_floor *= shape.chosen_share(load.tokens or load.batch)
            floor += group_floor
            x = launches[0]
            case = f"{load.name} {x.op} {place} x{len(launches)}"
            seen[case] += 1
            case += f", {seen[case]}" if seen[case] > 1 else ""  # two products at one place are two rows
            extra = {"each_us": each / len(launches) * 1e6, "kernel": kernel, "grid": [d(env) for d in x.grid]}
            if x is not program.launches[0] and x.op not in ROUTING and not x.op.endswith(EXPERTS):
                extra["in_step_us"] = (whole - bench.seconds_without(launches)) * 1e6
            yield Row(suite, shape.name, case, "us", each * 1e6, group_floor * 1e6, extra=extra)
        extra = {"launches": len(program.launches)}
        total = sum(alone.values())
        yield Row(suite, shape.name, f"{load.name} all", "us", total * 1e6, floor * 1e6, extra=extra)
        yield Row(suite, shape.name, f"{load.name} step", "us", bench.step_seconds() * 1e6, floor * 1e6, extra=extra)
    finally:
        bench.close()


def _seconds_alone(bench: Bench, groups_of: Mapping[tuple[str, str], list[Launch]]) -> dict[tuple[str, str], float]:
    """Measure each group; those of experts last, since a step overwrites the tables of its first launch."""
    experts = {key: launches for key, launches in groups_of.items() if launches[0].op.endswith(EXPERTS)}
    alone = {key: bench.seconds(x) * len(x) for key, x in groups_of.items() if key not in experts}
    return alone | {key: bench.seconds_in_step(x) * len(x) for key, x in experts.items()}


def _floor(x: Launch, env: dict[str, int], attended: tuple[float, int], page: int, roof: Roof) -> float:
    """Return the floor in seconds. Attention costs as much as the keys that its queries read, not as the whole pool."""
    flops = x.flops(env) if x.flops is not None else 0
    moved = x.bytes(env) if x.bytes is not None else 0
    if x.op.startswith("paged_attention") and x.flops is not None and x.bytes is not None:
        pairs, context = attended
        flops = round(x.flops(dict.fromkeys(env, 1)) / page * pairs)
        moved = x.bytes(env | {"P": -(-context // page)})
    return floors.launch_seconds(flops, moved, roof)
