"""Measurements as rows (measured, floor, peer, gate, aim), saved as soon as they are known, and as tables.

A file of rows is JSON lines, so that what a killed run has measured is kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
OFFLINE = "512 of 512 in, 256 out"  # the load of the peer's measurement
TITLES = {
    "ceilings": "Ceilings of this card, measured beside the rest",
    "decode": "Decode, ms a step: 128-token prompts, 128 steps, whole LLM.generate, bf16, greedy",
    "contexts": "Decode after long prompts, ms a step: 128 steps, whole LLM.generate, bf16, greedy",
    "prefill": "Prefill, ms: one prompt, one token out",
    "offline": "Offline throughput, output tokens a second",
    "host": "Host time exposed, us a step (median of 128): time in which the device had nothing queued",
    "start": "Start: process start to first token, real files, page cache warm, hashes checked",
    "kernels": "Kernels: every launch of a decode step, timed alone over the layers' own weights",
    "mixed": "A step of streams and a prompt: every launch timed alone, and the step replayed whole",
}


@dataclass(frozen=True)
class Row:
    """One measurement. `floor` and `peer` (vLLM) are in `unit` as well; None if there is none.

    A unit that ends in "/s" is better when larger. `model` and `case` identify what was measured; `extra` has samples.
    """

    suite: str
    model: str
    case: str
    unit: str
    measured: float
    floor: float | None = None
    peer: float | None = None
    gate: float | None = None
    aim: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> bool:
        return self.unit.endswith("/s")

    @property
    def share(self) -> float | None:
        """The floor divided by the measurement (for rates, the reverse); 1 is the floor."""
        return self._share(self.measured)

    @property
    def peer_share(self) -> float | None:
        return None if self.peer is None else self._share(self.peer)

    def _share(self, value: float) -> float | None:
        if not self.floor or not value:
            return None
        return value / self.floor if self.rate else self.floor / value

    @property
    def verdict(self) -> str:
        """The goal that is met: aim, gate, "missed by" a percentage, or empty without a goal."""
        if self.gate is None:
            return ""
        if self.aim is not None and self._reaches(self.aim):
            return "aim"
        return "gate" if self._reaches(self.gate) else f"missed by {abs(self.measured / self.gate - 1):.0%}"

    def _reaches(self, goal: float) -> bool:
        return self.measured >= goal if self.rate else self.measured <= goal

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share, "verdict": self.verdict}


class Rows:
    """The rows of one run, in a file in `folder` and in memory; `say` is called with each."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "rows.jsonl"
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Save a row."""
        self.rows.append(row)
        with self.path.open("a") as f:
            f.write(json.dumps(row.json()) + "\n")
            f.flush()
        print(f"  {line(row)}", flush=True)

    def text(self) -> str:
        """Return Markdown tables of this run's rows."""
        return tables(self.rows)


def read(path: Path) -> list[Row]:
    """Read a file of rows. A truncated last line is ignored, and later rows replace earlier ones."""
    rows: dict[tuple[str, str, str], Row] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            data = json.loads(text)
        except ValueError:
            continue
        row = Row(**{k: v for k, v in data.items() if k not in ("share", "verdict")})
        rows[row.suite, row.model, row.case] = row
    return list(rows.values())


def peer_of(suite: str, model: str, case: str) -> float | None:
    """Return vLLM's figure on an H200, from bench/peers.json."""
    known = json.loads((HERE / "peers.json").read_text())["models"].get(model, {})
    value = known.get(_key(suite))
    if suite == "offline" and case != OFFLINE:
        return None
    return value.get(case) if isinstance(value, dict) else value


def goals_of(suite: str, model: str, case: str) -> tuple[float | None, float | None]:
    """(gate, aim), from bench/goals.json."""
    known = json.loads((HERE / "goals.json").read_text())["models"].get(model, {})
    value = known.get(_key(suite), {})
    gate_aim = value.get(case) if isinstance(value, dict) else value
    return tuple(gate_aim) if gate_aim else (None, None)


def _key(suite: str) -> str:
    units = {"decode": "ms", "contexts": "ms", "prefill": "ms", "offline": "tok_s", "host": "us", "start": "s"}
    return f"{suite}_{units[suite]}" if suite in units else ""


def engine_row(suite: str, model: str, case: str, unit: str, measured: float, floor: float | None, **extra: Any) -> Row:
    """Return a row with the peer's figure and the goals."""
    gate, aim = goals_of(suite, model, case)
    return Row(suite, model, case, unit, measured, floor, peer_of(suite, model, case), gate, aim, extra)


def number(x: float | None) -> str:
    """Format a number with three to four significant digits."""
    if x is None or not math.isfinite(x):
        return ""
    size = abs(x)
    if size >= 1000:
        return f"{x:,.0f}"
    if size >= 10:
        return f"{x:.1f}"
    return f"{x:.3f}" if size >= 0.1 else f"{x:.3g}"


def percent(x: float | None) -> str:
    return "" if x is None else f"{x:.0%}"


def cells(row: Row) -> tuple[str, ...]:
    """Return model, case, measured, floor, share, vLLM, its share, gate, aim and verdict as text."""
    return (
        row.model, row.case, number(row.measured), number(row.floor), percent(row.share), number(row.peer),
        percent(row.peer_share), number(row.gate), number(row.aim), row.verdict,
    )  # fmt: skip


def line(row: Row) -> str:
    """Return a row as one line of a run's progress."""
    model, case, measured, floor, share, peer, _, gate, aim, verdict = cells(row)
    words = [f"{row.suite} {model} {case}: {measured} {row.unit}"]
    words += [f"floor {floor} ({share})"] if floor else []
    words += [f"vLLM {peer}"] if peer else []
    words += [f"gate {gate}{f', aim {aim}' if aim else ''}: {verdict}"] if gate else []
    return ", ".join(words)


HEAD = ("model", "case", "measured", "floor", "share of the floor", "vLLM", "its share", "gate", "aim", "met")


def tables(rows: Iterable[Row]) -> str:
    """Return Markdown: a table per suite, without empty columns."""
    by_suite: dict[str, list[Row]] = {}
    for row in rows:
        by_suite.setdefault(row.suite, []).append(row)
    parts = []
    for suite in (s for s in TITLES if s in by_suite):
        suite_rows = by_suite[suite]
        body = [HEAD, *(cells(r) for r in suite_rows)]
        units = {r.unit for r in suite_rows}
        body[0] = tuple(f"{h}, {suite_rows[0].unit}" if h == "measured" and len(units) == 1 else h for h in HEAD)
        if len(units) > 1:
            body = [(*b[:2], f"{b[2]} {r.unit}" if r else b[2], *b[3:]) for b, r in zip(body, [None, *suite_rows])]
        keep = [i for i in range(len(HEAD)) if i < 3 or any(b[i] for b in body[1:])]
        lines = [f"| {' | '.join(b[i] for i in keep)} |" for b in body]
        parts.append("\n".join([f"### {TITLES[suite]}", "", lines[0], "|" + " --- |" * len(keep), *lines[1:]]))
    return "\n\n".join(parts) + "\n"
