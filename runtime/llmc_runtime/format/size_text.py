"""Numbers of bytes as text, in the units of all commands."""

from __future__ import annotations


def size_text(nbytes: float) -> str:
    """Format a number of bytes with a binary unit, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
