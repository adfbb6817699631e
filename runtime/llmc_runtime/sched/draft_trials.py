"""Accounts for what drafting has gained and cost in requests of one kind, so that trials of drafts cost little.

The unit is the duration of a step that decodes without drafts. A step that drafts or verifies drafts gains its tokens
less its measured duration; a step in which a head computes its entries before a trial loses the additional time.
Drafting is paid from a credit, to which plans and gains add. While it does not suffice, nothing is drafted: drafts that
save no time cost at most _TRIAL_SHARE of the time of plain decoding, less the longer they save none, and the initial
credit once. Steps of a single row that measure costs are not charged, as they are few. Drafts that prompt lookup finds
for a head are paid from a second credit. A head's entries of prompts have a credit of their own (see prompt_entries);
once that is spent, they are paid from the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from llmc_runtime.sched.draft_stops import Chances
from llmc_runtime.sched.request import Request

_TRIAL_SHARE = 0.002  # maximum share of the decoding time that trials may cost
_INITIAL_CREDIT = 6.0  # what trials may cost before anything was measured
_INITIAL_LOOKUP_CREDIT = 4.0  # the same for drafts that prompt lookup makes
_MAX_CREDIT = 32.0
_HALVING_LOSS = 32.0  # net loss at which _TRIAL_SHARE is halved
_MAX_NET_LOSS = 96.0  # largest net loss that counts
_MEMORY = 0.98  # weight of the past acceptance at each verification
_PRIOR_WEIGHT = 2.0  # weight of the acceptance of all requests in the estimate of one, in verifications
TRIAL_COST = 1.0  # what a trial is expected to cost
_MAX_LOSS = 4.0  # maximum loss of a step that counts; a longer one was interrupted
_MAX_MEASURING_LOSS = 1.0  # maximum loss that counts while costs are measured: first steps load programs


def kind_of(request: Request) -> int:
    """Return the kind of a request: guided, greedy, or its temperature in steps of a half, up to 2."""
    if request.guide is not None:
        return -1
    temperature = request.params.temperature
    return 0 if temperature <= 0 else min(4, ceil(2 * temperature))


@dataclass(slots=True)
class Credit:
    """The time that drafts may cost without a gain, in steps.

    balance: what they may cost now; below 0 after a step that has lost more. net_loss: the losses of steps less later
    gains, from 0 to _MAX_NET_LOSS; the larger it is, the less each plan adds to the balance.
    """

    balance: float
    net_loss: float = 0.0

    @property
    def share(self) -> float:
        """The time that each plan adds to the balance."""
        return _TRIAL_SHARE / (1.0 + self.net_loss / _HALVING_LOSS)

    def earn(self, plans: int) -> None:
        """Add what this number of plans is worth."""
        self.balance = min(_MAX_CREDIT, self.balance + self.share * plans)

    def record(self, gain: float) -> None:
        """Record what a step has gained, or lost if it is negative."""
        self.balance = min(_MAX_CREDIT, self.balance + gain)
        self.net_loss = max(0.0, min(_MAX_NET_LOSS, self.net_loss - gain))

    def wait_for(self, balance: float) -> int:
        """Return after how many plans without drafts there is such a balance; 0 if there is now."""
        return max(0, ceil((balance - self.balance) / self.share))


@dataclass(slots=True)
class Trials:
    """The measurements of all requests of one kind.

    trials, accepted: drafts verified lately, and accepted. wait: plans from the last trial to the next. credit,
    lookup_credit: see above. chances: how often drafts are accepted by their probabilities.
    """

    wait: int
    trials: float = 0.0
    accepted: float = 0.0
    credit: Credit = field(default_factory=partial(Credit, _INITIAL_CREDIT))
    lookup_credit: Credit = field(default_factory=partial(Credit, _INITIAL_LOOKUP_CREDIT))
    chances: Chances = field(default_factory=Chances)
    _earned_until: int = 0  # the plan up to which plans were added to the credits

    @property
    def acceptance(self) -> float:
        """The estimated probability that a draft is accepted."""
        return (self.accepted + 1) / (self.trials + 2)

    def rate_of(self, request: Request) -> float:
        """Return the estimated probability that a draft of the request is accepted."""
        trials, accepted = request.draft_trials
        return (accepted + _PRIOR_WEIGHT * self.acceptance) / (trials + _PRIOR_WEIGHT)

    def record_drafts(self, trials: int, accepted: int) -> None:
        """Record how many of the drafts that were compared were accepted."""
        self.trials, self.accepted = _MEMORY * self.trials + trials, _MEMORY * self.accepted + accepted

    def earn(self, plan: int) -> None:
        """Add to the credits what the plans up to this one, after the last call, are worth."""
        plans, self._earned_until = plan - self._earned_until, plan
        self.credit.earn(plans)
        self.lookup_credit.earn(plans)

    def wait_for_credit(self, plan: int, more: float = 0.0) -> int:
        """Return after how many plans a trial can be paid, at plan number `plan`; 0 if it can be now.

        more: what is spent on it before it begins.
        """
        self.earn(plan)
        return self.credit.wait_for(TRIAL_COST + more)

    def wait_for_lookup(self, plan: int) -> int:
        """Return after how many plans drafts that were looked up can be paid, at plan number `plan`; 0 if now."""
        self.earn(plan)
        return self.lookup_credit.wait_for(0.0)

    def record_step(self, plan: int, tokens: float, steps: float, looked_up: bool, measures: bool) -> None:
        """Record, at plan number `plan`, a step that gave `tokens` tokens a row and took as long as `steps` steps
        without drafts.

        looked_up: it verified drafts that prompt lookup had found for a head. measures: its number of drafts was chosen
        to measure what it costs.
        """
        self.earn(plan)  # the plans before it add as much as before its loss
        gain = max(-_MAX_MEASURING_LOSS if measures else -_MAX_LOSS, tokens - steps)
        (self.lookup_credit if looked_up else self.credit).record(gain)

    def charge(self, steps: float) -> None:
        """Take from the credit what a prompt's entries took, but not below 0: their cost may have been unknown."""
        balance = self.credit.balance
        self.credit.balance = max(min(balance, 0.0), balance - steps)

    def begin(self, plan: int) -> None:
        """Begin to count plans: a request of this kind runs alone from this plan on."""
        self._earned_until = plan


class TrialsByKind(dict[int, Trials]):
    """The trials of each kind of request that runs alone; those of a new kind wait for `first_wait()` plans.

    batch: the trials of several requests that run together.
    """

    def __init__(self, first_wait: Callable[[], int], batch: Trials) -> None:
        super().__init__()
        self._first_wait, self.batch = first_wait, batch

    def of(self, requests: Sequence[Request]) -> Trials:
        """Return the trials whose credit pays for a step of these requests."""
        return self[kind_of(requests[0])] if len(requests) == 1 else self.batch

    def __missing__(self, kind: int) -> Trials:
        trials = self[kind] = Trials(self._first_wait())
        return trials
