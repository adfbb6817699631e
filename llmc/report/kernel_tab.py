"""The kernels of an artifact as HTML: identity, launches, schedule decisions and source text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmc_runtime.format.manifest import KernelFile
from llmc_runtime.format.program import Program

from llmc.artifact.cost_report import predict
from llmc.artifact.inspect import size_text
from llmc.passes.pass_report import pattern
from llmc.report.formatting import many, schedule_text, us_text
from llmc.report.html import Html, Number, code, dim, fold, join, number, table, tag
from llmc.report.open_artifact import Opened


def link(key: str) -> Html:
    """Return a link to a kernel's entry."""
    return tag("a", code(key[:8]), href=f"#k-{key}")


def section(a: Opened, predictions: Mapping[str, Any]) -> Html:
    """Return all kernels in the order of their first launch; the step units come last."""
    uses = {k.hash: _uses(k.hash, a.programs) for k in a.manifest.kernels}
    first = {x.kernel: i for i, x in reversed(list(enumerate(y for p in a.programs for y in p.launches)))}
    ordered = sorted(a.manifest.kernels, key=lambda k: first.get(k.hash, len(first) + 10**6))
    times = _times(predictions)
    return join(_kernel(a, k, uses[k.hash], times) for k in ordered)


def _uses(key: str, programs: Sequence[Program]) -> dict[str, Counter[tuple[str, str]]]:
    """Program -> number of launches of the kernel by (op, place)."""
    found = {p.name: Counter((x.op, pattern(x.loc)) for x in p.launches if x.kernel == key) for p in programs}
    return {name: count for name, count in found.items() if count}


def _times(predictions: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """(program, kernel) -> predicted microseconds summed over its launches."""
    out: dict[tuple[str, str], float] = {}
    for name, told in predictions.get("programs", {}).items():
        for x in told["launches"]:
            out[name, x["kernel"]] = out.get((name, x["kernel"]), 0.0) + x["us"]
    return out


def _kernel(
    a: Opened, k: KernelFile, uses: Mapping[str, Counter[tuple[str, str]]], times: Mapping[tuple[str, str], float]
) -> Html:
    count = sum(sum(c.values()) for c in uses.values())
    where = f"{many(count, 'launch', 'launches')} in {many(len(uses), 'program')}" if uses else "runs the launches"
    summary = tag("span", code(k.hash[:8]), " ", k.entry, " ", dim(where), id=f"k-{k.hash}")
    size = a.manifest.files[k.file].bytes
    shape = f", {k.threads} threads and {size_text(k.shared)} of shared memory a block" if k.threads else ""
    about = tag("p", dim(f"{k.file}, {size_text(size)}, {k.abi}{shape}"))
    source = a.kernel_source(k.hash)
    text = fold(f"source, {len(source.splitlines())} lines", tag("pre", source)) if source else Html("")
    return fold(summary, about, _places(k.hash, uses, times), text)


def _places(key: str, uses: Mapping[str, Counter[tuple[str, str]]], times: Mapping[tuple[str, str], float]) -> Html:
    rows = []
    for program, count in uses.items():
        us = us_text(times[program, key]) if (program, key) in times else ""
        places = [f"{n} x {op} at {loc or 'no module'}" for (op, loc), n in count.items()]
        rows.append((code(program), Number(us), "; ".join(places)))
    return table(("program", "predicted", "launched for"), rows)


def choices(a: Opened, predictions: Mapping[str, Any]) -> Html:
    """Return the decisions of `select` per program: chosen kernel and schedule, roofline, and alternatives."""
    rows = a.reports["choices"]
    found = [(p, [r for r in rows if r["graph"] == p.name]) for p in a.programs]
    return join(_graph(p, mine, predictions.get("machine")) for p, mine in found if mine)


def _graph(p: Program, rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any] | None) -> Html:
    nodes = sum(r["count"] for r in rows)
    measured = sum(r["count"] for r in rows if r["measured"])
    sizes = {s: n for s, n in rows[0]["sizes"].items() if s in (("R",) if p.uniform else ("T", "R"))}
    at = ", ".join(f"{s}={n}" for s, n in sizes.items())
    floors = _floors(p, rows[0]["sizes"], machine) if machine else {}
    summary = join(
        [code(p.name), dim(f"{measured} of {nodes} nodes by measurements, the rest by cost rule, at {at}")], " "
    )
    heads = ("nodes", "node", "first at", "kernel", "schedule", "us", "roofline", "by", "ways", "the next best")
    return fold(summary, table(heads, (_choice(r, floors.get((r["node"].split("(")[0], r["loc"]))) for r in rows)))


def _floors(p: Program, sizes: Mapping[str, int], machine: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """(op, place) -> roofline microseconds of the first such launch, without launch overhead."""
    found: dict[tuple[str, str], float] = {}
    for x in predict(p, machine, sizes)["launches"]:
        found.setdefault((x["op"], x["loc"]), x["us"] - machine["launch_us"])
    return found


def _choice(r: Mapping[str, Any], floor: float | None) -> tuple[Any, ...]:
    others = [f"{o['us']:.2f} us {o['kernel']} {schedule_text(o['schedule'])}" for o in r["others"]]
    shown = join([fold(others[0], join(others[1:], Html("<br>")))], "") if len(others) > 1 else "".join(others)
    roof = Number("" if floor is None else f"{floor:.2f}")
    by = "measured" if r["measured"] else "cost rule"
    return (
        number(r["count"]), code(r["node"]), code(r["loc"]), r["kernel"], code(schedule_text(r["schedule"])),
        number(r["us"], ".2f"), roof, by, number(r["ways"]), shown,
    )  # fmt: skip
