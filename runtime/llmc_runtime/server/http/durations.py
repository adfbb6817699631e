"""Durations in headers and query parameters."""

from __future__ import annotations

import re

_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?([eE][+-]?[0-9]{1,2})?|\.[0-9]{1,9}", re.ASCII)


def seconds_of(text: str, maximum: float) -> float | None:
    """Parse decimal seconds above 0 and up to `maximum`, such as 30, 0.5 or 1e-3; return None for other text.

    Only ASCII digits are accepted. float() would also accept underscores, spaces, and digits of other scripts.
    """
    value = float(text) if _SECONDS.fullmatch(text) else 0.0
    return value if 0.0 < value <= maximum else None
