"""Search for stop strings in a growing text.

Invariant: `safe` never decreases, and never exceeds the start of a stop string that is completed later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopHit:
    """A completed stop string: `string`, and `cut`, the length of the text to keep."""

    string: str
    cut: int


class StopStrings:
    """Finds the stop string that is completed first in a text fed piece by piece.

    With `include`, the stop string remains in the text, and no text has to be held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.stops = tuple(s for s in stops if s)
        self.include = include
        self.hold = 0 if include else max((len(s) for s in self.stops), default=1) - 1

    def check(self, text: str, new_from: int) -> StopHit | None:
        """Return the stop string completed first beyond the first `new_from` characters of `text`, or None.

        Of several that are completed by the same character, the longest one wins, so that no part of it remains in the
        text.
        """
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            start = text.find(stop, max(0, new_from + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is None:
            return None
        end, start, stop = best
        return StopHit(stop, end if self.include else start)

    def safe(self, text: str) -> int:
        """Return how many characters of an unfinished `text` may be output."""
        return max(0, len(text) - self.hold)
