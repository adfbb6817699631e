"""The memory plan as data for the report: totals, the KV pool, and a chart of every program's arena."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmc_runtime.format.size_text import size_text

from llmc.artifact.cost_report import weight_bytes
from llmc.passes.pass_report import pattern
from llmc.report.inspect import kv_capacity
from llmc.report.open_artifact import Opened

WIDTH, HEIGHT = 1000.0, 260.0
MAX_COLOURS = 8  # classes k0 to k7 of the style sheet; the last is for all other places
MAX_LISTED = 40  # number of values in the table below a chart
DEVICE_GIB = (1, 2, 4, 8, 16, 24, 32, 48, 80, 96, 141, 192)  # device memories in GiB


def memory_report(a: Opened) -> dict[str, Any]:
    """Return the variables of the template memory.html."""
    m = a.manifest
    states = {s.name: s.nbytes({}) for s in m.states if not any("P" in d.symbols for d in s.shape)}
    totals = {
        "weights": weight_bytes(a.programs),
        "states of the rows": sum(states.values()),
        "largest arena": max((p.arena_bytes for p in a.programs), default=0),
    }
    reported = a.reports.get("memory", {})
    plans = {p.name: reported[p.name] for p in a.programs if isinstance(reported.get(p.name), Mapping)}
    return {
        "totals": totals, "states": states, "kv": m.kv, "limits": m.limits, "full": kv_capacity(m, None),
        "capacities": _capacities(a, sum(totals.values())), "plans": plans, "shown": MAX_LISTED,
    }  # fmt: skip


def _capacities(a: Opened, fixed: int) -> list[tuple[int, dict[str, Any]]]:
    """(GiB of device memory, KV pool that fits next to `fixed` bytes), up to a device that fits all rows."""
    out = []
    for gib in DEVICE_GIB:
        available = (gib << 30) - fixed
        if available < a.manifest.kv.bytes_per_page or not a.manifest.kv.bytes_per_page:
            continue
        pool = kv_capacity(a.manifest, available)
        out.append((gib, pool))
        if pool["bytes"] == pool["bytes_for_all_rows"]:
            break
    return out


def chart(slots: Sequence[Mapping[str, Any]], arena: int) -> dict[str, Any]:
    """Return the rectangles of one arena: launches to the right, bytes upwards, one colour per module path pattern."""
    steps = max(s["last"] for s in slots) + 1
    area = Counter[str]()
    for s in slots:
        area[pattern(s["loc"])] += s["nbytes"] * (s["last"] - s["first"] + 1)
    places = [p for p, _ in area.most_common(MAX_COLOURS - 1)]
    boxes = [_box(s, steps, max(1, arena), places) for s in slots]
    return {"width": WIDTH, "height": HEIGHT, "boxes": boxes, "places": places, "others": len(area) > len(places)}


def _box(s: Mapping[str, Any], steps: int, arena: int, places: Sequence[str]) -> dict[str, Any]:
    place = pattern(s["loc"])
    height = s["nbytes"] * HEIGHT / arena
    return {
        "colour": places.index(place) if place in places else MAX_COLOURS - 1,
        "x": f"{s['first'] * WIDTH / steps:.1f}",
        "y": f"{max(0.0, HEIGHT - s['offset'] * HEIGHT / arena - height):.1f}",
        "width": f"{(s['last'] - s['first'] + 1) * WIDTH / steps:.1f}",
        "height": f"{max(height, 0.3):.1f}",
        "text": f"{s['name'] or 'value'} {s['type']}, {size_text(s['nbytes'])}, {s['first']}-{s['last']}, {s['loc']}",
    }
