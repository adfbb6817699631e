"""Decides which prompts get a head's keys and values (its entries), and charges their cost.

A head drafts somewhat better with the entries of the prompt than with zeros. Computing them takes a share of the
prompt's time. It is paid from a credit of its own, which grows by _SHARE_OF_TIME of the time of plain decoding and of
prompts. Once that is spent, it is paid from the credit of trials (see draft_trials), which is high while drafts pay;
otherwise prompts get no entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from llmc_runtime.sched.draft_trials import TRIAL_COST, TrialsByKind
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.step import Work, prompt_tokens

_SHARE = 0.04  # share of a prompt's time that its entries take in the demonstration model; smaller in larger models
_SHARE_OF_TIME = 0.002
_INITIAL_CREDIT, _MAX_CREDIT = 3.0, 64.0
_MEAN_WEIGHT = 0.1  # weight of a step with prompts in the running mean


class _Step(NamedTuple):
    """A step with prompts in flight: its work, the number of their tokens, and whether it computes no entries."""

    work: Sequence[Work]
    tokens: int
    plain: bool


class PromptEntries:
    """Decides for each step with prompts. The unit of time is a step that decodes without drafts.

    can_skip: steps with prompts can do without entries; otherwise nothing is charged. trials: whose credits pay.
    in_flight: the steps with prompts that have not ended, oldest first.
    """

    def __init__(self, can_skip: bool, trials: TrialsByKind) -> None:
        self.in_flight = deque[_Step]()
        self._can_skip, self._trials = can_skip, trials
        self._credit, self._earned_until = _INITIAL_CREDIT, 0
        self._cost_of_token = 0.0  # 0: unknown

    def skips(self, work: Sequence[Work], requests: Sequence[Request], needed: bool, plan: int) -> bool:
        """Return whether a step that is planned now computes no entries. needed: rows that decode need them."""
        tokens = prompt_tokens(work)
        if not (tokens and self._can_skip):
            return False
        self._earn(plan - self._earned_until)
        self._earned_until = plan
        credit = self._credit + max(0.0, self._trials.of(requests).credit.balance - TRIAL_COST)
        uncharged = sum(step.tokens for step in self.in_flight if not step.plain)
        skipped = not needed and (credit <= 0.0 or credit < (uncharged + tokens) * self._cost_of_token)
        self.in_flight.append(_Step(work, tokens, skipped))
        return skipped

    def ended(self, work: Sequence[Work], requests: Sequence[Request], seconds: float, plain: float) -> None:
        """Record that a step took `seconds`, and charge the entries that it computed, if it is the oldest in flight.

        plain: the seconds of a step without drafts; 0 if they are unknown.
        """
        if work is not self.in_flight[0].work:
            return  # it has no prompts
        tokens, skipped = self.in_flight.popleft()[1:]
        if not plain:
            return
        decoding = sum(item.num_tokens == 1 + item.drafts for item in work)
        steps = max(0.0, seconds / plain - decoding / len(work))
        cost = _SHARE * steps
        self._cost_of_token += (_MEAN_WEIGHT if self._cost_of_token else 1.0) * (cost / tokens - self._cost_of_token)
        self._earn(steps)
        if not skipped:
            paid = min(cost, self._credit)
            self._credit -= paid
            self._trials.of(requests).charge(cost - paid)

    def forget(self) -> None:
        """Forget the steps in flight, which were dropped."""
        self.in_flight.clear()

    def _earn(self, steps: float) -> None:
        """Add to the credit what steps of this duration are worth."""
        self._credit = min(_MAX_CREDIT, self._credit + _SHARE_OF_TIME * steps)
