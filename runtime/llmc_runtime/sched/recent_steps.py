"""The durations of the latest steps without drafts, with which the durations of steps with drafts are compared.

A step takes longer the longer its sequences are, and while other programs run. Drafts may be tried repeatedly at the
same length, such as soon after requests have begun. If such a step were compared with the mean of all steps without
drafts, drafts would seem cheaper or more expensive than they are.
"""

from __future__ import annotations

from collections import deque
from statistics import median

STEPS = 7  # latest steps whose median is used
_MIN_STEPS = 3  # with fewer steps, the mean is used
_MAX_AGE = 64  # plans after which the steps are no longer used
_MAX_FACTOR = 2.0  # maximum ratio of the mean to the median, and of the median to the mean


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
        """Return the factor that makes a duration at this plan comparable with `mean`, the mean without drafts.

        Returns 1 if the mean is unknown (0), or if there are too few recent steps.
        """
        if not mean or len(self._seconds) < _MIN_STEPS or plan - self._plan > _MAX_AGE:
            return 1.0
        return max(1 / _MAX_FACTOR, min(_MAX_FACTOR, mean / (median(self._seconds) or mean)))
