"""Predicted time of every program and launch compared with the roofline, as data for the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmc_runtime.format.program import RANK, Program

from llmc.artifact.cost_report import predict
from llmc.passes.pass_report import pattern
from llmc.report.formatting import sizes_text

Launches = Sequence[Mapping[str, Any]]


def program_costs(programs: Iterable[Program], predictions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the costs of every predicted program: its launches with their rooflines, in order and grouped.

    "low" is the step at the predicted sizes, "high" the largest step that the program serves.
    """
    machine, predicted = predictions["machine"], predictions["programs"]
    rows = []
    for p in programs:
        if p.name not in predicted:
            continue
        low = predicted[p.name]
        launches = _bounded(low["launches"], machine)
        rows.append(
            {
                "name": p.name,
                "serves": sizes_text({s: f"{lo}-{hi}" if lo < hi else lo for s, (lo, hi) in p.serves.items()}),
                "low": _step(low, machine),
                "high": _step(predict(p, machine, largest_step(p, low["sizes"])), machine),
                "launches": launches,
                "groups": _groups(launches),
            }
        )
    return rows


def _step(prediction: Mapping[str, Any], machine: Mapping[str, Any]) -> dict[str, Any]:
    floor = sum(x["floor"] for x in _bounded(prediction["launches"], machine))
    return {"at": step_sizes(prediction["sizes"]), "us": prediction["us"], "floor": floor}


def step_sizes(sizes: Mapping[str, int]) -> str:
    """Format the sizes of a step, without the number of pages and the rank."""
    return sizes_text({s: n for s, n in sizes.items() if s not in ("P", RANK)})


def _bounded(launches: Launches, machine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Add each launch's roofline time ("floor", in microseconds) and its bound: memory, compute or launch overhead."""
    out = []
    for x in launches:
        floor = max(0.0, x["us"] - machine["launch_us"])
        memory = x["bytes"] / machine["bandwidth"] * 1e6
        if floor < machine["launch_us"]:
            bound = "launch"
        else:
            bound = "memory" if memory >= floor - 0.01 else "compute"
        out.append({**x, "floor": floor, "bound": bound})
    return out


def largest_step(p: Program, low: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the largest step that a program serves, with as many pages per row as in `low`."""
    rows = p.serves.get("R", (1, 1))[1] if p.uniform else low.get("R", 1)
    tokens = p.serves.get("T", (1, 1))[1]
    page_size = max(1, -(-low.get("T", 1) // max(1, low.get("P", 1))))
    pages = -(-low.get("P", 1) // max(1, low.get("R", 1))) if p.uniform else -(-tokens // page_size)
    sizes = {"T": tokens, "R": rows, "P": pages * rows}
    return {s: sizes.get(s, n) for s, n in low.items()}


def _groups(launches: Launches) -> list[dict[str, Any]]:
    """Merge launches of one kernel at places that differ only in numbers; the largest time in all comes first."""
    groups: dict[tuple[str, str, float], dict[str, Any]] = {}
    for x in launches:
        place = pattern(x["loc"])
        group = groups.setdefault((x["kernel"], place, x["us"]), {**x, "place": place, "count": 0, "total": 0.0})
        group["count"] += 1
        group["total"] += x["us"]
    return sorted(groups.values(), key=lambda g: -g["total"])
