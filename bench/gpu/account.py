"""The kernels of whole steps on one GPU, as CUPTI records them through torch's profiler while an LLM runs.

    python -m bench.gpu.account FILE [--artifact DIR]      print a table of a file that `save` wrote

With an artifact, kernels are named by the op and the place of the launch. With ranks, only rank 0 is recorded, which
slows it down: what the table shows as collectives includes waiting for other ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from llmc_runtime.format.program import Program


class Kernel(NamedTuple):
    """A kernel that ran: its name, when it began, its duration (both in ns), and the launch call it belongs to."""

    name: str
    begin: int
    duration: int
    call: int


def recorded(work: Callable[[], object]) -> list[Kernel]:
    """Return the kernels that ran during `work` in this process, in the order in which they began."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    kernels = [
        Kernel(e.name(), e.start_ns(), e.duration_ns(), e.correlation_id())
        for e in profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        if e.device_type().name == "CUDA" and not e.name().startswith(("Memcpy", "Memset"))
    ]
    return sorted(kernels, key=lambda kernel: kernel.begin)


def steps_of(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Return the kernels of each graph that was launched as a whole; single launches are no steps."""
    by_call: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        by_call.setdefault(kernel.call, []).append(kernel)
    return [some for some in by_call.values() if len(some) > 1]


def save(path: Path, kernels: Sequence[Kernel]) -> None:
    """Write the kernels as JSON, with times since the first one began."""
    names = sorted({kernel.name for kernel in kernels})
    first = kernels[0].begin if kernels else 0
    rows = [[names.index(k.name), k.begin - first, k.duration, k.call] for k in kernels]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"names": names, "kernels": rows}))


def load(path: Path) -> list[Kernel]:
    """Read what `save` wrote."""
    data = json.loads(path.read_text())
    return [Kernel(data["names"][name], *rest) for name, *rest in data["kernels"]]


def places(programs: Sequence[Program], kernels: Sequence[Kernel]) -> list[str]:
    """Return the op and the place, without layer numbers, of each kernel of a step; names if no program has as many
    launches with these entries."""
    entries = [kernel.name for kernel in kernels]
    for program in programs:
        if [launch.entry for launch in program.launches] == entries:
            return [f"{x.op} {'.'.join(p for p in x.loc.split('.') if not p.isdigit())}" for x in program.launches]
    return entries


def table(steps: Sequence[Sequence[Kernel]], labels: Sequence[str]) -> list[tuple[str, int, float, float]]:
    """Return label, launches in a step, microseconds of a step from the end of the kernel before (or the beginning, if
    that is later) to the end of this one, and microseconds of a step from begin to end; medians over the steps."""
    alone: dict[str, list[list[float]]] = {label: [] for label in labels}
    whole: dict[str, list[list[float]]] = {label: [] for label in labels}
    for step in steps:
        for store in (alone, whole):
            for label in store:
                store[label].append([])
        before = step[0].begin
        for kernel, label in zip(step, labels, strict=True):
            end = kernel.begin + kernel.duration
            alone[label][-1].append(max(0, end - before) / 1e3)
            whole[label][-1].append(kernel.duration / 1e3)
            before = max(before, end)
    return [
        (
            label, len(alone[label][0]), statistics.median(map(sum, alone[label])),
            statistics.median(map(sum, whole[label])),
        )
        for label in alone
    ]  # fmt: skip


def show(path: Path, artifact: Path | None) -> None:
    """Print the table of the steps with the most common number of kernels, or of all single launches together."""
    kernels = load(path)
    steps = steps_of(kernels) or [kernels]
    common = statistics.mode(len(step) for step in steps)
    compared = [step for step in steps if len(step) == common][1:] or steps[:1]
    programs: Sequence[Program] = ()
    if artifact is not None:
        from llmc_runtime.artifact import open_artifact

        programs = open_artifact(artifact, verify=False).programs
    rows = table(compared, places(programs, compared[0]))
    print(f"{path.name}: {len(compared)} steps of {common} kernels; us a step: in sequence, from begin to end, each")
    for label, count, alone, whole in sorted(rows, key=lambda row: -row[2]):
        print(f"{alone:9.1f} {whole:9.1f} {alone / count:8.2f} x{count:<4} {label}")
    print(f"{sum(row[2] for row in rows):9.1f} all")


def main(argv: list[str]) -> None:
    ap = argparse.ArgumentParser(prog="python -m bench.gpu.account", description=(__doc__ or "").splitlines()[0])
    ap.add_argument("file", type=Path, nargs="+")
    ap.add_argument("--artifact", type=Path, metavar="DIR", help="artifact that ran, to name launches")
    args = ap.parse_args(argv)
    for path in args.file:
        show(path, args.artifact)


if __name__ == "__main__":
    main(sys.argv[1:])
