"""The memory plan as HTML: totals, the KV pool, and a chart of every program's arena."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmc.artifact.inspect import kv_capacity, size_text
from llmc.passes.pass_report import pattern
from llmc.report.html import COLOURS, Html, Number, bar, code, dim, fold, join, number, table, tag
from llmc.report.open_artifact import Opened

WIDTH, HEIGHT = 1000.0, 260.0
GIB = 1 << 30
SHOWN = 40  # number of values in the table below a chart


def section(a: Opened) -> Html:
    """Return the totals, the KV pool and the arenas."""
    m = a.manifest
    weights = weight_bytes(a)
    states = {s.name: s.nbytes({}) for s in m.states if not any("P" in d.symbols for d in s.shape)}
    arena = max((p.arena_bytes for p in a.programs), default=0)
    most = max(weights, arena, sum(states.values()), 1)
    parts = [
        ("weights", weights),
        ("states of the rows", sum(states.values())),
        ("arena, the largest", arena),
    ]
    rows = [(name, Number(size_text(n)), number(n), bar(n / most)) for name, n in parts]
    charts = [
        _program(p.name, a.reports["memory"][p.name])
        for p in a.programs
        if isinstance(a.reports.get("memory", {}).get(p.name), Mapping)
    ]
    told = fold("states", table(("state", "bytes"), ((code(n), number(b)) for n, b in states.items())))
    note = tag(
        "p",
        "A value's place is a rectangle: its width is the launches that it lives for, its height its bytes. Values "
        "that share bytes never live at once. Point at one to read what it is.",
    )
    return join(
        [table(("", "", "bytes", ""), rows), told, _pool(a, weights + arena + sum(states.values())), note, *charts]
    )


def weight_bytes(a: Opened) -> int:
    """Return the total bytes of the weights that programs read, packed or not."""
    found = {b.name: b.bytes({}) for p in a.programs for b in p.buffers if b.kind == "weight" and b.alias is None}
    return sum(found.values())


def _pool(a: Opened, fixed: int) -> Html:
    """The capacity of the KV pool on machines of several sizes."""
    kv = a.manifest.kv
    if not kv.bytes_per_page:
        return Html("")
    full = kv_capacity(a.manifest, None)
    text = tag(
        "p",
        f"KV cache: {size_text(full['bytes_per_token'])} a token ({kv.dtype}, {kv.layers} layers), pages of "
        f"{kv.page_size} tokens, {size_text(full['bytes_per_token'] * a.manifest.limits.max_model_len)} a sequence of "
        f"{a.manifest.limits.max_model_len} tokens; all {a.manifest.limits.max_num_seqs} rows at full length would use "
        f"{size_text(full['bytes_for_all_rows'])}.",
    )
    rows = []
    for gib in (1, 2, 4, 8, 16, 24, 32, 48, 80, 96, 141, 192):
        left = gib * GIB - fixed
        if left < kv.bytes_per_page:
            continue
        got = kv_capacity(a.manifest, left)
        rows.append((Number(f"{gib} GiB"), number(got["tokens"]), number(got["full_sequences"], ",.1f")))
        if got["bytes"] == full["bytes"]:
            break
    return join([text, table(("memory in all", "tokens", "full sequences"), rows)])


def _program(name: str, plan: Mapping[str, Any]) -> Html:
    slots = plan["slots"]
    summary = join([code(name), dim(f"arena {size_text(plan['arena_bytes'])}, {plan['values']} values")], " ")
    if not slots:
        return fold(summary, tag("p", "No value is in the arena."))
    rows = [
        (number(s["nbytes"]), number(s["offset"]), f"{s['first']}-{s['last']}", code(s["type"]), code(s["loc"]))
        for s in slots[:SHOWN]
    ]
    heads = ("bytes", "offset", "lives", "type", "made at")
    rest = f"the {SHOWN} largest of {len(slots)} values" if len(slots) > SHOWN else f"all {len(slots)} values"
    return fold(summary, chart(slots, plan["arena_bytes"]), fold(rest, table(heads, rows)), open_=False)


def chart(slots: Sequence[Mapping[str, Any]], arena: int) -> Html:
    """Return one arena as SVG: launches to the right, bytes upwards, one colour per module path pattern."""
    steps = max(s["last"] for s in slots) + 1
    weight = Counter[str]()
    for s in slots:
        weight[pattern(s["loc"])] += s["nbytes"] * (s["last"] - s["first"] + 1)
    places = [p for p, _ in weight.most_common(len(COLOURS) - 1)]
    boxes = [_box(s, steps, arena, places) for s in slots]
    size = f"0 0 {WIDTH:.0f} {HEIGHT:.0f}"
    drawn = tag("svg", *boxes, viewBox=size, preserveAspectRatio="none", role="img", class_="arena")
    others = ["elsewhere"] if len(weight) > len(places) else []
    keys = [
        join([Html(f'<span class="key" style="background:{COLOURS[i]}"></span>'), code(p or "no module")], "")
        for i, p in enumerate([*places, *others])
    ]
    return join([drawn, tag("p", join(keys, " "))])


def _box(s: Mapping[str, Any], steps: int, arena: int, places: Sequence[str]) -> Html:
    place = pattern(s["loc"])
    kind = places.index(place) if place in places else len(COLOURS) - 1
    x, width = s["first"] * WIDTH / steps, (s["last"] - s["first"] + 1) * WIDTH / steps
    height = s["nbytes"] * HEIGHT / max(1, arena)
    y = max(0.0, HEIGHT - s["offset"] * HEIGHT / max(1, arena) - height)
    told = f"{s['name'] or 'value'} {s['type']}, {size_text(s['nbytes'])}, {s['first']}-{s['last']}, {s['loc']}"
    box = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{max(height, 0.3):.1f}"}
    return tag("rect", tag("title", told), class_=f"k{kind}", **box)
