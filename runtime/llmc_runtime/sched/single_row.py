"""SingleRow: how many drafts the only row of a draft model or head verifies, by its rate of acceptance.

A request that runs alone is compared with those of its kind (see draft_trials) that ran alone before it. Its number of
drafts follows from its own rate, whose choices are kept until costs change.
"""

from __future__ import annotations

from llmc_runtime.sched.draft_costs import MIN_SINGLE_GAIN, Choice, DraftCount
from llmc_runtime.sched.draft_trials import TrialsByKind, kind_of
from llmc_runtime.sched.request import Request


class SingleRow:
    """The request that runs alone, or ran alone last.

    head: a head drafts, whose acceptance changes fast, so the number of drafts is chosen in every plan; that of a draft
          model is chosen in every plan while it does not draft
    """

    def __init__(self, draft_count: DraftCount, trials_by_kind: TrialsByKind, head: bool) -> None:
        self._draft_count, self._trials_by_kind, self._head = draft_count, trials_by_kind, head
        self.request_id = ""
        self.trials = trials_by_kind[0]  # trials of the request's kind
        self._known_trials = (0.0, 0.0)  # its last draft_trials
        self._choice_by_rate: dict[float, Choice] = {}  # by rounded acceptance

    def begin(self, request: Request, plan: int, alone: bool) -> None:
        """Begin to choose for another request at plan number `plan`. alone: a single row has run before it."""
        if alone:
            self.trials.earn(plan)
        self.request_id, self.trials = request.id, self._trials_by_kind[kind_of(request)]
        self.trials.begin(plan)

    def forget_choices(self) -> None:
        """Choose anew for every rate, since costs have changed."""
        self._choice_by_rate.clear()

    def choose(self, request: Request, choice: Choice, plan: int, room: int, refreshes: bool) -> Choice:
        """Return the number of drafts at plan number `plan`, up to `room`; `choice` is that of the last plan.

        refreshes: it is chosen anew even if nothing was learned since then.
        """
        trials = request.draft_trials
        settled = trials is self._known_trials or (choice.max_drafts > 0 and not self._head)
        if settled and not refreshes and not choice.measures:
            return choice
        self._known_trials = trials
        if self.trials.credit.balance < 0 and self.trials.wait_for_credit(plan):
            return Choice(0)
        rate = round(self.trials.rate_of(request), 2)
        known = self._choice_by_rate.get(rate)
        if known is None:
            known = self._draft_count.choose([rate], room, MIN_SINGLE_GAIN)
            if not known.measures:
                self._choice_by_rate[rate] = known
        return known
