"""What steps without drafts take now, by which the durations of other steps are judged.

A step takes longer the longer its sequences are. Trials of drafts may come at a certain length again and again, such as
soon after requests have begun, or when other programs run. Compared with the mean of steps without drafts, they would
seem to cost less than they do, or more.
"""

from __future__ import annotations

from collections import deque
from statistics import median

STEPS = 7  # steps whose median counts
_FEWEST = 3  # the fewest steps that count
_LONGEST = 64  # plans after which they no longer count
_MAX_FACTOR = 2.0  # largest factor between these steps and the mean that counts


class RecentSteps:
    """The seconds of the last steps without drafts and prompts, while the same requests run."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=STEPS)
        self._plan = 0  # the plan after which the last one ended

    def add(self, plan: int, seconds: float) -> None:
        """Add a step that ended after this plan."""
        self._seconds.append(seconds)
        self._plan = plan

    def clear(self) -> None:
        """Forget all steps, since other requests run now."""
        self._seconds.clear()

    def factor(self, plan: int, mean: float) -> float:
        """Return by what a duration at this plan is multiplied to compare it with a mean duration without drafts.

        Returns 1 if the mean is unknown (0), or if there are too few recent steps.
        """
        if not mean or len(self._seconds) < _FEWEST or plan - self._plan > _LONGEST:
            return 1.0
        return max(1 / _MAX_FACTOR, min(_MAX_FACTOR, mean / (median(self._seconds) or mean)))
