"""Compare the best measured schedules of each product and of attention within a whole decode step.

    python -m bench.gpu.in_step RECORD -o FILE [--models A,B] [--batches 1,8,32] [--ways 4] [--compile-only]

`llmc tune` times a kernel among copies of itself. In a step, another schedule may be faster, because launches overlap.
Every model is compiled once per rank (the k-th artifact has the k-th best schedule of every node; no GPU needed). Then
the step's program is run with one group of launches exchanged at a time, keeping the best of each group, in two passes
over all groups. FILE gets RECORD with a time for each compared schedule: that of the node's best one alone, plus the
increase of the step's time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from llmc_runtime.artifact import open_artifact
from llmc_runtime.format.program import Launch, Program

from bench import shapes
from bench.gpu.kernels import Bench, Load
from bench.gpu.make import with_weights
from bench.gpu.plan import Plan, parser, plan_of
from bench.shapes import Shape
from llmc.codegen.backends.cuda.fragment_product import NORMED_PACKED, PACKED
from llmc.codegen.candidates import typical
from llmc.codegen.tuning_records import Record, Sizes, node_text, read, save, sizes_of
from llmc.extension import load
from llmc.ir.graph import Graph, Module, Node
from llmc.measure.tune import before_select

OPS = (
    "linear", "linear_map", "norm_linear", "block_scaled_linear", "quantized_linear", "norm_quantized_linear",
    "paged_attention", "paged_attention_single", "paged_attention_split",
)  # fmt: skip
# Ops of launches whose weights are packed when a kernel is selected, and those of the nodes that were measured.
LAUNCHED: Mapping[str, str] = MappingProxyType({PACKED: "quantized_linear", NORMED_PACKED: "norm_quantized_linear"})
SWEEPS, ROUNDS, RUNS = 2, 7, 8
Key = tuple[str, Sizes]


def ranked(records: Sequence[Record]) -> dict[Key, list[Record]]:
    """Return the schedules of every compared node, fastest first."""
    records_of: dict[Key, list[Record]] = {}
    for r in records:
        if r.node.partition("(")[0] in OPS:
            records_of.setdefault((r.node, r.sizes), []).append(r)
    return {key: sorted(of_node, key=lambda r: r.us) for key, of_node in records_of.items()}


def promoted(records: Sequence[Record], k: int) -> list[Record]:
    """Return the records with the k-th best schedule of every node made its best."""
    first = {of_node[k].key: of_node[0].us / 2 for of_node in ranked(records).values() if k < len(of_node)}
    return [replace(r, us=first.get(r.key, r.us)) for r in records]


def artifacts(plan: Plan, shape: Shape, record: Path, ways: int) -> list[Path]:
    """Return one artifact per schedule, compiling it if it is missing."""
    paths = []
    for k in range(ways):
        path = plan.artifacts / f"way-{k}" / f"{shape.name}.llmc"
        if not (path / "manifest.json").is_file():
            tuning = plan.artifacts / f"way-{k}.jsonl"
            tuning.parent.mkdir(parents=True, exist_ok=True)
            tuning.unlink(missing_ok=True)
            save(tuning, promoted(read(record), k))
            with_weights(plan, shapes.folder(shape, plan.artifacts), path, "random:1", shape, tuning)
        paths.append(path)
    return paths


@dataclass(frozen=True)
class Group:
    """Launches of one node text in a step: their positions in the program."""

    key: Key
    places: tuple[int, ...]


def groups(m: Module, g: Graph, program: Program) -> list[Group]:
    """Return the groups of a program; nodes and launches of one op at one place of the model are in the same order."""
    nodes: dict[tuple[str, str], list[Node]] = {}
    for n in g.nodes:
        nodes.setdefault((n.op.name, n.loc), []).append(n)
    places_of: dict[Key, list[int]] = {}
    env = typical(m, g)
    for i, x in enumerate(program.launches):
        if (op := LAUNCHED.get(x.op, x.op)) in OPS:
            n = nodes[op, x.loc].pop(0)
            places_of.setdefault((node_text(n), sizes_of(n, env)), []).append(i)
    return [Group(key, tuple(places)) for key, places in places_of.items()]


class Steps:
    """The decode step of `batch` rows with every schedule, on one device with requests in progress."""

    def __init__(self, paths: Sequence[Path], batch: int) -> None:
        self.bench = Bench(paths[0], Load(batch))
        base = self.bench.step.program
        self.programs = [base]
        for path in paths[1:]:
            artifact = open_artifact(path, verify=False)
            other = next(p for p in artifact.programs if p.name == base.name)
            assert [(x.op, x.args) for x in other.launches] == [(x.op, x.args) for x in base.launches], path
            self.bench.device.load(artifact)
            self.programs.append(other)

    def us(self, launches: Sequence[Launch]) -> float:
        """Return the median microseconds of a run without its last launch, so that the requests do not advance."""
        program = replace(self.bench.step.program, launches=tuple(x for x in launches if x.op != "row_finish"))
        run = self.bench.bind(program, self.bench.step.addresses, self.bench.step.symbols)
        self.bench.device.prepare(run)
        times = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            for _ in range(RUNS):
                run()
            self.bench.device.wait(self.bench.device.mark())
            times.append((time.perf_counter() - begin) / RUNS * 1e6)
        run.free()
        return statistics.median(times[1:])

    def compare(self, groups: Sequence[Group]) -> Iterator[tuple[Group, dict[int, float]]]:
        """Return, for each group and schedule, the whole step's microseconds with every other group at its best."""
        now = list(self.programs[0].launches)
        for sweep in range(SWEEPS):
            for group in groups:
                kernels = {p.launches[group.places[0]].kernel: k for k, p in reversed(list(enumerate(self.programs)))}
                times = {k: self.us(_exchanged(now, self.programs[k], group)) for k in sorted(kernels.values())}
                now = _exchanged(now, self.programs[min(times, key=times.__getitem__)], group)
                if sweep == SWEEPS - 1:
                    yield group, times


def _exchanged(now: Sequence[Launch], by: Program, group: Group) -> list[Launch]:
    out = list(now)
    for i in group.places:
        out[i] = by.launches[i]
    return out


def adjusted(group: Group, times: Mapping[int, float], ways: Mapping[Key, Sequence[Record]]) -> list[Record]:
    """Return the records of the schedules that were compared."""
    of_node = ways.get(group.key, ())
    fastest = min(times.values())
    return [
        replace(of_node[k], us=float(f"{of_node[0].us + (us - fastest) / len(group.places):.4g}"))
        for k, us in times.items()
        if k < len(of_node)
    ]


def run(plan: Plan, record: Path, out: Path, ways: int) -> None:
    """Measure every model and batch; the output is written after each."""
    records = read(record)
    rank = ranked(records)
    save(out, records)
    for shape in plan.models:
        paths = artifacts(plan, shape, record, ways)
        m, _, _ = before_select(paths[0], load())
        for batch in plan.batches:
            steps = Steps(paths, batch)
            program = steps.programs[0]
            print(f"{shape.name}, {batch} rows: {steps.us(program.launches):.1f} us with the best alone", flush=True)
            for group, times in steps.compare(groups(m, m.graphs[program.name], program)):
                shown = ", ".join(f"{us:.1f} ({k})" for k, us in sorted(times.items(), key=lambda x: x[1]))
                print(f"  x{len(group.places)} {group.key[0][:90]}: {shown}", flush=True)
                save(out, adjusted(group, times, rank))
            steps.bench.close()


def main(argv: list[str]) -> None:
    ap = argparse.ArgumentParser(prog="python -m bench.gpu.in_step", description=__doc__.split("\n")[0])
    ap.add_argument("record", type=Path, help="tuning file whose schedules are compared")
    ap.add_argument("-o", "--output", type=Path, required=True)
    ap.add_argument("--ways", type=int, default=4)
    a, rest = ap.parse_known_args(argv)
    options = parser().parse_args(rest)
    plan = plan_of(options)
    if options.compile_only:
        for shape in plan.models:
            artifacts(plan, shape, a.record, a.ways)
    else:
        run(plan, a.record, a.output, a.ways)


if __name__ == "__main__":
    main(sys.argv[1:])
