"""Numbers of bytes as text, in the units of all commands."""

from __future__ import annotations


def size_text(n: float) -> str:
    """Format a number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"
