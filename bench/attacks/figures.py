"""Arithmetic and text of the attack table: percentiles, windows of memory, rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "none"


def milliseconds(seconds: float) -> float:
    """Convert seconds to milliseconds, rounded to a hundredth."""
    return round(1e3 * seconds, 2)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the sorted values that at least this share of them do not exceed; 0 if there are none."""
    if not ordered:
        return 0.0
    rank = -(-share * len(ordered) // 1)  # rounded up
    return ordered[min(len(ordered), max(1, int(rank))) - 1]


def gaps_of(gaps: list[float], open_now: Sequence[float] = ()) -> dict[str, Any]:
    """Return inter-token latencies in milliseconds; an open gap counts once it is longer than all completed ones."""
    longest = max(gaps, default=0.0)
    ordered = sorted([*gaps, *(gap for gap in open_now if gap > longest)])
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {"tokens": len(gaps), **{name: milliseconds(quantile(ordered, share)) for name, share in shares.items()}}


def memory_window(samples: Sequence[tuple[float, Mapping[str, int]]], begin: float, end: float) -> dict[str, list[int]]:
    """[before, peak, after] in MiB by role, of samples (time, resident bytes by role) in the order of time.

    Before is the last sample that is not later than `begin`, and after is the last that is not later than `end`.
    """
    before = next((sizes for t, sizes in reversed(samples) if t <= begin), {})
    after = next((sizes for t, sizes in reversed(samples) if t <= end), {})
    inside = [sizes for t, sizes in samples if begin <= t <= end] or [after]
    window = {}
    for role in sorted({role for sizes in (before, *inside) for role in sizes}):
        three = (before.get(role, 0), max(sizes.get(role, 0) for sizes in inside), after.get(role, 0))
        window[role] = [value >> 20 for value in three]
    return window


def itl_text(itl: Mapping[str, Any]) -> str:
    """Format p50 / p99 / max."""
    return f"{itl['p50_ms']:.1f} / {itl['p99_ms']:.1f} / {itl['max_ms']:.0f}"


def answers_text(answers: Sequence[Mapping[str, Any]]) -> str:
    """Return a line per status and message of a label, ignoring numbers in it: the count, and the slowest."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    errors: dict[tuple[str, str, str], str] = {}
    for answer in answers:
        status = str(answer["status"]) if answer["status"] else NONE
        group = (answer["label"], status, re.sub(r"\d+", "#", answer["error"]))
        errors.setdefault(group, answer["error"])
        groups.setdefault(group, []).append(answer["seconds"])
    lines = []
    for (label, status, general), seconds in groups.items():
        error = errors[label, status, general]
        times = f"{len(seconds)} x " if len(seconds) > 1 else ""
        lines.append(f"{label}: {times}{status} in {max(seconds):.2f} s{f' ({error})' if error else ''}")
    return "\n".join(lines)


def describe(result: Mapping[str, Any]) -> str:
    """Describe one attack as lines of text."""
    beside, quiet = result["beside"], result["quiet"]
    lines = [f"\n[{result['row']}] {result['name']}  ({result['seconds']:.1f} s)"]
    lines += [f"  attacker   {line}" for line in answers_text(result["answers"]).splitlines()]
    lines += [f"  note       {note}" for note in result["notes"]]
    times = (f"{name} {itl_text(result[name]['itl'])}" for name in ("quiet", "beside", "after"))
    lines.append(
        f"  itl ms     {'   '.join(times)}"
        f"   (first token {beside['itl']['ttft_max_ms']:.0f}; refused {beside['itl']['refused'] or 0})"
    )
    for name in ("quiet", "beside", "after"):
        lines += [f"  {name:10} {line}" for line in parts_text(result[name])]
    lines.append(f"  health ms  quiet {quiet['health']['worst_ms']}   beside {beside['health']['worst_ms']}")
    for name, row in _ordinary(beside).items():
        lines.append(f"  {name:10} {row['statuses']} worst {row['worst_ms'][0] if row['worst_ms'] else 0:.0f} ms")
    lines.append("  memory     " + "   ".join(f"{k} {a} > {b} > {c} MiB" for k, (a, b, c) in result["memory"].items()))
    lines.append("  cpu s      " + "   ".join(f"{k} {v:.1f}" for k, v in result["cpu"].items()))
    lines.append(f"  processes  {result['processes']}")
    return "\n".join(lines)


NOT_REQUESTS = ("itl", "health", "watcher", "steps", "waits")  # parts of a window


def _ordinary(window: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the small requests of a window, by name."""
    return {name: requests for name, requests in window.items() if name not in NOT_REQUESTS}


def parts_text(window: Mapping[str, Any]) -> list[str]:
    """Describe what the inter-token latencies of a window consist of: the engine's steps, and the watching process."""
    itl, watcher, steps = window["itl"], window["watcher"], window.get("steps")
    lines = [
        f"{itl['starts']} streams started; without their steps {itl_text(itl['decode'])};"
        f" the watching process: turns {itl_text(watcher['turns'])}",
        f"slowest steps, at > of ms: {', '.join(f'{at:.0f} > {gap:.1f}' for at, gap in itl['slowest'])};"
        f" ms without a CPU: watching {watcher['waited_ms']:.1f}, "
        + ", ".join(f"{role} {wait:.1f}" for role, wait in window["waits"].items()),
    ]
    if steps:
        lines.append(
            f"steps of the engine {itl_text(steps['all'])}; {steps['prompts']} with prompts, the others"
            f" {itl_text(steps['decode'])}"
        )
    return lines


HEAD = (
    "row",
    "attack",
    "attacker",
    "ITL p50/p99/max quiet",
    "beside",
    "quiet after",
    "/health max",
    "ordinary requests' worst",
    "MiB",
    "processes",
)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return all attacks as a Markdown table, with times in milliseconds."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for row in rows:
        beside = row["beside"]
        small = _ordinary(beside).values()
        worst = max((ask["worst_ms"][0] for ask in small if ask["worst_ms"]), default=0.0)
        failed = sorted({status for ask in small for status in ask["statuses"] if status != "200"})
        cells = [
            str(row["row"]), row["name"], answers_text(row["answers"]).replace("\n", "; ").replace("|", "\\|")[:160],
            itl_text(row["quiet"]["itl"]), itl_text(beside["itl"]), itl_text(row["after"]["itl"]),
            f"{beside['health']['worst_ms'][0] if beside['health']['worst_ms'] else 0:.0f}",
            f"{worst:.0f}{f' {failed}' if failed else ''}",
            ", ".join(f"{k} {a}>{b}>{c}" for k, (a, b, c) in row["memory"].items()), row["processes"],
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
