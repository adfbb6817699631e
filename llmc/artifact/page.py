"""The build report as one HTML page without scripts or links: sizes, memory, kernels by predicted time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:.5rem 0 1.5rem}td,th{padding:.2rem .8rem;text-align:left;"
    "border-bottom:1px solid #ddd}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}"
    "code{font-size:.92em}div.bar{background:#7aa6d8;height:.7rem;min-width:1px}"
)
MOST = 60


def report_page(facts: Mapping[str, Any], memory: Mapping[str, Any], roofline: Mapping[str, Any]) -> str:
    """`facts`: name -> value; `memory` and `roofline`: the JSON reports of the same names."""
    title = escape(str(facts.get("source", "artifact")))
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>",
        f"<h1>{title}</h1>",
        _table(("", ""), [(k, v) for k, v in facts.items()]),
        "<h2>Memory</h2>",
        _table(("", "bytes"), _memory_rows(memory)),
    ]
    for name, p in roofline.get("programs", {}).items():
        sizes = ", ".join(f"{s}={n}" for s, n in p["sizes"].items())
        parts.append(f"<h2>Program {escape(name)}: {p['us'] / 1000:.3f} ms predicted at {escape(sizes)}</h2>")
        parts.append(_launches(p["launches"], p["us"]))
    return "\n".join(parts) + "\n"


def _memory_rows(memory: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = [("a page of the KV pool, all layers", memory["kv_bytes_per_page"])]
    rows += [(f"arena of {n}", b) for n, b in memory["arena_bytes"].items()]
    rows += [(f"state {n}", b) for n, b in memory["state_bytes"].items()]
    return rows


def _launches(launches: Sequence[Mapping[str, Any]], total: float) -> str:
    """Equal kernels together, the largest first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for x in launches:
        groups.setdefault(x["kernel"], []).append(x)
    ranked = sorted(groups.items(), key=lambda kv: -sum(x["us"] for x in kv[1]))
    rows = []
    for kernel, group in ranked[:MOST]:
        us = sum(x["us"] for x in group)
        bar = f"<div class=bar style='width:{200 * us / max(total, 1e-9):.0f}px'></div>"
        code = f"<code>kernels/{escape(kernel[:12])}</code>"
        flops, moved = (sum(x[k] for x in group) for k in ("flops", "bytes"))
        cells = (_cell(us, ".1f"), f"<td>{bar}</td>", _cell(len(group)), f"<td>{escape(group[0]['op'])}</td>",
                 f"<td>{escape(group[0]['loc'])}</td>", f"<td>{code}</td>", _cell(flops), _cell(moved))  # fmt: skip
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = ("us", "", "launches", "op", "first at", "kernel", "flops", "bytes")
    return f"<table><tr>{''.join(f'<th>{h}</th>' for h in heads)}</tr>{''.join(rows)}</table>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    body = "".join(f"<tr>{''.join(_cell(c) for c in r)}</tr>" for r in rows)
    return f"<table><tr>{''.join(f'<th>{h}</th>' for h in heads)}</tr>{body}</table>"


def _cell(value: Any, form: str = ",") -> str:
    if isinstance(value, int | float):
        return f"<td class=n>{value:{form}}</td>"
    return f"<td>{escape(str(value))}</td>"
