"""Formats numbers and lists as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise


def runs(numbers: Sequence[int]) -> str:
    """Format [0, 1, 2, 5] as "0-2, 5", and sequences with equal steps above one as "0, 2, ..., 30"."""
    ordered = sorted(set(numbers))
    steps = {b - a for a, b in pairwise(ordered)}
    if len(ordered) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]}, {ordered[1]}, ..., {ordered[-1]}"
    out: list[tuple[int, int]] = []
    for n in ordered:
        if out and out[-1][1] == n - 1:
            out[-1] = (out[-1][0], n)
        else:
            out.append((n, n))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def count_noun(n: int, singular: str, plural: str = "") -> str:
    """Format a count with its noun: 1 launch, 3 launches; `plural` defaults to `singular` plus s."""
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"


def count_text(n: float) -> str:
    """Format a count with a unit: 1234567 becomes 1.23 M."""
    for unit in ("", " K", " M"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:,.2f} G"


def us_text(us: float) -> str:
    """Format microseconds in a suitable unit."""
    if us >= 1e6:
        return f"{us / 1e6:,.2f} s"
    return f"{us / 1e3:,.2f} ms" if us >= 1e3 else f"{us:,.1f} us"


def sizes_text(sizes: Mapping[str, object]) -> str:
    """Format symbol sizes as T=1, R=2."""
    return ", ".join(f"{s}={n}" for s, n in sizes.items())


def schedule_text(schedule: Mapping[str, object]) -> str:
    """Format a schedule as key=value pairs."""
    return " ".join(f"{k}={v}" for k, v in schedule.items())
