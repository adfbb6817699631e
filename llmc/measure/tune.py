"""`llmc tune`: measures the schedules that kernels offer for a model's nodes, and stores the times.

Nodes are ordered by their potential gain, estimated as number of launches times roofline time, because a time limit
ends the work. Every batch is saved as soon as it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.nearest import did_you_mean

from llmc.codegen.candidates import Candidate, typical
from llmc.codegen.candidates import candidates as node_candidates
from llmc.codegen.kernel import roofline_us
from llmc.codegen.scratch_dir import scratch
from llmc.codegen.tuning_records import Record, Sizes, Tuning, machine, node_text, read, record, save, sizes_of
from llmc.diagnostics import Diagnostic
from llmc.extension import Registry, load
from llmc.ir.graph import Graph, Module, Node
from llmc.ir.ops.comm import COLLECTIVES
from llmc.ir.text import parse_file
from llmc.measure.timing import Timer, Trial, unknown_operand
from llmc.passes.analysis import launched_nodes
from llmc.targets.target import Target

BATCH_CANDIDATES = 96  # candidates compiled together
ERRORS_OF_ONE_KERNEL = ("E502", "E503")  # environment errors that a single kernel may cause
MAX_SCHEDULES = 32  # maximum schedules per node, the most promising first
MAX_RIVALS = 4  # maximum schedules of other kernels to measure for comparison with named kernels


@dataclass(frozen=True)
class Work:
    """A node with its candidates (kernels and schedules, most promising first) and its number of launches."""

    node: Node
    graph: Graph
    env: Mapping[str, int]
    launches: int
    floor_us: float
    candidates: tuple[Candidate, ...]

    @property
    def trials(self) -> list[Trial]:
        """The candidates, to be timed."""
        return [Trial(self.node, self.graph, self.env, c.kernel, c.schedule) for c in self.candidates]


@dataclass
class Tuned:
    """The outcome of a tuning run: counts of nodes and measurements, failures, and nodes not reached in time."""

    output: str
    nodes: int = 0
    measured: int = 0
    unreached: int = 0
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the summary as text."""
        lines = [f"{self.measured} measurements of {self.nodes} nodes in {self.seconds:.0f} s: {self.output}"]
        lines += [f"{self.unreached} nodes were not reached; a larger --limit measures them"] if self.unreached else []
        lines += [f"not measured: {s}" for s in self.skipped]
        return "\n".join([*lines, *(f"failed: {f}" for f in self.failed)])


@dataclass(frozen=True)
class Settings:
    """Settings of a tuning run.

    limit: seconds after which no new batch starts. context: tokens that each row has in the KV cache. every: also time
    nodes with a single candidate. target: the artifact's expected target, if any. cache: folder for kernels. jobs:
    parallel compilations. progress: called with a line per batch. kernels: measure only these (and a few others if
    none is measured yet); empty for all. sustained: seconds for which each candidate runs without pauses; 0: bursts.
    """

    limit: float = 600.0
    context: int = 1024
    every: bool = False
    target: str = ""
    cache: Path | None = None
    jobs: int | None = None
    progress: Callable[[str], None] = print
    kernels: tuple[str, ...] = ()
    sustained: float = 0.0

    def timer(self, target: Target, registry: Registry, folder: Path, page: int) -> Timer:
        """Return a Timer that caches kernels in `cache`, or else in `folder`; raises LlmcError without the device."""
        timer = Timer(
            target, registry, (self.cache or folder) / "kernels", jobs=self.jobs, context=self.context, page=page,
            sustained_seconds=self.sustained,
        )  # fmt: skip
        timer.check_device()
        return timer


def tune(source: Path, output: Path, settings: Settings, options: Any = None) -> Tuned:
    """Measure the nodes of an artifact, or of a Hugging Face folder compiled with `options`, into the file `output`.

    Raises LlmcError E101 to E104, Diagnostic E433 if there is nothing to measure, E5xx like a compile, and E110 and
    E115 to E117 if this machine lacks the target's device.
    """
    known = load()
    check_names(settings.kernels, known)
    with scratch() as folder:
        path = compiled_artifact(source, folder, options, settings, known)
        m, target, page = before_select(path, known, settings.target)
        timer = settings.timer(target, known, folder, page)
        tuned = Tuned(str(output))
        measured = Tuning.load(output) if output.exists() else Tuning()
        work = tuning_work(m, known, target, tuned, settings.every, settings.kernels, measured)
        if settings.kernels and not work:
            cause = f"no node with several candidates can be run by {', '.join(settings.kernels)} on {target.name}"
            raise Diagnostic("E433", cause, "name kernels of the target, or leave --kernels out")
        if not work:
            cause = f"every node of {source} has a single candidate on {target.name}, so there is nothing to choose"
            raise Diagnostic("E433", cause, "add --all to measure them, or leave the artifact as it is")
        settings.progress(f"measuring {len(work)} nodes with {sum(len(w.candidates) for w in work)} candidates")
        _measure(work, m, timer, output, settings, tuned)
    return tuned


def check_names(kernels: Sequence[str], registry: Registry) -> None:
    """Raise Diagnostic E433 if a name is not that of a kernel."""
    if unknown := next((k for k in kernels if k not in registry.kernels), None):
        remedy = did_you_mean(unknown, registry.kernels, f"one of: {', '.join(registry.kernels)}")
        raise Diagnostic("E433", f"there is no kernel {unknown!r}", remedy)


def before_select(path: Path, registry: Registry, target: str = "") -> tuple[Module, Target, int]:
    """Return an artifact's module as it was before kernel selection, its target, and the tokens per KV page."""
    manifest = Folder(path).manifest()
    name = manifest.target.name
    if target and target.partition("+")[0] != name.partition("+")[0]:
        remedy = f"leave --target out, or compile for {target}"
        raise Diagnostic("E433", f"{path} was compiled for {name}, not for {target}", remedy)
    stages = sorted((path / "ir").glob("*.llir"))
    at = next((i for i, p in enumerate(stages) if p.stem.partition("-")[2] == "select"), 0)
    if not at:
        raise Diagnostic("E433", f"{path} has no text from before the pass `select`", "compile it again")
    m = parse_file(stages[at - 1], registry.opset())
    return m, registry.target(name), manifest.kv.page_size


def tuning_work(
    m: Module,
    registry: Registry,
    target: Target,
    tuned: Tuned,
    every: bool = False,
    kernels: Sequence[str] = (),
    measured: Tuning | None = None,
) -> list[Work]:
    """Return the distinct nodes with several candidates (or all nodes), by decreasing potential gain.

    If `kernels` are named, only nodes they can run are returned, with their schedules and those of other kernels that
    `measured`, the measurements so far, lacks for comparison.
    """
    measurements = (measured or Tuning()).records
    distinct: dict[tuple[str, Sizes], Work] = {}
    for g, n in [(graph, node) for graph in m.launched for node in launched_nodes(graph)]:
        env = typical(m, g, n)
        text, sizes = key = (node_text(n), sizes_of(n, env))
        if key in distinct:
            distinct[key] = replace(distinct[key], launches=distinct[key].launches + 1)
            continue
        offered = node_candidates(n, registry.kernels, target, env, Tuning(), kernels)
        candidates = offered if every or len(offered) > 1 else []
        if kernels:
            known = measurements.get((machine(target), text), {}).get(sizes, {})  # by kernel and schedule
            candidates = _named(candidates, kernels, {kernel for kernel, _ in known})
        distinct[key] = Work(n, g, env, 1, roofline_us(n, target, env), tuple(candidates[:MAX_SCHEDULES]))
    measurable = _measurable([w for w in distinct.values() if w.candidates], tuned)
    return sorted(measurable, key=lambda w: -w.launches * w.floor_us)


def _measurable(work: Sequence[Work], tuned: Tuned) -> list[Work]:
    """Return the work whose nodes can be timed; the reasons of the others are added to `tuned.skipped`, each once."""
    measurable = []
    for w in work:
        if why := _why_not(w.node):
            reason = f"{w.node.op.name}: {why}"
            if reason not in tuned.skipped:
                tuned.skipped.append(reason)
        else:
            measurable.append(w)
    return measurable


def _why_not(n: Node) -> str | None:
    """Return why a node cannot be timed by itself, or None."""
    if n.op.name in COLLECTIVES:
        return "it needs all ranks, and a single process measures"
    name = unknown_operand(n)
    return f"`holds` does not declare the operand {name!r}" if name else None


def _named(offered: Sequence[Candidate], kernels: Sequence[str], measured: set[str]) -> list[Candidate]:
    """Return the schedules of the named kernels, with a few of other kernels if none of those is measured yet.

    Without a measured alternative, a named kernel would be selected however slow it is.
    """
    named = [o for o in offered if o.kernel.name in kernels]
    others = [o for o in offered if o.kernel.name not in kernels]
    rivals = others[:MAX_RIVALS] if named and not measured - set(kernels) else []
    return sorted([*named, *rivals], key=lambda o: o.us)


def batches(work: Sequence[Work]) -> Iterator[list[Work]]:
    """Group nodes into batches of candidates; the candidates of one node stay together."""
    batch: list[Work] = []
    for w in work:
        if batch and sum(len(x.candidates) for x in batch) + len(w.candidates) > BATCH_CANDIDATES:
            yield batch
            batch = []
        batch.append(w)
    if batch:
        yield batch


def _measure(work: Sequence[Work], m: Module, timer: Timer, output: Path, settings: Settings, tuned: Tuned) -> None:
    """Measure and save batch by batch until the time limit."""
    begin = time.monotonic()
    save(output, [])  # report an unwritable file before the work
    for batch in batches(work):
        if time.monotonic() - begin >= settings.limit:
            tuned.unreached += len(batch)
            continue
        candidates = [trial for w in batch for trial in w.trials]
        times = times_of(timer, candidates, m, tuned)
        records = [
            record(c.node, c.kernel.name, c.schedule, timer.target, us, c.env)
            for c, us in zip(candidates, times, strict=True)
            if us is not None
        ]
        save(output, records)
        tuned.nodes, tuned.measured = tuned.nodes + len(batch), tuned.measured + len(records)
        tuned.seconds = time.monotonic() - begin
        settings.progress(
            f"[{tuned.seconds:6.1f} s] {tuned.measured} measurements of {tuned.nodes} of {len(work)} nodes"
        )


def times_of(timer: Timer, candidates: Sequence[Trial], m: Module, tuned: Tuned) -> list[float | None]:
    """Return the microseconds of each candidate. A failing batch is halved until the failing candidates are isolated.

    Raises LlmcError if the machine is the cause, since all other candidates would fail, too.
    """
    try:
        return list(timer.microseconds(candidates, m.symbols))
    except LlmcError as e:
        if e.of_environment and e.code not in ERRORS_OF_ONE_KERNEL:
            raise
        if len(candidates) == 1:
            c = candidates[0]
            tuned.failed.append(f"{c.kernel.name} {c.schedule} for {node_text(c.node)}: {e.cause[:200]}")
            return [None]
    half = len(candidates) // 2
    return [*times_of(timer, candidates[:half], m, tuned), *times_of(timer, candidates[half:], m, tuned)]


def compiled_artifact(model: Path, scratch: Path, options: Any, settings: Settings, registry: Registry) -> Path:
    """Return `model` if it is an artifact; else compile it without weights into the folder `scratch`.

    The model is not opened if this machine lacks the target's device (LlmcError E110, E115 to E117).
    """
    if (model / "manifest.json").is_file():
        return model
    from llmc.driver import compile_model
    from llmc.options import Options

    settled = replace(options or Options(), weights="none", reuse=False)
    target = registry.target(settled.target)
    Timer(target, registry, scratch, jobs=1, context=1, page=target.page_size).check_device()
    settings.progress(f"compiling {model} without weights (imports torch and transformers)")
    out = scratch / "model.llmc"
    compile_model(str(model), out, settled)
    return out


def choices(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the fastest candidate of every node at every size, and the time of the second fastest."""
    groups: dict[tuple[str, str, Sizes], list[Record]] = {}
    for r in records:
        groups.setdefault((r.target, r.node, r.sizes), []).append(r)
    out = []
    for (target, node, sizes), measured in groups.items():
        best, *rest = sorted(measured, key=lambda r: r.us)
        out.append(
            {
                "target": target, "node": node, "sizes": dict(sizes), "kernel": best.kernel,
                "schedule": best.schedule, "us": best.us, "next_us": rest[0].us if rest else None,
                "measured": len(measured),
            }
        )  # fmt: skip
    return out


def show(path: Path) -> list[dict[str, Any]]:
    """Return the choices of a tuning file."""
    return choices(read(path))


def render(chosen: Sequence[Mapping[str, Any]]) -> str:
    """Format choices as a table, in the file's order."""
    head = ("sizes", "us", "next", "of", "kernel", "schedule", "node")
    rows = [head]
    for choice in chosen:
        sizes = " ".join(f"{symbol}={size}" for symbol, size in choice["sizes"].items()) or "-"
        us = f"{choice['us']:.4g}"
        after = "" if choice["next_us"] is None else f"{choice['next_us']:.4g}"
        texts = (choice["kernel"], choice["schedule"], choice["node"])
        rows.append((sizes, us, after, str(choice["measured"]), *texts))
    widths = [max(map(len, column)) for column in zip(*rows)]
    widths[-1] = 0  # nothing follows the last column
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows)
