"""The scheduler: chooses which requests compute how many tokens in the next step, and on which pages.

There is one token budget per step and no prefill or decode phase: every request's computed tokens catch up with its
known tokens, running requests first, then waiting ones as rows and pages allow (the scheme of vLLM's V1 scheduler).
Invariants: `running` is sorted by key, so its first request runs in every step and is preempted last. The pages of a
running request cover its planned tokens and, from admission, all tokens known then. A chunk of a prompt leaves a token
of the budget to each request after it that decodes: prompts that are admitted late may stand before these by key.

Steps in flight. A step is planned while up to depth - 1 earlier ones run, whose tokens the host does not know yet: a
request counts them in `num_total`, and the device feeds them to the next step. This is correct because *the device
applies the changes and the work of all steps in the order in which they were planned*. It follows, by subject:
- Reuse: a row or page that is freed may be reused by the next plan: a step in flight that uses it completes before its
  new owner uses it. A row is rebuilt by its RowInit. Of a page, the owner reads only positions that it has written
  since it got the page, except for published pages.
- Published pages: a page is published at commit: all its tokens are known, and the step that completed it has run. Its
  owner writes only after it, so no step in flight writes a published page, not even for a request that has ended
  meanwhile.
- End of a request: if its last token is in flight by length, it gets no further work. If it ends otherwise (stop id,
  stop string, abort), the output of its steps in flight is dropped: they write only to its row and its private pages.
- Preemption: the request keeps its tokens. A token in flight still reaches it at commit, and may end it. It is admitted
  again only when none is in flight, so its RowInit has all tokens and no output is assigned to a later step.
- Rollback: rollback() returns every request of the steps in flight to `waiting`: nothing relies on changes that were
  dropped.
- Logits and scores: every request in a step has a row of logits, for its last token. A request whose prompt is scored
  needs one row per token of its chunk. It gets the rows that the step's other requests do not need, minus one if
  another tenant waits. Scores are read at commit and survive a preemption. Tokens not scored yet are never taken from
  the prefix cache.
- Masks (see guided_requests): the mask of a guided request depends on its tokens. A step planned before they are known
  is open: it computes its logits, and samples when guide() has given the masks, after all earlier steps are committed.
  Nothing is planned after an open step. A row whose mask is late samples without it, and is rebuilt without that token.
  The same holds for the masks after drafts, which the host learns at commit (RowMasks.look).
- Drafts (see speculation): for a request with drafted tokens, `num_total` and `num_planned` are upper bounds, which
  count all drafts of its steps in flight as accepted. Commit subtracts the rejected ones and frees the pages after
  `num_planned`: no step in flight writes to them, since the device places tokens after those that it accepted.
- Drafts of the host (see host_drafts): the step that verifies them places them, and is planned when no step is in
  flight.
- Drafts of a model (see draft_planner): it writes KV and tokens after `num_planned`, for as many tokens as its plan
  proposes. The pages of a running request cover them, too.
- Drafts of a head: its entry of a position depends on the token that follows. A step writes that of the position before
  its first token, perhaps in a published page that other requests share. Only drafts depend on it.
- Recurrent layers (see row_snapshots): a layer has one state per row, which cannot go back: of a step whose tokens are
  dropped because its mask was late, the row starts from a snapshot or from its first token again.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.guided_requests import known_mask, max_masked_drafts, may_sample, take_drafts
from llmc_runtime.sched.live_requests import LiveRequests
from llmc_runtime.sched.request import Request, RequestDelta, Status, add_scores
from llmc_runtime.sched.request_init import init_request
from llmc_runtime.sched.scheduler_config import POLICIES, SchedulerConfig
from llmc_runtime.sched.step import RowMasks, RowPages, Step, StepOutput, Work
from llmc_runtime.sched.token_guide import mask_of
from llmc_runtime.sched.waiting_queue import MAX_ADMITTED_TOKENS, last_of_most_served

if TYPE_CHECKING:
    from llmc_runtime.sched.host_draft import Draft
    from llmc_runtime.sched.speculation import Speculation

_RUNNING, _FINISHED = Status.RUNNING, Status.FINISHED


class Scheduler(LiveRequests):
    """`next` plans a step, `commit` takes the output of the oldest step in flight, `rollback` drops them all.

    depth:  maximum number of steps in flight; at 1 each is committed before the next is planned
    seeds:  returns 64 random bits for a request without a seed; by default from the system
    clock:  returns seconds
    draft:  drafts on the host; None if `config.speculation` names another method
    """

    def __init__(
        self,
        config: SchedulerConfig,
        seeds: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        draft: Draft | None = None,
    ) -> None:
        super().__init__(config, clock, draft)
        self.depth = 1
        self._seeds = seeds or partial(random.SystemRandom().getrandbits, 64)
        self._policy = POLICIES[config.policy]
        self._watermark_pages = int(config.watermark * config.num_pages)
        self._arrivals = 0
        self._free_logits = 0  # rows of logits that the step being planned does not use yet
        self._only_decodes = True  # the step being planned computes the next token of each row, without drafts
        self._lacked_pages = False  # whether the last admission lacked pages
        self._full_mask = mask_of(None, config.vocab_size)
        self._lookup_drafts = 0 if config.speculation is None else config.speculation.proposals

    def add_eos(self, token_ids: Iterable[int]) -> None:
        """Let these tokens end texts, too. Called before the first request."""
        known = [i for i in token_ids if 0 <= i < self.config.vocab_size]
        self.config = replace(self.config, eos_token_ids=tuple(dict.fromkeys((*self.config.eos_token_ids, *known))))

    def add(self, request: Request) -> None:
        """Queue a new request. Raises LlmcError E601 to E607 if it can never run; then nothing changes."""
        if request.id in self.requests or request.status is not Status.NEW:
            raise LlmcError("E607", f"request {request.id!r} was added already", "use a unique id for each request")
        init_request(request, self.config, self._seeds())
        self._arrivals += 1
        request.key = (self._policy(request), self._arrivals)
        request.chain.append(self.prefix.root(request.cache_salt))
        request.status = Status.WAITING
        self.requests[request.id] = request
        self.guided.add(request)
        request.arrived = request.queued = self.clock()
        self.waiting.enter(request)
        self.waiting.add(request)

    def next(self) -> Step:
        """Plan the next step. It is empty, and not in flight, if no request can run now."""
        if len(self._in_flight) >= self.depth:
            raise RuntimeError("the last step was neither committed nor rolled back")
        step = Step()
        needs_all_tokens = self.host_drafts is not None and self.host_drafts.wanted
        if self._in_flight and (needs_all_tokens or self._in_flight[-1][0].open):
            return step
        began = self.clock()
        self.pool.begin_step()
        self.discarded.free_some()
        self._end_guided()
        planned: list[Request] = []
        if self.waiting and (self._lacked_pages or not self.free_rows):
            self._share_rows(began)
        budget, preempted = self._plan_running(step, planned)
        if not preempted and self.waiting:
            self._admit(step, planned, budget)
        if self.guided:
            self.guided.fill(step, planned, self._lookup_drafts, self._full_mask)
        if planned:
            if self.snapshots is not None:
                self.snapshots.plan(step, planned)
            step.plain = self.planner is None or self.planner.plain(step, planned, self._only_decodes)
            self._in_flight.append((step, planned))
            self.timer.planned(began)
        return step

    def look(self) -> None:
        """Let the guides compute masks after drafts, which the next plan or the open step needs."""
        if self.speculation is not None:
            self.guided.look(self.speculation, self.host_drafts)

    def guide(self) -> list[RowMasks] | None:
        """Close the oldest step in flight: return the masks that it lacks, None if it is not open."""
        if not self._in_flight or not self._in_flight[0][0].open:
            return None
        self._end_guided()
        return self.guided.complete(*self._in_flight[0], self._lookup_drafts, self._full_mask)

    def commit(self, output: StepOutput) -> list[RequestDelta]:
        """Take the output of the oldest step in flight, and return a delta for each request that got a token.

        Raises RuntimeError for malformed output.
        """
        if not self._in_flight:
            raise RuntimeError("no step was planned")
        step, planned = self._in_flight.popleft()
        self._learn(step, planned, output)
        size, append = self.config.page_size, self._append
        num_tokens = 0
        deltas: list[RequestDelta] = []
        saves = [] if self.snapshots is None else self.snapshots.begin(step, planned)
        for index, (request, item, token, row_logprobs) in enumerate(
            zip(planned, step.work, output.tokens, output.logprobs)
        ):
            num_tokens += item.num_tokens
            if request.num_masked == 0:  # its mask was late
                self._rebuild(request)
                continue
            if request.status is _FINISHED:
                continue  # it ended while the step ran
            if item.drafts:
                deltas.append(self._append_verified(request, item, output, index))
                continue
            if request.status is _RUNNING:
                done = request.num_computed = request.num_computed + item.num_tokens
                if done // size > request.num_published:
                    self._publish(request, done // size)
            if item.emit:
                if output.pooled:
                    deltas.append(self._end_pooled(request, output.pooled[index]))
                else:
                    deltas.append(append(request, token, row_logprobs))
                if request.guide is not None:
                    take_drafts(request, item, output, self._lookup_drafts)
        if self.snapshots is not None:
            self.snapshots.commit(saves)
        self.counters.step(num_tokens)
        return deltas

    def _learn(self, step: Step, planned: list[Request], output: StepOutput) -> None:
        """Take the scores of a step, and what its duration and its accepted drafts show. Raises RuntimeError for
        malformed output.
        """
        work = step.work
        if not len(output.tokens) == len(output.logprobs) == len(work):
            raise RuntimeError(f"{len(work)} rows ran, the executor returned tokens for {len(output.tokens)}")
        for index, scores in output.scores.items():
            if planned[index].status is not _FINISHED:
                add_scores(planned[index], work[index], scores)
        seconds = self.timer.ended(self.clock())
        if self.step_budget is not None:
            self.step_budget.learn(work, seconds)
        if self.speculation is not None:
            self.speculation.learn(work, planned, output, seconds, self.counters)

    def rollback(self) -> None:
        """Drop all steps in flight. Their requests, and those after them in line, wait again and recompute."""
        self.timer.forget()
        if self.planner is not None:
            self.planner.forget()
        self._drop_in_flight(self.clock())

    def _plan_running(self, step: Step, planned: list[Request]) -> tuple[int, bool]:
        """Plan the running requests. Return the remaining budget, and whether a request was preempted."""
        budget = self._begin_step()
        running, planner = self.running, self.planner
        size, num_preemptions = self.config.page_size, self.counters.num_preemptions
        wants = self.speculation is not None and self.speculation.wants
        index = 0
        while budget and index < len(running):
            request, index = running[index], index + 1
            total, start = request.num_total, request.num_planned
            if total == request.limit:
                continue  # its last token is in flight
            if total - start == 1 and request.guide is None and not (request.needs_init or wants):
                if start < len(request.pages) * size and (planner is None or not request.num_drafts):
                    # The common case: the next token of a request that needs no page, draft or mask.
                    request.num_planned, request.num_total = total, total + 1
                    step.work.append(request.decode)
                    planned.append(request)
                    budget -= 1
                    continue
            budget -= self._plan_request(step, planned, index, budget)
            if request.status is not _RUNNING:  # it was preempted
                index -= 1
        return budget, self.counters.num_preemptions > num_preemptions

    def _plan_request(self, step: Step, planned: list[Request], index: int, budget: int) -> int:
        """Plan the running request before `index`. Return the number of its tokens, 0 if it gets none."""
        request = self.running[index - 1]
        start = request.num_planned
        missing = request.num_total - start
        decodes = missing == 1
        max_tokens = budget if decodes else self._chunk_budget(index, budget, first=not planned)
        if max_tokens < 1:
            return 0
        if decodes:
            item = request.decode
        else:
            item = self._chunk(request, missing, min(self.config.long_prefill_threshold or max_tokens, max_tokens))
        if request.guide is not None and item.emit and not may_sample(request):
            self.guided.leave_out(request)
            return 0
        if request.num_drafts and decodes and self.speculation is not None and self.speculation.verifies:
            item = self._with_drafts(self.speculation, request, budget - (len(self.running) - index))
        end, size = start + item.num_tokens, self.config.page_size
        new_pages = -(-end // size) - len(request.pages)
        if new_pages > self.pool.num_free and not self._preempt_for(request, new_pages, index):
            return 0
        if self.planner is not None and (request.num_drafts or self.planner.speculation.wants):
            item = self.planner.plan(request, item, end)
            new_pages = -(-(end + item.propose) // size) - len(request.pages)
        if new_pages > 0:
            pages = self._take_pages(new_pages)
            if not request.needs_init:
                step.pages.append(RowPages(request.row, len(request.pages), pages))
            request.pages += pages
        if request.needs_init:
            step.inits.append(request.row_init())
        if item.drafts and self.host_drafts is not None:
            step.drafts.append(self.host_drafts.placed(request, item))
        request.num_planned = end
        if item.emit:
            request.num_total = end + 1
        step.work.append(item)
        planned.append(request)
        self._only_decodes &= item is request.decode
        self._prompt_budget -= item.num_tokens - decodes
        return item.num_tokens

    def _preempt_for(self, request: Request, need: int, index: int) -> bool:
        """Preempt requests that are not in the plan yet, from the one before `index`, until `need` pages are free for
        `request`. Return False if it was preempted itself.
        """
        while not self.pool.reclaim(need) and request.status is _RUNNING:
            self._preempt(last_of_most_served(self.running[index - 1 :]), self.clock())
            self.counters.num_preemptions += 1
        return request.status is _RUNNING

    def _begin_step(self) -> int:
        """Reset the state of the step being planned, and choose its drafts. Return its maximum number of tokens."""
        running, budget = self.running, self.config.max_num_batched_tokens
        if self.step_budget is not None:
            budget = self.step_budget.tokens(running, self.waiting.num_tokens)
        self._free_logits = self.config.logits - len(running)
        self._prompt_budget = math.inf
        self._only_decodes = True
        if self.speculation is not None and not self.speculation.begin_idle():
            self.speculation.begin(running, max(0, min(self._free_logits, budget - len(running))))
            if self.planner is not None:
                self.planner.begin()
        if self.host_drafts is not None and self.host_drafts.wanted:
            self.host_drafts.propose(running)
        return budget

    def _with_drafts(self, speculation: Speculation, request: Request, budget: int) -> Work:
        """Return work for the next token of a request, and for as many of the drafts after it as save time and fit."""
        free_logits = self._free_logits - min(len(self.waiting), len(self.free_rows))
        free_positions = (len(request.pages) + self.pool.num_free) * self.config.page_size - request.num_total
        remaining = request.limit - 1 - request.num_total
        max_drafts = min(budget - 1 - bool(self.waiting), free_logits, remaining, free_positions)
        if request.guide is not None:
            max_drafts = max_masked_drafts(request, speculation, max_drafts)
        drafts = speculation.drafts(request, max_drafts)
        self._free_logits -= drafts
        return Work(request.row, 1 + drafts, True, drafts=drafts) if drafts else request.decode

    def _admit(self, step: Step, planned: list[Request], budget: int) -> None:
        """Admit waiting requests in order, up to the first one that does not fit, or to MAX_ADMITTED_TOKENS."""
        config, waiting, room = self.config, self.waiting, MAX_ADMITTED_TOKENS
        self._lacked_pages = False
        max_chunk = budget if config.whole_prompts else config.long_prefill_threshold or budget
        while (
            budget
            and room > 0
            and self._free_logits > 0
            and self.free_rows
            and (request := waiting.first()) is not None
        ):
            if request.status is Status.PREEMPTED and any(request in late for _, late in self._in_flight):
                break
            if request.leader is not None and self._will_publish(request.leader, request):
                break
            if config.whole_prompts and len(request.tokens) > budget:
                break
            request.inherit(config.page_size)
            allocation = self._allocate(request, self._watermark_pages if self.running else 0)
            if allocation is None:
                self._lacked_pages = True
                break
            waiting.remove(request)
            self._start(request, *allocation)
            room -= len(request.tokens)
            self._free_logits -= 1
            self._only_decodes = False
            item = self._chunk(request, request.num_total - request.num_planned, min(max_chunk, budget))
            if item.emit and request.guide is not None and known_mask(request) is None:
                self.guided.leave_out(request)
                continue  # its row is built when its mask is known
            if self.planner is not None:
                end = request.num_planned + item.num_tokens
                item = self.planner.plan(request, item, end)
                request.pages += self._take_pages(max(0, config.pages_for(end + item.propose) - len(request.pages)))
            step.inits.append(request.row_init())
            step.work.append(item)
            planned.append(request)
            request.num_planned += item.num_tokens
            request.num_total += item.emit
            budget -= item.num_tokens

    def _chunk(self, request: Request, missing: int, max_tokens: int) -> Work:
        """Return work for the next of `missing` tokens. The request has one row of logits already."""
        start = request.num_planned
        count, score = min(missing, max_tokens), False
        if request.snapshot_positions:
            count = min(count, request.snapshot_positions[0] - start)
        if request.scores is not None and start < request.num_prompt - 1:
            num_scored = len(request.scores)
            score = start >= num_scored
            if score:
                free_logits = max(0, self._free_logits - self.waiting.has_other(request.tenant))
                count = min(count, 1 + free_logits)
                self._free_logits -= count - 1
            else:  # it was preempted, and computes tokens again that were scored before
                count = min(count, num_scored - start)
        return Work(request.row, count, count == missing, score)

    def _append_verified(self, request: Request, item: Work, output: StepOutput, index: int) -> RequestDelta:
        """Append the tokens of a step that verified drafts of its request at `index`, those sampled with masks."""
        sampled = [(output.tokens[index], output.logprobs[index]), *output.accepted[index]]
        masked = sampled[: request.num_masked]
        delta = self._append_run(request, item, masked)
        take_drafts(request, item, output, self._lookup_drafts, len(masked), len(masked) == len(sampled))
        return delta
