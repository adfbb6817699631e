"""Stop strings over a growing text: which completes first, and how much of the text may be shown; it knows no tokens.

Invariant: `safe` never decreases and never passes the start of a stop string that later completes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopHit:
    """A stop string that completed: `string`, and `cut`, the length of the text to keep."""

    string: str
    cut: int


class StopStrings:
    """Finds the stop string that completes earliest in a text fed piece by piece.

    `include` keeps the stop string itself in the text (and then nothing has to be held back).
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.stops = tuple(s for s in stops if s)
        self.include = include
        self.hold = 0 if include else max((len(s) for s in self.stops), default=1) - 1

    def check(self, text: str, new_from: int) -> StopHit | None:
        """The stop string completing first at a position beyond `new_from` characters of `text`, or None.

        Of several that complete with the same character the longest wins, so that no part of it remains.
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
        """How many characters of an unfinished `text` may be shown."""
        return max(0, len(text) - self.hold)
