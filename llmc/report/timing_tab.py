"""Predicted time of every program and launch compared with the roofline, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc_runtime.format.program import Program

from llmc.artifact.cost_report import predict
from llmc.passes.pass_report import pattern
from llmc.report.formatting import sizes_text, us_text
from llmc.report.html import Html, bar, code, dim, fold, join, number, table, tag

Launches = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Priced:
    """A program's launches at some sizes. `floor` is the roofline in microseconds, without launch overhead."""

    program: Program
    sizes: Mapping[str, int]
    launches: Launches
    us: float
    floor: float


def price(p: Program, told: Mapping[str, Any], machine: Mapping[str, Any]) -> Priced:
    """Add the roofline to a program's prediction."""
    floor = sum(bound(x, machine)[0] for x in told["launches"])
    return Priced(p, told["sizes"], told["launches"], told["us"], floor)


def bound(x: Mapping[str, Any], machine: Mapping[str, Any]) -> tuple[float, str]:
    """Return a launch's roofline in microseconds, and what bounds it: memory, compute or the launch itself."""
    us = max(0.0, x["us"] - machine["launch_us"])
    if us < machine["launch_us"]:
        return us, "launch"
    moved = x["bytes"] / machine["bandwidth"] * 1e6
    return us, "memory" if moved >= us - 0.01 else "compute"


def widest(p: Program, low: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the largest step that a program serves, with as many pages per row as in `low`."""
    rows = p.serves.get("R", (1, 1))[1] if p.uniform else low.get("R", 1)
    tokens = p.serves.get("T", (1, 1))[1]
    each = -(-low.get("P", 1) // max(1, low.get("R", 1))) if p.uniform else -(-tokens // _page(low))
    given = {"T": tokens, "R": rows, "P": each * rows}
    return {s: given.get(s, n) for s, n in low.items()}


def _page(sizes: Mapping[str, int]) -> int:
    return max(1, -(-sizes.get("T", 1) // max(1, sizes.get("P", 1))))


def section(programs: Iterable[Program], predictions: Mapping[str, Any], kernel_link: Any) -> Html:
    """Return all programs: an overview, then the launches of each. `kernel_link(key)` returns a link as HTML."""
    machine, told = predictions["machine"], predictions["programs"]
    low = [price(p, told[p.name], machine) for p in programs if p.name in told]
    high = [price(x.program, predict(x.program, machine, widest(x.program, x.sizes)), machine) for x in low]
    flops = ", ".join(f"{v / 1e12:g} TFLOP/s {k}" for k, v in machine["flops"].items())
    head = tag(
        "p",
        f"Predicted with {machine['bandwidth'] / 1e9:,.0f} GB/s, {flops} and {machine['launch_us']:g} us a launch "
        f"(the record of {machine['name']}). Roofline: the larger of arithmetic and traffic of every launch, without "
        "the cost of launching. Nothing here was measured.",
    )
    parts = [_program(a, machine, kernel_link) for a in low]
    return join([head, _overview(low, high), *parts])


def _overview(low: Sequence[Priced], high: Sequence[Priced]) -> Html:
    most = max((h.us for h in high), default=1.0) or 1.0
    rows = []
    for a, b in zip(low, high, strict=True):
        serves = sizes_text({s: f"{lo}-{hi}" if lo < hi else lo for s, (lo, hi) in a.program.serves.items()})
        rows.append(
            (
                code(a.program.name), serves, number(len(a.launches)), _at(a.sizes), number(a.us / 1e3, ".3f"),
                number(a.floor / 1e3, ".3f"), _at(b.sizes), number(b.us / 1e3, ".3f"), number(b.floor / 1e3, ".3f"),
                bar(b.us / most, 120),
            )
        )  # fmt: skip
    heads = ("program", "serves", "launches", "at", "ms", "roofline", "at most", "ms", "roofline", "")
    return table(heads, rows)


def _at(sizes: Mapping[str, int]) -> str:
    return sizes_text({s: n for s, n in sizes.items() if s != "P"})


def _program(a: Priced, machine: Mapping[str, Any], kernel_link: Any) -> Html:
    summary = join([code(a.program.name), dim(f"{len(a.launches)} launches, {us_text(a.us)} at {_at(a.sizes)}")], " ")
    every = tag("pre", "\n".join(_lines(a.launches, machine)))
    return fold(summary, _groups(a, machine, kernel_link), fold("every launch, in order", every))


def _groups(a: Priced, machine: Mapping[str, Any], kernel_link: Any) -> Html:
    """Launches of one kernel at places that differ only in numbers, in order of the first."""
    groups: dict[tuple[str, str, float], list[Mapping[str, Any]]] = {}
    for x in a.launches:
        groups.setdefault((x["kernel"], pattern(x["loc"]), x["us"]), []).append(x)
    most = max((len(g) * g[0]["us"] for g in groups.values()), default=1.0) or 1.0
    rows = []
    for (kernel, place, us), group in groups.items():
        x = group[0]
        floor, by = bound(x, machine)
        rows.append(
            (
                number(len(group)), x["op"], code(place), number(us, ".2f"), number(floor, ".2f"), by,
                number(x["flops"] / 1e9, ".3f"), number(x["bytes"] / 1e6, ".3f"), number(len(group) * us, ".1f"),
                bar(len(group) * us / most, 140, "hot" if by == "launch" else ""), kernel_link(kernel),
            )
        )  # fmt: skip
    heads = ("launches", "op", "where", "us each", "roofline", "bound by", "GFLOP", "MB", "us in all", "", "kernel")
    return table(heads, rows)


def _lines(launches: Launches, machine: Mapping[str, Any]) -> list[str]:
    width = max((len(x["op"]) for x in launches), default=0)
    out = [f"{'':>5} {'us':>9} {'roofline':>9}  bound by  {'op':{width}}  kernel    where"]
    for i, x in enumerate(launches):
        us, by = bound(x, machine)
        out.append(f"{i:5} {x['us']:9.2f} {us:9.2f}  {by:8}  {x['op']:{width}}  {x['kernel'][:8]}  {x['loc']}")
    return out
