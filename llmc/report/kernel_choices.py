"""The kernels of an artifact and the decisions of the pass `select`, as data for the report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmc_runtime.format.manifest import KernelFile
from llmc_runtime.format.program import Program

from llmc.artifact.cost_report import predict
from llmc.passes.pass_report import pattern
from llmc.report.formatting import count_noun, sizes_text
from llmc.report.open_artifact import Opened

_HEAD = re.compile(r"(?://|#) (\S+): (\w+)\(")  # the first line of a kernel's source


def kernels(a: Opened, predictions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all kernels, the largest predicted time of all launches first; kernels without launches come last."""
    times: Counter[tuple[str, str]] = Counter()  # predicted microseconds of (program, kernel)
    for name, prediction in predictions.get("programs", {}).items():
        for x in prediction["launches"]:
            times[name, x["kernel"]] += x["us"]
    rows = [_kernel(a, k, times) for k in a.manifest.kernels]
    return sorted(rows, key=lambda k: (not k["uses"], -(k["us"] or 0.0), k["hash"]))


def kernel_names(a: Opened) -> dict[str, str]:
    """Return hash -> name for readers: the kernel and its op, such as "cpu/linear linear_map".

    The first line of a source names them; without it, the name is that of the kernel's function.
    """
    names = {}
    for k in a.manifest.kernels:
        head = _HEAD.match(a.kernel_source(k.hash) or "")
        names[k.hash] = f"{head[1]} {head[2]}" if head else k.entry
    return names


def _kernel(a: Opened, k: KernelFile, times: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    """Return a kernel's facts, source and launches. `times`: (program, hash) to predicted microseconds per step."""
    uses: list[dict[str, Any]] = []
    launches = 0
    for program in a.programs:
        places = Counter((x.op, pattern(x.loc)) for x in program.launches if x.kernel == k.hash)
        if not places:
            continue
        launches += places.total()
        uses.append(
            {
                "program": program.name,
                "us": times.get((program.name, k.hash)),
                "places": "; ".join(f"{n} x {op} at {loc or 'no module'}" for (op, loc), n in places.items()),
            }
        )
    summary = "runs the launches"  # the summary of a program that is one compiled function
    if uses:
        summary = f"{count_noun(launches, 'launch', 'launches')} in {count_noun(len(uses), 'program')}"
    predicted = [use["us"] for use in uses if use["us"] is not None]
    return {
        **vars(k),
        "size": a.manifest.files[k.file].bytes,
        "us": sum(predicted) if predicted else None,
        "where": summary,
        "uses": uses,
        "source": a.kernel_source(k.hash),
    }


def choices(a: Opened, predictions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the decisions of `select` per program: chosen kernel and schedule, roofline, and alternatives."""
    decisions = []
    for program in a.programs:
        if rows := [r for r in a.reports["choices"] if r["graph"] == program.name]:
            decisions.append(_choices(program, rows, predictions.get("machine")))
    return decisions


def _choices(p: Program, rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any] | None) -> dict[str, Any]:
    sizes = rows[0]["sizes"]
    floors: dict[tuple[str, str], float] = {}  # roofline microseconds of the first launch of (op, place)
    if machine:
        for x in predict(p, machine, sizes)["launches"]:
            floors.setdefault((x["op"], x["loc"]), x["us"] - machine["launch_us"])
    symbols = ("R",) if p.uniform else ("T", "R")
    return {
        "program": p.name,
        "nodes": sum(r["count"] for r in rows),
        "measured": sum(r["count"] for r in rows if r["measured"]),
        "at": sizes_text({symbol: size for symbol, size in sizes.items() if symbol in symbols}),
        "rows": [{"refused": {}, **r, "floor": floors.get((r["node"].split("(")[0], r["loc"]))} for r in rows],
    }
