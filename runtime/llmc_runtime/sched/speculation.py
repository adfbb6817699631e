"""Speculative decoding in the scheduler: how many drafted tokens a step verifies, by measured costs and acceptance.

Invariant: drafts only change how many tokens a step gives, never which ones, so every number of drafts is correct.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc_runtime.metrics import Counters
from llmc_runtime.sched.draft_costs import MIN_SINGLE_GAIN, Choice, DraftCount, expected_tokens
from llmc_runtime.sched.draft_stops import Stop, worth_verifying
from llmc_runtime.sched.draft_trials import Trials, TrialsByKind, kind_of
from llmc_runtime.sched.lookup_first import LookupFirst
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.sched.step import StepOutput, Work

PROBE_PERIOD = 64  # while drafting does not pay, one plan in so many verifies drafts of some rows to learn their rate
MODEL_PROBE_PERIOD = 512  # the same for a draft model, which must first compute the KV that it lacks; one row at a time
HEAD_FIRST_WAIT, HEAD_LAST_WAIT = 4, 128  # the same for the only row of a head: at first, and at most; doubles
MODEL_FIRST_WAIT = 32  # the same for the only row of a draft model: at first
ROWS_PER_PROBE = 16  # one row in so many is probed, other rows each time
WARM_UP_PLANS = 8  # plans before a probe in which a head computes its entries, without which it drafts worse
HOST_TRIES = 2  # plans in a row that try drafts of the host, since at the first one a step may be in flight
_MEMORY = 0.9  # weight of a row's past acceptance at each verification
_HEAD_MEMORY = 0.7  # the same for a head: its drafts are accepted where the text is easy, many in a row
_BRIEF_MEMORY = 0.5  # the same if drafting stops after unlikely drafts, so that a wrong estimate costs little
_UNVERIFIED_WEIGHT = 0.5  # weight of a draft that was not verified, as unlikely, in a row's past acceptance
_MIN_RATE = 0.01  # lowest rate of acceptance for which a limit is computed
_CHOICE_PERIOD = 16  # plans after which the number of drafts is chosen anew
_MEASURING_PERIOD = 4096  # plans after which costs are measured again
_PLAIN_PERIOD = 4  # one plan in so many is measured if it has no drafts and its cost is known
_IDLE_PERIOD = 16  # the same if nothing is to be decided
_PRIOR_WEIGHT = 2.0  # weight of the acceptance of all rows in the estimate of one row, in verifications


class Speculation:
    """Decides how many drafts to make and to verify. Constructed for each scheduler that drafts."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.config, self.draft_count = config, DraftCount(config.num_tokens, config.max_rows > 0)
        self.plans = self._rows = 0  # plans so far, and running requests of the last one
        self._choice = Choice(0)
        self._probes = 0  # rows of which this plan verifies a draft to measure acceptance
        self._looks_up = config.looks_up
        self._idle = self._looks_up  # nothing is to be decided for this plan (see begin_idle)
        self._found = False  # prompt lookup has found drafts for a row of the last step
        self._next_measuring = _MEASURING_PERIOD  # the plan at which costs are measured again
        self._has_model, self._memory = config.max_rows > 0, _MEMORY
        if config.stops:
            self._memory = _BRIEF_MEMORY
        elif config.head:
            self._memory = _HEAD_MEMORY
        self._choice_by_rate: dict[float, Choice] = {}  # of this period for a single row, by its rounded acceptance
        self._draft_cost, self._verification_costs = 0.0, list[float]()  # of this period; empty: not computed yet
        self._single_id, self._known_trials = "", (0.0, 0.0)  # of the single row's request: id, last draft_trials
        self._first_wait, self._last_wait = MODEL_FIRST_WAIT, MODEL_PROBE_PERIOD
        if config.head:
            self._first_wait, self._last_wait = HEAD_FIRST_WAIT, HEAD_LAST_WAIT
        self._trials_by_kind = TrialsByKind(lambda: self._first_wait)
        self._batch_trials = Trials(0)  # what drafting has gained and cost where the number is chosen for all rows
        self._single_trials = self._trials_by_kind[0]  # of the single row's kind
        self._probe_plan = 0  # the plan of the next probe of a draft model
        self._warm_plans = 0  # consecutive plans, this one included, in which a head only warms up for a probe
        self._idle_until = 0  # the plan before which nothing is to be decided for the single row, which does not draft
        self._lookup = LookupFirst() if config.looks_first else None
        self._alone = False  # a single request runs in this plan

    def begin_idle(self, running: Sequence[Request]) -> bool:
        """Begin a plan for which nothing is to be decided; otherwise return False, and leave it to `begin`.

        Nothing is if prompt lookup has found no drafts, or if the single row waits for its next trial of a model's.
        """
        plan = self.plans + 1
        if self._looks_up:
            self._idle = not self._found
        else:
            self._idle = plan < self._idle_until and len(running) == 1 and running[0].id == self._single_id
        if self._idle:
            self.plans, self._warm_plans = plan, 0
        return self._idle

    def begin(self, running: Sequence[Request], room: int) -> None:
        """Begin a plan in which these requests run, and whose step can verify up to `room` drafts in all."""
        self.plans += 1
        self._alone = len(running) == 1
        self._measure_again_in_time(len(running))
        self._probes = self._idle_until = 0
        if self.plans % _CHOICE_PERIOD == 0 or len(running) != self._rows:
            self._draft_cost, self._verification_costs = 0.0, []
        if self._looks_up:
            self._idle = not any(request.num_drafts for request in running)
            if self._idle:
                return
        if len(running) == 1 and self._has_model:
            self._choose_single(running[0], room)
        else:
            self._choose_for_all(running, room)

    def _measure_again_in_time(self, rows: int) -> None:
        """Let the costs of steps be measured again, every _MEASURING_PERIOD plans."""
        if self.plans >= self._next_measuring:
            self.draft_count.measure_again(rows)
            self._next_measuring = self.plans + _MEASURING_PERIOD

    def _choose_for_all(self, running: Sequence[Request], room: int) -> None:
        """Choose the number of drafts by the rates of all rows; if drafting does not pay, choose rows to probe."""
        rows, trials = len(running), self._batch_trials
        if rows and (self._choice.measures or rows != self._rows or self.plans % _CHOICE_PERIOD == 0):
            if self._rows == 1 and self._has_model:
                trials.begin(self.plans)
            self._rows = rows
            rates, affordable = [self._rate(request) for request in running], not trials.wait_for_credit(self.plans)
            self._choice = self.draft_count.choose(rates, room, may_measure=affordable)
        if trials.credit < 0:
            self._choice = Choice(0)
        if self._choice.max_drafts:
            if not self._choice.measures:
                self._next_probe(MODEL_PROBE_PERIOD)
        elif self._has_model:
            if self.plans >= self._probe_plan:
                self._probes = 1
                self._next_probe(MODEL_PROBE_PERIOD)
        elif self.plans % PROBE_PERIOD < (HOST_TRIES if self.config.host else 1):
            self._probes = max(1, rows // ROWS_PER_PROBE)

    def _next_probe(self, wait: int) -> None:
        """Let this many plans pass before the next probe of a draft model."""
        self._probe_plan = self.plans + wait

    def _choose_single(self, request: Request, room: int) -> None:
        """Choose the number of drafts of a draft model's only row, or whether to try them."""
        if self._rows != 1 or request.id != self._single_id:
            if self._rows == 1:
                self._single_trials.earn(self.plans)
            self._rows, self._single_id, self._choice = 1, request.id, Choice(0, measures=True)
            self._single_trials, self._warm_plans = self._trials_by_kind[kind_of(request)], 0
            self._single_trials.begin(self.plans)
            if self.config.head:
                # It may differ from those before it.
                self._wait_for_probe(max(self._first_wait, self._single_trials.wait // 16))
        self._choose_rate(request, room)
        if self._choice.max_drafts and not self._choice.measures:
            self._wait_for_probe(self._first_wait)
        if self._choice.max_drafts or self._choice.measures:
            self._warm_plans = 0
        else:
            self._wait_or_probe()

    def _wait_or_probe(self) -> None:
        """Probe the single row, whose drafts do not pay, or let it wait for that.

        A probe is paid from the credit of its kind, and so are the plans in which a head warms up for it.
        """
        trials, warm_up, cost = self._single_trials, 0, 0.0
        if self.config.head:
            warm_up, cost = WARM_UP_PLANS, self.draft_count.cost_of_entries(1)
        if not self._warm_plans and self.plans >= self._probe_plan - warm_up:
            if missing := trials.wait_for_credit(self.plans, warm_up * cost):
                self._next_probe(missing + warm_up)
        if self.plans >= self._probe_plan:
            self._probes, self._warm_plans = 1, 0
            self._wait_for_probe(min(2 * trials.wait, self._last_wait))
            return
        self._idle_until = self._probe_plan - warm_up
        if self.plans >= self._idle_until:
            self._warm_plans += 1
            trials.spend(cost)

    def _wait_for_probe(self, wait: int) -> None:
        self._single_trials.wait = wait
        self._next_probe(wait)

    def _choose_rate(self, request: Request, room: int) -> None:
        """Choose the number of drafts of the only row: with a head in every plan, as its acceptance changes fast."""
        trials, refreshes = request.draft_trials, self.plans % _CHOICE_PERIOD == 0
        if (trials is self._known_trials or not self.config.head) and not refreshes and not self._choice.measures:
            return  # nothing was learned since the last plan
        self._known_trials = trials
        if self._single_trials.credit < 0 and self._single_trials.wait_for_credit(self.plans):
            self._choice = Choice(0)
            return
        if refreshes:
            self._choice_by_rate.clear()
        rate = round(self._rate(request), 2)
        choice = self._choice_by_rate.get(rate)
        if choice is None:
            choice = self.draft_count.choose([rate], room, MIN_SINGLE_GAIN)
            if not choice.measures:
                self._choice_by_rate[rate] = choice
        self._choice = choice

    @property
    def wants(self) -> bool:
        """Whether drafts of some rows pay, or are to be tried, in this plan."""
        return not self._idle and (self._choice.max_drafts > 0 or self._probes > 0)

    @property
    def verifies(self) -> bool:
        """Whether this plan may verify drafts; those of a model were wanted when they were made."""
        return self._has_model or self.wants

    def plain(self, work: Sequence[Work]) -> bool:
        """Whether the draft model does nothing after the step planned now, and a head's entries are hardly of use."""
        for item in work:
            if item.propose or item.num_tokens > 1 or item.fill:
                return False
        return not self.config.head or self._probe_plan - self.plans > WARM_UP_PLANS

    def proposals(self, request: Request) -> int:
        """Return how many tokens the draft model drafts for a request."""
        most = self.choose(request, self.config.num_tokens)
        return self.config.num_tokens if most and self._stops else most

    def prefers_lookup(self, request: Request) -> bool:
        """Whether the head makes no drafts for a request if prompt lookup finds some."""
        lookup = self._lookup
        if lookup is None or not self._alone or self._choice.measures:
            return False
        if lookup.probes(self.plans):
            return True
        drafts = max(1, self._choice.max_drafts)
        of_head = expected_tokens(self._rate(request), drafts) / self.draft_count.relative_duration(1, drafts, drafts)
        return lookup.speed(request, self._costs()) >= of_head

    def drafts(self, request: Request, room: int) -> int:
        """Return how many of the drafts of the request's row to verify, up to `room`."""
        room = max(0, min(room, request.num_drafts))
        request.verifies_lookup = request.from_lookup
        if request.from_lookup:
            return room
        if room and self.config.looks_up:
            return self.choose(request, room)
        if request.likely and room:
            room = self._num_worthwhile(request, room)
        request.verified = request.likely[:room]
        return room

    def stop(self, request: Request) -> Stop | None:
        """Return when the draft model stops drafting for a request; None: when it has drafted what was planned."""
        if not self._stops:
            return None
        if not self._draft_cost:
            self._draft_cost = self.draft_count.cost_of_draft(max(1, self._rows))
        rate, cost = self._rate(request), self._draft_cost
        return Stop(self._trials_of(request).chances.of_rate(rate), cost / max(rate, cost, _MIN_RATE))

    @property
    def _stops(self) -> bool:
        """Whether drafting stops after unlikely drafts, whose number is not chosen to learn something."""
        return self.config.stops and self._choice.max_drafts > 0 and not self._choice.measures

    def _trials_of(self, request: Request) -> Trials:
        return self._single_trials if request.id == self._single_id else self._trials_by_kind[kind_of(request)]

    def _num_worthwhile(self, request: Request, room: int) -> int:
        """Return how many of the drafts of a request to verify, by the probabilities that the draft model gives."""
        if not self._stops:
            return room  # to learn whether they are accepted, or what verification costs
        stop = Stop(self._trials_of(request).chances.of_rate(self._rate(request)), 0.0)
        count = worth_verifying(stop, request.likely[:room], self._costs())
        if not count:
            trials, accepted = request.draft_trials
            chance = stop.chance(request.likely[0])
            request.draft_trials = (
                self._memory * trials + _UNVERIFIED_WEIGHT, self._memory * accepted + _UNVERIFIED_WEIGHT * chance,
            )  # fmt: skip
        return count

    def _costs(self) -> list[float]:
        """DraftCount.verification_costs of this period."""
        if not self._verification_costs:
            self._verification_costs = self.draft_count.verification_costs(max(1, self._rows), self.config.num_tokens)
        return self._verification_costs

    def num_masked_drafts(self, request: Request, room: int) -> int:
        """Return the number of drafts, up to `room`, whose following masks the next plan needs, of a guided request."""
        if request.from_lookup:
            return room
        if self._choice.max_drafts:
            return min(room, self._choice.drafts(self._rate(request)))
        return min(room, 1) if (self.plans + 1) % PROBE_PERIOD < HOST_TRIES else 0

    def record_excluded(self, request: Request) -> None:
        """Record that the guide of a request excludes its first draft."""
        if self._lookup is not None and request.from_lookup:
            self._lookup.record(request, 1, 0)
        else:
            self._record(request, 1, 0)

    def choose(self, request: Request, room: int) -> int:
        """Return the number of drafts that pays for a request, up to `room`."""
        if self._choice.max_drafts:
            return min(room, self._choice.drafts(self._rate(request)))
        if not self._probes or self.plans - request.last_probe < self._plans_between_probes:
            return 0
        self._probes -= 1
        request.last_probe = self.plans
        return min(room, 1)

    @property
    def _plans_between_probes(self) -> int:
        """The minimum number of plans between two probes of a row."""
        return 0 if self.config.head and self._rows == 1 else PROBE_PERIOD * min(ROWS_PER_PROBE, self._rows)

    def _rate(self, request: Request) -> float:
        """The estimated probability that a draft of the request is accepted."""
        trials, accepted = request.draft_trials
        return (accepted + _PRIOR_WEIGHT * self._trials_of(request).acceptance) / (trials + _PRIOR_WEIGHT)

    def learn(
        self, work: Sequence[Work], requests: Sequence[Request], output: StepOutput, seconds: float, counters: Counters
    ) -> None:
        """Take the duration of the oldest step in flight and its drafts, before it is committed."""
        if self._looks_up:
            self._take_proposed(requests, output.proposed)
        unmeasured = self._idle and self.plans % _IDLE_PERIOD and not output.accepted
        if unmeasured and not self._drafted(work, requests, output):
            return
        for index, likely in output.likely.items():
            requests[index].likely, requests[index].num_drafts = likely, len(likely)
        wait = _IDLE_PERIOD if self._idle else 1 if self._choice.measures else _PLAIN_PERIOD
        if output.accepted or output.likely or self.plans % wait == 0:
            self._measure(work, requests, output, seconds)
        for index, tokens in output.accepted.items():
            request, drafts, accepted = requests[index], work[index].drafts, len(tokens)
            if self._lookup is not None and request.verifies_lookup:
                self._lookup.record(request, drafts, accepted)
            else:
                self._calibrate(request, drafts, accepted)
                self._record(request, drafts, accepted)
            counters.drafted(drafts, accepted)
        if self._lookup is not None:
            for index, (request, found) in enumerate(zip(requests, output.proposed)):
                count = found if self._alone and index not in output.likely else 0
                self._lookup.take(request, count, self._costs(), self.plans)

    def _drafted(self, work: Sequence[Work], requests: Sequence[Request], output: StepOutput) -> bool:
        """Whether the draft model or head of a single row has worked, or prompt lookup before it has found drafts."""
        if self._looks_up:
            return False
        item = work[0]
        return item.propose > 0 or item.fill > 0 or requests[0].from_lookup or any(output.proposed)

    def _take_proposed(self, requests: Sequence[Request], proposed: Sequence[int]) -> None:
        """Take how many drafts prompt lookup has found for each row."""
        self._found = False
        for request, count in zip(requests, proposed):
            request.num_drafts = count
            if count:
                self._found = True

    def _measure(self, work: Sequence[Work], requests: Sequence[Request], output: StepOutput, seconds: float) -> None:
        """Record the duration of a step, unless it has a prompt."""
        verified = proposed = fill = 0
        for index, item in enumerate(work):
            if item.num_tokens > 1 + item.drafts:
                return
            verified += item.drafts
            proposed += len(output.likely.get(index, ())) if self.config.stops else item.propose
            fill += item.fill
        rows = len(work)
        if self._warm_plans and not (verified or proposed or fill):
            self.draft_count.entries.record(rows, 0, seconds)
            return
        if not self._has_model:
            self.draft_count.costs.record(rows, verified / rows, seconds)
            proposed = verified  # they cost nothing apart
        elif not fill:
            self.draft_count.learn(rows, verified / rows, proposed / rows, seconds, self.config.stops)
        if not (verified or proposed or fill):
            return
        steps = self.draft_count.relative_duration(rows, verified / rows, proposed / rows)
        if fill and (plain := self.draft_count.costs.seconds(rows, 0)):
            steps = seconds / plain
        tokens = 1 + sum(map(len, output.accepted.values())) / rows
        if rows > 1 or not self._has_model:
            self._batch_trials.record_step(tokens, steps)
        elif not (requests[0].verifies_lookup or self._choice.measures):
            self._single_trials.record_step(tokens, steps)

    def _calibrate(self, request: Request, drafts: int, accepted: int) -> None:
        """Record which drafts were accepted, by the probabilities that the draft model gave them."""
        chances, rate = self._trials_of(request).chances, self._rate(request)
        for index, probability in enumerate(request.verified[: min(drafts, accepted + 1)]):
            chances.record(rate, probability, index < accepted)

    def _record(self, request: Request, drafts: int, accepted: int) -> None:
        """Record that the first `accepted` of a number of drafts were accepted."""
        trials = accepted + (accepted < drafts)
        weight, past = request.draft_trials
        request.draft_trials = (self._memory * weight + trials, self._memory * past + accepted)
        self._trials_of(request).record_drafts(trials, accepted)
        self._idle_until = 0  # a trial may have succeeded
