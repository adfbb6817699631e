"""Which prompts get a head's keys and values (its entries), and what these cost.

A head drafts somewhat better with the entries of the prompt: of the demonstration model's drafts after chats, 80 % were
accepted with them and 75 % with zeros instead. Computing them takes a share of the prompt's time. It is paid from the
credit of trials (see draft_trials), so prompts get no entries while drafts do not pay.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc_runtime.sched.draft_trials import TRIAL_COST, TrialsByKind
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.step import Work
from llmc_runtime.sched.step_drafts import prompt_tokens

_SHARE = 0.04  # of a prompt's time: of the demonstration model; that of larger models is smaller
_MEAN_WEIGHT = 0.1  # of a step with prompts in the mean


class PromptEntries:
    """Decides for each step with prompts. The unit of time is a step that decodes without drafts.

    can_skip: steps with prompts can do without entries; otherwise nothing is charged. trials: whose credits pay.
    tokens: of the prompts of the last step planned. charged: the work of the last step whose prompts get entries.
    """

    def __init__(self, can_skip: bool, trials: TrialsByKind) -> None:
        self.tokens = 0
        self.charged: Sequence[Work] = ()
        self._can_skip, self._trials = can_skip, trials
        self._cost_of_token = 0.0  # 0: unknown

    def skips(self, work: Sequence[Work], requests: Sequence[Request], needed: bool) -> bool:
        """Return whether a step that is planned now computes no entries. needed: rows that decode need them."""
        self.tokens = tokens = prompt_tokens(work)
        if not (tokens and self._can_skip):
            return False
        if not needed and self._trials.of(requests).credit < TRIAL_COST + tokens * self._cost_of_token:
            return True
        self.charged = work
        return False

    def charge(self, work: Sequence[Work], requests: Sequence[Request], seconds: float, plain: float) -> None:
        """Charge what entries took in the step `charged`, which took `seconds`.

        plain: the seconds of a step without drafts; 0 if they are unknown.
        """
        self.charged = ()
        if not plain:
            return
        cost, tokens = _SHARE * seconds / plain, prompt_tokens(work)
        self._cost_of_token += (_MEAN_WEIGHT if self._cost_of_token else 1.0) * (cost / tokens - self._cost_of_token)
        self._trials.of(requests).charge(cost)
