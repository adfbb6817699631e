"""`llmc tune --compare`: compares the times of kernels on this machine.

It compares the best schedules of the named kernels with those of the other kernels, for all nodes of a model that the
named ones can run; or the launches that two artifacts do not share, such as a fused op and the ops that it replaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from llmc_runtime.format.folder import Folder

from llmc.codegen.candidates import typical
from llmc.codegen.kernel import schedule_text
from llmc.codegen.scratch_dir import scratch
from llmc.codegen.tuning_records import Sizes, node_text, sizes_of
from llmc.diagnostics import Diagnostic
from llmc.extension import Registry, load
from llmc.ir.graph import Graph, Module, Node
from llmc.ir.text import parse_file
from llmc.measure.timing import Timer, Trial, unknown_operand
from llmc.measure.tune import (
    Settings,
    Tuned,
    Work,
    batches,
    before_select,
    check_names,
    compiled_artifact,
    times_of,
    tuning_work,
)
from llmc.passes.analysis import launched_nodes

# What identifies a launch: its node, sizes, kernel and schedule.
Key: TypeAlias = tuple[str, Sizes, str, str]


@dataclass(frozen=True)
class Launch:
    """A node of a graph with the kernel that runs it, and how many launches of the graph are equal."""

    key: Key
    candidate: Trial
    count: int


def _row(trial: Trial, count: int, us: float | None) -> dict[str, Any]:
    """Return equal launches as data; `us` is the time of one, None if it could not be measured."""
    node, schedule = node_text(trial.node), schedule_text(trial.schedule)
    return {"count": count, "us": us, "kernel": trial.kernel.name, "schedule": schedule, "node": node}


def compare_kernels(source: Path, kernels: Sequence[str], settings: Settings, options: Any = None) -> list[Any]:
    """Measure every node that `kernels` can run, with them and with the most promising schedules of the other kernels.

    Return the comparisons as data (see `render`), the slowest first. Raises the errors of `tune`.
    """
    registry, tuned = load(), Tuned("")
    check_names(kernels, registry)
    with scratch() as folder:
        path = compiled_artifact(source, folder, options, settings, registry)
        m, target, page = before_select(path, registry, settings.target)
        timer = settings.timer(target, registry, folder, page)
        work = tuning_work(m, registry, target, tuned, True, kernels)
        if not work:
            cause = f"no node can be run by {', '.join(kernels)} on {target.name}"
            raise Diagnostic("E433", cause, "name kernels of the target")
        settings.progress(f"measuring {len(work)} nodes with {sum(len(w.candidates) for w in work)} candidates")
        rows = [_node_row(w, times, kernels) for batch in batches(work) for w, times in _timed(batch, timer, m, tuned)]
    _report(tuned, settings)
    return sorted(rows, key=lambda r: -(r["mine_us"] or 0))


def _timed(batch: Sequence[Work], timer: Timer, m: Module, tuned: Tuned) -> Iterator[tuple[Work, list[float | None]]]:
    """Yield each node with the times of its candidates."""
    times = iter(times_of(timer, [trial for w in batch for trial in w.trials], m, tuned))
    for w in batch:
        yield w, [next(times) for _ in w.candidates]


def _node_row(w: Work, times: Sequence[float | None], kernels: Sequence[str]) -> dict[str, Any]:
    """Compare the best schedule of `kernels` for a node with the best one of the others."""
    sides: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])  # rows of the other kernels, and of `kernels`
    for trial, us in zip(w.trials, times, strict=True):
        if us is not None:
            sides[trial.kernel.name in kernels].append(_row(trial, w.launches, us))
    other, mine = ([min(rows, key=lambda row: row["us"])] if rows else [] for rows in sides)
    return _comparison(w.graph.name, dict(sizes_of(w.node, w.env)), mine, other)


@dataclass(frozen=True)
class _Side:
    """One of two compared artifacts: its module after `select`, and its launches, graph -> key -> launch."""

    path: Path
    module: Module
    launches: Mapping[str, Mapping[Key, Launch]]

    def missing_in(self, other: _Side, graph: str) -> list[Launch]:
        """Return the launches of a graph that the other artifact lacks, or has fewer of."""
        return _only(self.launches.get(graph, {}), other.launches.get(graph, {}))


def compare_artifacts(mine: Path, other: Path, settings: Settings) -> list[Any]:
    """Measure the launches that two artifacts of one target do not share, graph by graph.

    Return the comparisons as data (see `render`). Raises LlmcError E101 to E104, Diagnostic E433 for artifacts of
    different targets or without the text of the pass `select`, and the errors of compiling and measuring.
    """
    registry, tuned = load(), Tuned("")
    my_manifest, other_manifest = Folder(mine).manifest(), Folder(other).manifest()
    name = my_manifest.target.name
    if name != other_manifest.target.name:
        cause = f"{mine} was compiled for {name}, {other} for {other_manifest.target.name}"
        raise Diagnostic("E433", cause, "compare artifacts of one target")
    target = registry.target(name)
    sides = (_side(mine, registry), _side(other, registry))
    with scratch() as folder:
        timer = settings.timer(target, registry, folder, my_manifest.kv.page_size)
        graphs = dict.fromkeys([*sides[0].launches, *sides[1].launches])
        compared = [_compared(graph, *sides, timer, settings, tuned) for graph in graphs]
    _report(tuned, settings)
    return [comparison for comparison in compared if comparison is not None]


def _compared(
    graph: str, mine: _Side, other: _Side, timer: Timer, settings: Settings, tuned: Tuned
) -> dict[str, Any] | None:
    """Measure the launches of a graph that the sides do not share; None if there are none."""
    my_launches, other_launches = mine.missing_in(other, graph), other.missing_in(mine, graph)
    if not my_launches and not other_launches:
        return None
    settings.progress(
        f"@{graph}: measuring {len(my_launches)} launches of {mine.path}, {len(other_launches)} of {other.path}"
    )
    rows = []
    for side, launches in ((mine, my_launches), (other, other_launches)):
        times = _times(launches, timer, side.module, tuned)
        rows.append([_row(x.candidate, x.count, us) for x, us in zip(launches, times, strict=True)])
    sizes = (my_launches or other_launches)[0].candidate.env
    return _comparison(graph, {symbol: size for symbol, size in sizes.items() if symbol != "P"}, *rows)


def _side(path: Path, registry: Registry) -> _Side:
    """Read an artifact's text after `select`. Raises Diagnostic E433 if it has none."""
    stage = next((p for p in sorted((path / "ir").glob("*.llir")) if p.stem.partition("-")[2] == "select"), None)
    if stage is None:
        raise Diagnostic("E433", f"{path} has no text of the pass `select`", "compile it again")
    m = parse_file(stage, registry.opset())
    return _Side(path, m, {g.name: _launches(g, m, registry) for g in m.launched})


def _launches(g: Graph, m: Module, registry: Registry) -> dict[Key, Launch]:
    """Return the launches of a graph; equal ones are counted."""
    counts, first = Counter[Key](), dict[Key, Trial]()
    for n in launched_nodes(g):
        if not n.choice:
            continue
        env = typical(m, g, n)
        kernel, schedule = _choice(n, registry)
        key = (node_text(n), sizes_of(n, env), kernel.name, schedule_text(schedule))
        counts[key] += 1
        first.setdefault(key, Trial(n, g, env, kernel, schedule))
    return {key: Launch(key, first[key], count) for key, count in counts.items()}


def _choice(n: Node, registry: Registry) -> tuple[Any, dict[str, Any]]:
    """Return the kernel and schedule of a node. Raises Diagnostic E433 if the kernel's package is not installed."""
    schedule = dict(n.choice)
    name = schedule.pop("kernel")
    if name not in registry.kernels:
        raise Diagnostic("E433", f"the kernel {name!r} is not installed", "install the package that it is from")
    return registry.kernels[name], schedule


def _only(mine: Mapping[Key, Launch], other: Mapping[Key, Launch]) -> list[Launch]:
    """Return the launches of `mine` that `other` lacks, or has fewer of."""
    out = []
    for key, x in mine.items():
        count = x.count - (other[key].count if key in other else 0)
        if count > 0:
            out.append(Launch(key, x.candidate, count))
    return out


def _times(launches: Sequence[Launch], timer: Timer, m: Module, tuned: Tuned) -> list[float | None]:
    """Return the microseconds of each launch; None for ops whose operands cannot be drawn."""
    drawn = [x for x in launches if unknown_operand(x.candidate.node) is None]
    times = dict(zip([x.key for x in drawn], times_of(timer, [x.candidate for x in drawn], m, tuned), strict=True))
    for x in launches:
        if x.key not in times:
            tuned.skipped.append(f"{x.key[0]}: `holds` does not declare {unknown_operand(x.candidate.node)!r}")
    return [times.get(x.key) for x in launches]


def _comparison(graph: str, sizes: Mapping[str, int], mine: list[Any], other: list[Any]) -> dict[str, Any]:
    """Return one comparison as data; a sum is None if it is empty or a launch of it was not measured."""
    sums = [_sum(side) for side in (mine, other)]
    speedup = sums[1] / sums[0] if sums[0] and sums[1] else None
    return {
        "graph": graph, "sizes": dict(sizes), "mine": mine, "other": other, "mine_us": sums[0], "other_us": sums[1],
        "speedup": speedup,
    }  # fmt: skip


def _sum(side: Sequence[Mapping[str, Any]]) -> float | None:
    times = [row["us"] for row in side]
    return None if not times or None in times else sum(row["count"] * row["us"] for row in side)


def _report(tuned: Tuned, settings: Settings) -> None:
    for line in [*(f"not measured: {s}" for s in tuned.skipped), *(f"failed: {f}" for f in tuned.failed)]:
        settings.progress(line)


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format comparisons as text: each graph or node with its speedup, then the launches of both sides.

    speedup: the other launches' time divided by that of mine; greater than 1 means that mine are faster.
    """
    if not rows:
        return "no launch differs"
    out = []
    for r in rows:
        sizes = " ".join(f"{k}={v}" for k, v in r["sizes"].items())
        sums = [f"{side} {_us(r[f'{side}_us']) if r[side] else 'none'}" for side in ("mine", "other")]
        verdict = "" if r["speedup"] is None else f": {r['speedup']:.2f} times as fast"
        out.append(f"@{r['graph']} {sizes}: {', '.join(sums)}{verdict}")
        for name in ("mine", "other"):
            for x in r[name]:
                times = f"{x['count']:4d} x {_us(x['us']):>12s}"
                out.append(f"  {name:5s} {times}  {x['kernel']} {x['schedule']}  {x['node']}")
    return "\n".join(line.rstrip() for line in out)


def _us(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g} us"
