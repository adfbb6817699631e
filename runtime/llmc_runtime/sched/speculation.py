"""Speculative decoding in the scheduler: how many drafted tokens a step verifies, by measured costs and acceptance.

Invariant: drafts only change how many tokens a step gives, never which ones, so every number of drafts is correct.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc_runtime.metrics import Counters
from llmc_runtime.sched.draft_costs import Choice, DraftCount, expected_tokens
from llmc_runtime.sched.draft_stops import Stop, worth_verifying
from llmc_runtime.sched.draft_trials import Trials, TrialsByKind, kind_of
from llmc_runtime.sched.lookup_first import NEVER, LookupFirst
from llmc_runtime.sched.plain_checks import PlainChecks
from llmc_runtime.sched.prompt_entries import PromptEntries
from llmc_runtime.sched.recent_steps import STEPS, RecentSteps
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.single_row import SingleRow
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.sched.step import StepOutput, Work, prompt_tokens

# While drafting does not pay, some plans probe: they verify drafts to learn the rate of acceptance.
PROBE_PERIOD = 64  # plans between two probes of drafts made on the host; a probe verifies one row in ROWS_PER_PROBE
# Plans between two probes of a head, which verify all rows, or of a draft model, which lacks KV: they verify one row.
MODEL_PROBE_PERIOD = 512
# Plans between two probes if there is a single row: at first, and at most; the number doubles with each probe.
HEAD_WAITS = 4, 128
MODEL_WAITS = 32, MODEL_PROBE_PERIOD
ROWS_PER_PROBE = 16  # a probe of drafts made on the host verifies one row in so many, other rows each time
WARM_UP_PLANS = 8  # plans before a probe in which a head computes its entries, without which it drafts worse
HOST_TRIES = 2  # plans in a row that try drafts of the host, since at the first one a step may be in flight
_MEMORY = 0.9  # weight of a row's past acceptance at each verification
_HEAD_MEMORY = 0.7  # this weight for a head: its drafts are accepted where the text is easy, many in a row
_BRIEF_MEMORY = 0.5  # this weight if drafting stops after unlikely drafts, so that a wrong estimate costs little
_UNVERIFIED_WEIGHT = 0.5  # weight of a draft that was not verified, as unlikely, in a row's past acceptance
_MIN_RATE = 0.01  # lowest rate of acceptance for which a limit is computed
_CHOICE_PERIOD = 16  # plans after which the number of drafts is chosen anew
_MEASURING_PERIOD = 16384  # plans after which costs are measured again
_PLAIN_PERIOD = 4  # one plan in so many is measured if it has no drafts and its cost is known
_IDLE_PERIOD = 32  # one plan in so many is measured while prompt lookup finds nothing
_LONGEST_IDLE = 64  # plans of several rows after which the number of drafts is chosen anew although nothing was learned


class Speculation:
    """Decides how many drafts to make and to verify. Constructed for each scheduler that drafts."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.config, self.draft_count = config, DraftCount(config.num_tokens, config.max_rows > 0)
        self.plans = self._rows = 0  # plans so far, and running requests of the last one
        self._choice, self._refreshes = Choice(0), False  # and whether this plan chooses anew
        self._next_choice = 0  # the plan at which it does so at the latest
        self._probes = 0  # rows of which this plan verifies a draft to measure acceptance
        self._looks_up = config.looks_up
        self._idle = self._looks_up  # nothing is to be decided for this plan (see begin_idle)
        self.unmeasured = False  # nor is the step measured, unless it has a prompt or drafts
        self._idle_until = NEVER if self._looks_up else 0  # the plan before which nothing is to be decided
        self._unmeasured_until = 0  # the plan before which steps are not measured
        self._ignores_until = 0  # the plan before which what a head's prompt lookup finds is not worth verifying
        self._next_measuring = _MEASURING_PERIOD  # the plan at which costs are measured again
        self._has_model = config.max_rows > 0
        self._memory = _BRIEF_MEMORY if config.stops else _HEAD_MEMORY if config.head else _MEMORY
        self._draft_cost, self._verification_costs = 0.0, list[float]()  # empty: not computed yet
        self._costs_changed = False  # whether costs have changed since the two above were computed
        self._first_wait, self._last_wait = HEAD_WAITS if config.head else MODEL_WAITS
        self._trials_by_kind = TrialsByKind(lambda: self._first_wait, Trials(MODEL_PROBE_PERIOD))
        self._batch_trials = self._trials_by_kind.batch  # where the number of drafts is chosen for all rows
        self._single = SingleRow(self.draft_count, self._trials_by_kind, bool(config.head))
        self._probe_plan = 0  # the plan of the next probe of a draft model or head
        self._promising = False  # the last step has verified drafts and was faster than one without
        self._warms_up = False  # a head computes its entries in this plan, for the next probe
        self._last_id = ""  # request id of the last row
        self._lookup = LookupFirst() if config.looks_first else None
        self._alone = False  # a single request runs in this plan
        self._recent, self._checks = RecentSteps(), PlainChecks()
        self.prompts = PromptEntries(config.skips_prompts, self._trials_by_kind)

    def begin_idle(self) -> bool:
        """Begin a plan for which nothing is to be decided; otherwise return False, and leave it to `begin`.

        Nothing is if prompt lookup has found no drafts, or if the rows wait for the next trial of a model's.
        """
        plan = self.plans + 1
        self._idle = plan < self._idle_until
        if self._idle:
            self.plans, self.unmeasured = plan, plan < self._unmeasured_until
        return self._idle

    def wake(self) -> None:
        """Let the next plan decide, since a request of a draft model or head begins or ceases to run."""
        self._idle_until = 0

    def begin(self, running: Sequence[Request], room: int) -> None:
        """Begin a plan in which these requests run, and whose step can verify up to `room` drafts in all."""
        self.plans += 1
        self._alone, self._idle, self.unmeasured = len(running) == 1, False, False
        self._probes = self._idle_until = self._ignores_until = 0
        if not running:
            return
        if self.plans >= self._next_measuring:
            self.draft_count.measure_again(len(running))
            self._next_measuring = self.plans + _MEASURING_PERIOD
        self._refreshes = self.plans >= self._next_choice or len(running) != self._rows
        if len(running) != self._rows or running[-1].id != self._last_id:
            self._recent.clear()
        if self._refreshes:
            self._next_choice = self.plans + _CHOICE_PERIOD
            if self._costs_changed or len(running) != self._rows:
                self._draft_cost, self._verification_costs, self._costs_changed = 0.0, [], False
                self._single.forget_choices()
        if self._looks_up:
            self._idle = not any(request.num_drafts for request in running)
            if self._idle:
                return
        self._costs_changed |= self._checks.end(self.plans, self.draft_count.costs)
        if self._alone and self._has_model:
            self._choose_single(running[0], room)
        else:
            self._choose_for_all(running, room)
        self._checks.begin(self.plans, self._rows, self._has_model and self.wants)
        self._last_id = running[-1].id

    def _choose_for_all(self, running: Sequence[Request], room: int) -> None:
        """Choose the number of drafts by the rates of all rows; if drafting does not pay, choose rows to probe."""
        rows, trials = len(running), self._batch_trials
        if self._choice.measures or self._refreshes or running[-1].id != self._last_id:
            if self._rows == 1 and self._has_model:
                trials.begin(self.plans)
            self._rows = rows
            rates, affordable = [self._rate(request) for request in running], not trials.wait_for_credit(self.plans)
            self._choice = self.draft_count.choose(rates, room, may_measure=affordable)
        if trials.credit.balance < 0:
            self._choice = Choice(0)
        if self._has_model:
            if self._choice.max_drafts or self._choice.measures:
                self._warms_up = False
                if not self._choice.measures:
                    self._probe_plan = self.plans + MODEL_PROBE_PERIOD
            else:
                self._wait_or_probe(trials, _LONGEST_IDLE)
        elif not self._choice.max_drafts and self.plans % PROBE_PERIOD < (HOST_TRIES if self.config.host else 1):
            self._probes = max(1, rows // ROWS_PER_PROBE)

    def _choose_single(self, request: Request, room: int) -> None:
        """Choose the number of drafts of a draft model's only row, or whether to try them."""
        single = self._single
        if self._rows != 1 or request.id != single.request_id:
            single.begin(request, self.plans, alone=self._rows == 1)
            self._rows, self._choice, self._warms_up = 1, Choice(0, measures=True), False
            if self.config.head:
                # It may differ from those before it.
                self._wait_for_probe(max(self._first_wait, single.trials.wait // 16))
        self._choice = single.choose(request, self._choice, self.plans, room, self._refreshes)
        if self._choice.max_drafts and not self._choice.measures:
            self._wait_for_probe(self._first_wait)
        if self._choice.max_drafts or self._choice.measures:
            self._warms_up = False
        else:
            self._wait_or_probe(self._single.trials, MODEL_PROBE_PERIOD)

    def _wait_or_probe(self, trials: Trials, longest: int) -> None:
        """Probe the rows, whose drafts do not pay, or let them wait for that.

        A probe is paid from the credit of `trials`, and so are the plans in which a head warms up for it. One whose
        drafts gained more tokens than they cost is followed by another one at once.
        """
        warm_up, cost = 0, 0.0
        if self.config.head:
            warm_up, cost = WARM_UP_PLANS, self.draft_count.cost_of_entries(self._rows)
        promising, self._promising = self._promising, False
        if promising:
            self._probe_plan = self.plans
        elif not self._warms_up and (missing := trials.wait_for_credit(self.plans, warm_up * cost)):
            if self.plans >= self._probe_plan - warm_up:
                missing = max(missing, PROBE_PERIOD)
            self._probe_plan = max(self._probe_plan, self.plans + missing + warm_up)
        if self.plans >= self._probe_plan:
            self._probes, self._warms_up = self._rows if self.config.head else 1, False
            if not promising:
                trials.wait = min(2 * trials.wait, self._last_wait if self._rows == 1 else MODEL_PROBE_PERIOD)
            self._probe_plan = self.plans + trials.wait
            return
        begins = self._probe_plan - warm_up
        self._warms_up, self._unmeasured_until = self.plans >= begins, 0
        self._idle_until = self._probe_plan if self._warms_up else min(begins, self.plans + longest)
        if not self._warms_up and self.draft_count.costs.settled_plain(self._rows):
            self._unmeasured_until = self._idle_until - STEPS

    def _wait_for_probe(self, wait: int) -> None:
        """Let this many plans pass before the next probe of the single row."""
        self._single.trials.wait, self._probe_plan = wait, self.plans + wait

    @property
    def wants(self) -> bool:
        """Whether drafts of some rows pay, or are to be tried, in this plan."""
        return not (self._idle or self._checks.active) and (self._choice.max_drafts > 0 or self._probes > 0)

    @property
    def verifies(self) -> bool:
        """Whether this plan may verify drafts; those of a model were wanted when they were made."""
        return self._has_model or self.wants

    def plain(self, work: Sequence[Work], requests: Sequence[Request] = ()) -> bool:
        """Whether no draft model runs after the step planned now, and a head's entries are not worth computing in it.

        requests: those of `work`.
        """
        drafts = any(item.drafts or item.propose or item.fill for item in work)
        if drafts or any(item.num_tokens > 1 for item in work):
            return self.prompts.skips(work, requests, drafts or self._warms_up, self.plans)
        if self._checks.active or (self._choice.measures and not self._choice.max_drafts):
            return True  # to measure steps without drafts as they are while nothing is drafted
        return not self.config.head or self._probe_plan - self.plans > WARM_UP_PLANS

    def proposals(self, request: Request) -> int:
        """Return how many tokens the draft model drafts for a request."""
        num_drafts = 0 if self._checks.active else self.choose(request, self.config.num_tokens)
        return self.config.num_tokens if num_drafts and self._stops else num_drafts

    def prefers_lookup(self, request: Request) -> bool:
        """Whether the head makes no drafts for a request if prompt lookup finds some."""
        lookup = self._lookup
        if lookup is None or not self._alone or self._choice.measures or self._single.trials.lookup_credit.balance < 0:
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
        return self._single.trials if request.id == self._single.request_id else self._trials_by_kind[kind_of(request)]

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
        """DraftCount.verification_costs of the last rows."""
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
        period = 0 if self.config.head else PROBE_PERIOD * min(ROWS_PER_PROBE, self._rows)
        if not self._probes or self.plans - request.last_probe < period:
            return 0
        self._probes -= 1
        request.last_probe = self.plans
        return min(room, 1)

    def _rate(self, request: Request) -> float:
        return self._trials_of(request).rate_of(request)

    def learn(
        self, work: Sequence[Work], requests: Sequence[Request], output: StepOutput, seconds: float, counters: Counters
    ) -> None:
        """Take the duration of the oldest step in flight and its drafts, before it is committed."""
        lookup_found = self.plans >= self._ignores_until and any(output.proposed)
        if self.unmeasured and not (lookup_found or output.accepted or output.likely or self.prompts.in_flight):
            return
        if self._looks_up:
            self._idle_until, self._unmeasured_until = 0 if lookup_found else NEVER, self.plans + _IDLE_PERIOD
            for request, count in zip(requests, output.proposed):
                request.num_drafts = count  # found by prompt lookup
        if self.prompts.in_flight:
            self.prompts.ended(work, requests, seconds, self.draft_count.costs.seconds(len(work), 0))
        for index, likely in output.likely.items():
            requests[index].likely, requests[index].num_drafts = likely, len(likely)
        period = 1 if self._idle or self._choice.measures or self._has_model else _PLAIN_PERIOD
        if output.accepted or output.likely or not (self.unmeasured or self.plans % period):
            self._measure(work, requests, output, seconds)
        for index, tokens in output.accepted.items():
            request, drafts, accepted = requests[index], work[index].drafts, len(tokens)
            if self._lookup is not None and request.verifies_lookup:
                self._lookup.record(request, drafts, accepted)
            else:
                self._trials_of(request).chances.record_run(self._rate(request), request.verified[:drafts], accepted)
                self._record(request, drafts, accepted)
            counters.drafted(drafts, accepted)
        if self._lookup is not None and lookup_found:
            trials = self._single.trials if self._alone and len(work) == 1 else None
            self._ignores_until = self._lookup.take_found(requests, output, trials, self._costs(), self.plans)

    def _measure(self, work: Sequence[Work], requests: Sequence[Request], output: StepOutput, seconds: float) -> None:
        """Record the duration of a step, unless it has a prompt, and what the step has gained or lost."""
        verified, fill, prompt = sum(item.drafts for item in work), any(item.fill for item in work), prompt_tokens(work)
        # If drafting can stop early, the output says how many drafts were made.
        proposed = sum(map(len, output.likely.values()) if self.config.stops else (item.propose for item in work))
        rows, drafts = len(work), bool(verified or proposed or fill)
        if self._idle and self._has_model and not (drafts or prompt or self._warms_up):
            self._recent.add(self.plans, seconds)
        if self._checks.active and not (drafts or prompt):
            self._checks.add(seconds)
        self._costs_changed |= drafts
        if drafts or self._warms_up:
            seconds *= self._recent.factor(self.plans, self.draft_count.costs.settled_plain(rows))
        if not self._has_model:
            proposed = verified  # they cost nothing apart
            if not prompt:
                self.draft_count.costs.record(rows, verified / rows, seconds)
        elif self._warms_up and not (drafts or prompt):
            self.draft_count.entries.record(rows, 0, seconds)
        elif not (fill or prompt) and (drafts or self._idle or (self._choice.measures and not self._choice.max_drafts)):
            self.draft_count.learn(rows, verified / rows, proposed / rows, seconds, self.config.stops)
        if not drafts and (prompt or not self._warms_up):
            return
        measured = None if prompt else seconds
        steps = self.draft_count.gross_duration(rows, verified / rows, proposed / rows, measured, fill)
        trials = self._single.trials if self._has_model and rows == 1 else self._batch_trials
        tokens = 1 + sum(map(len, output.accepted.values())) / rows
        looked_up = verified > 0 and requests[0].verifies_lookup
        if trials is self._batch_trials or looked_up or not self._choice.measures:  # a single row measures few steps
            trials.record_step(self.plans, tokens, steps, looked_up, self._choice.measures)
        self._promising = verified > 0 and not looked_up and tokens > steps

    def _record(self, request: Request, drafts: int, accepted: int) -> None:
        """Record that the first `accepted` of a number of drafts were accepted."""
        trials = accepted + (accepted < drafts)
        weight, past = request.draft_trials
        request.draft_trials = (self._memory * weight + trials, self._memory * past + accepted)
        self._trials_of(request).record_drafts(trials, accepted)
        self._idle_until = 0  # a trial may have succeeded
