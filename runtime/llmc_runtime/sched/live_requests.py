"""LiveRequests: the requests of a scheduler, the rows and pages that they hold, and how they end."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.kv.pages import PagePool
from llmc_runtime.kv.prefix import PrefixCache
from llmc_runtime.metrics import Counters
from llmc_runtime.sched.discarded_tokens import DiscardedTokens
from llmc_runtime.sched.guided_requests import GuidedRequests, follow
from llmc_runtime.sched.request import Request, RequestDelta, Status, delta_of, extend
from llmc_runtime.sched.row_snapshots import RowSnapshots
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.step import Step, TokenLogprobs, Work
from llmc_runtime.sched.step_budget import StepBudget, StepTimer, num_decoding
from llmc_runtime.sched.waiting_queue import OUTPUT_WEIGHT, ROW_WAIT_SECONDS, WaitingQueue, prompt_service, row_to_share

if TYPE_CHECKING:
    from llmc_runtime.sched.draft_planner import DraftPlanner
    from llmc_runtime.sched.host_draft import Draft
    from llmc_runtime.sched.host_drafts import HostDrafts
    from llmc_runtime.sched.speculation import Speculation
    from llmc_runtime.sched.speculation_config import SpeculationConfig

# A step is planned before the running step ends, earlier by the larger of:
AHEAD = 0.002  # seconds
AHEAD_SHARE = 0.25  # share of the running step's duration
MAX_RELEASED = 1 << 13  # retired pages that an admission releases at once while other requests run
_KEY = attrgetter("key")


class LiveRequests:
    """The base of Scheduler: everything that does not depend on how steps are planned. Belongs to the engine's thread.

    Invariant: a running request has a row and pages, any other has none.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float], draft: Draft | None = None) -> None:
        self.config, self.clock = config, clock
        self.counters = Counters()
        self.requests: dict[str, Request] = {}  # live requests by id
        self.discarded = DiscardedTokens()
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.guided = GuidedRequests()
        self._notices: list[RequestDelta] = []  # deltas of requests that ended between two steps
        # The steps in flight, oldest first, each with the requests of its `work`, in the same order.
        self._in_flight: deque[tuple[Step, list[Request]]] = deque()
        # Tokens of the step being planned that are left for chunks of prompts; infinite before its first chunk.
        self._prompt_budget = math.inf
        self.timer = StepTimer()
        self.step_budget: StepBudget | None = None
        if config.target_itl:
            self.step_budget = StepBudget(config.target_itl, config.max_num_batched_tokens)
        self.speculation: Speculation | None = None
        self.planner: DraftPlanner | None = None  # None unless a draft model drafts
        self.host_drafts: HostDrafts | None = None
        if config.speculation is not None:
            self._speculate(config.speculation, draft)
        self._reset()

    def _speculate(self, speculation: SpeculationConfig, draft: Draft | None) -> None:
        """Set up speculative decoding. Its modules are imported here, since most engines draft nothing."""
        from llmc_runtime.sched.host_drafts import HostDrafts
        from llmc_runtime.sched.speculation import Speculation

        self.speculation = Speculation(speculation)
        self.counters.drafted_at_most(speculation.num_tokens)
        if draft is not None:
            self.host_drafts = HostDrafts(draft, self.speculation, self.config.vocab_size)

    def abort(self, request_id: str) -> bool:
        """End a request now; output of its steps in flight is dropped. Return False if no live request has this id."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, "abort")
        return True

    def has_work(self) -> bool:
        """Whether some request has not ended."""
        return bool(self.requests)

    def spare_seconds(self, now: float) -> float:
        """Return for how long the step after the one that runs need not be planned: requests that arrive meanwhile can
        join it. 0 if some wait already, if masks or drafts depend on the plan, or if the step's duration is not known.
        """
        if (
            self.step_budget is None
            or len(self._in_flight) != 1
            or self.waiting
            or self.guided
            or self.speculation is not None
        ):
            return 0.0
        expected = self.step_budget.expected(self._in_flight[0][0].work)
        return expected - max(AHEAD, AHEAD_SHARE * expected) - self.timer.running(now)

    @property
    def page_usage(self) -> float:
        """The share of the KV cache's pages in use, from 0 to 1; pages of ended requests count until they are released,
        as long as others run.
        """
        return self.pool.num_used / self.pool.num_pages if self.running else 0.0

    def take_notices(self) -> list[RequestDelta]:
        """Return the deltas of requests that ended between two steps."""
        notices, self._notices = self._notices, []
        return notices

    def end_all(self, error: LlmcError) -> list[RequestDelta]:
        """End every live request with `error`. Return the notices, and the requests' deltas in order of arrival.

        A failure may have left the scheduler inconsistent, so this relies on `requests` only, and empties the cache.
        """
        notices = self.take_notices()
        ended = sorted(self.requests.values(), key=lambda request: request.key[1])
        for request in ended:
            request.status, request.pages, request.row = Status.FINISHED, [], -1
        self.counters.request_success["error"] += len(ended)
        self.waiting.clear()
        for queue in (self.requests, self.running, self.guided):
            queue.clear()
        self._reset()
        return notices + [RequestDelta(r.id, [], "error", num_cached=r.num_cached or 0, error=error) for r in ended]

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False, and does nothing, while a page is in use."""
        self.pool.reclaim(self.pool.num_pages)
        if self.pool.num_used:
            return False
        self.prefix.reset()
        if self.snapshots is not None:
            self.snapshots.pool.drop_all()
        return True

    def _reset(self) -> None:
        """Free all pages and rows, empty the cache, drop the steps in flight."""
        config = self.config
        self.pool = PagePool(config.num_pages)
        self.prefix = PrefixCache(self.pool, config.page_size, config.context, config.reuses_prefixes)
        self.snapshots: RowSnapshots | None = None  # None unless the model has recurrent layers and prefixes are reused
        if config.snapshots and config.reuses_prefixes:
            self.snapshots = RowSnapshots(config.snapshots, self.prefix, self.counters)
        self.free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight.clear()
        self.timer.forget()
        if self.speculation is not None and self.speculation.config.max_rows:
            from llmc_runtime.sched.draft_planner import DraftPlanner

            limits = config.max_num_batched_tokens, config.logits
            self.planner = DraftPlanner(self.speculation, self.pool, config.page_size, *limits)

    def _take_pages(self, count: int) -> list[int]:
        """Take pages from the pool, of which `count` are free."""
        pages = self.pool.take(count)
        if self.planner is not None:
            self.planner.taken(pages)
        return pages

    def _allocate(self, request: Request, reserve: int) -> tuple[list[int], int] | None:
        """Allocate pages for all tokens of a waiting request. Return them, and how many are cached, which come first.

        Returns None, and allocates nothing, unless `reserve` pages would remain free.
        """
        pool, tokens = self.pool, request.tokens
        length = len(tokens) if request.scores is None else len(request.scores) + 1
        match = self.prefix.match(request.chain, tokens, length)
        num_hits = len(match.pages) if self.snapshots is None else self.snapshots.usable(request, match)
        num_pages = self.config.pages_for(len(tokens))
        max_released = MAX_RELEASED if self.running else math.inf
        needed = num_pages - match.max_in_use(num_hits, pool) + reserve
        while pool.reclaim(needed, max_released):
            needed = num_pages - match.in_use(num_hits, pool) + reserve
            if needed <= pool.num_free:
                break
        else:
            return None
        hits = match.pages[:num_hits]
        self.prefix.end_match(match)
        for page in hits:
            pool.share(page)
        return hits + self._take_pages(num_pages - num_hits), num_hits

    def _start(self, request: Request, pages: list[int], hits: int) -> None:
        """Make a waiting request a running one. The first `hits` of its pages are computed already."""
        counters = self.counters
        cached = hits * self.config.page_size
        counters.prefix_cache_queries += len(request.tokens)
        counters.prefix_cache_hits += cached
        if request.num_cached is None:
            request.num_cached, request.started = cached, self.clock()
            request.account.service += prompt_service(request, cached)
            counters.prompt_tokens += request.num_prompt
            counters.prompt_tokens_cached += cached
        request.start(self.free_rows.pop(), pages, hits, cached)
        self.guided.start(request)
        if self.snapshots is not None:
            self.snapshots.start(request, hits)
        if self.planner is not None:
            self.planner.start(request, pages[:hits])
        if self.running and request.key < self.running[-1].key:
            insort(self.running, request, key=_KEY)
        else:
            self.running.append(request)

    def _rebuild(self, request: Request) -> None:
        """Drop the tokens of a request's step in flight, all of which lack their masks, and compute them again.

        The states of recurrent layers include them already, and start from a snapshot or from the first token.
        """
        request.restart()
        if self.config.snapshots is None or request.status is not Status.RUNNING:
            return
        self._preempt(request, self.clock())
        allocation = self._allocate(request, 0)
        if allocation is not None:
            self.waiting.remove(request)
            self._start(request, *allocation)

    def _publish(self, request: Request, full: int) -> None:
        """Publish the first `full` pages of a running request, which are computed."""
        start, tenant = request.num_published, request.tenant
        self.prefix.publish(request.chain, request.tokens, request.pages, start, full, tenant)
        request.num_published = full

    def _end_guided(self) -> None:
        """End the requests whose guides have ended or failed."""
        self.guided.park(self.running, self.waiting, self._free_row)
        for request, error in self.guided.ended():
            reason = "stop" if error is None else "error"
            self._notices.append(RequestDelta(request.id, [], reason, num_cached=request.num_cached or 0, error=error))
            self._finish(request, reason)

    def _preempt(self, request: Request, now: float) -> None:
        """Remove a running request, free everything but its tokens, and let it wait."""
        self.running.remove(request)
        self._free_row(request)
        request.status, request.queued = Status.PREEMPTED, now
        self.waiting.add(request)

    def _drop_in_flight(self, now: float) -> None:
        """Forget the steps in flight, and let their running requests wait again, and those after them in line."""
        dropped = [request for _, planned in self._in_flight for request in planned]
        if self.snapshots is not None:
            for step, _ in self._in_flight:
                self.snapshots.drop(step)
        self._in_flight.clear()
        for request in dropped:
            request.num_masked = None
        first = min((request.key for request in dropped if request.status is Status.RUNNING), default=None)
        while first is not None and self.running and self.running[-1].key >= first:
            self._preempt(self.running[-1], now)

    def _share_rows(self, now: float) -> None:
        """Let a request wait again whose tenant has too many rows, if one of another tenant has waited for long."""
        head = self.waiting.first()
        if head is None or now - head.queued < ROW_WAIT_SECONDS:
            return
        victim = row_to_share(self.running, head)
        if victim is not None:
            self._preempt(victim, now)
            self.counters.num_preemptions += 1

    def _finish(self, request: Request, reason: str) -> None:
        """End a request: free its row and pages, close its guide, and count the reason."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._free_row(request)
        elif request.status is not Status.PARKED:
            self.waiting.remove(request)
        self.waiting.leave(request)
        request.status = Status.FINISHED
        if request.tokens is not request.prompt_token_ids:
            self.discarded.add(request.tokens)
        del self.requests[request.id]
        self.guided.remove(request)
        if self.host_drafts is not None:
            self.host_drafts.end(request)
        self.counters.request_success[reason] += 1

    def _free_row(self, request: Request) -> None:
        """Free the row and the pages of a request, which keeps its tokens."""
        if self.snapshots is not None:
            self.snapshots.stop(request)
        if self.planner is not None:
            self.planner.speculation.wake()
        self.pool.retire(request.pages)
        request.pages = []
        request.num_planned = request.num_computed = request.num_published = 0
        self.free_rows.append(request.row)
        request.row = -1

    def _append_run(
        self, request: Request, item: Work, tokens: list[tuple[int | None, TokenLogprobs | None]]
    ) -> RequestDelta:
        """Append the tokens that a step with drafts gave, as if each came from a step of one token."""
        running = request.status is Status.RUNNING
        if running:
            rejected = item.num_tokens - len(tokens)
            request.num_total -= rejected
            request.num_planned -= rejected
            keep = self.config.pages_for(request.num_planned + request.lookahead)
            self.pool.release(reversed(request.pages[keep:]))
            del request.pages[keep:]
        delta: RequestDelta | None = None
        for token, logprobs in tokens:
            if running:
                done = request.num_computed = request.num_computed + 1
                if done // self.config.page_size > request.num_published:
                    self._publish(request, done // self.config.page_size)
            delta = extend(delta, self._append(request, token, logprobs))
            if delta.finish_reason is not None:
                break
        assert delta is not None
        return delta

    def _append(self, request: Request, token: int | None, logprobs: TokenLogprobs | None) -> RequestDelta:
        """Append a sampled token to a request, which may end it; return what has changed."""
        if token is None or not 0 <= token < self.config.vocab_size:
            raise RuntimeError(f"row {request.row} of request {request.id!r}: the executor returned token {token}")
        request.tokens.append(token)
        self.counters.generation_tokens += 1
        request.account.service += OUTPUT_WEIGHT
        delta = delta_of(request, token, logprobs, self.clock)
        end = request.finish_of(token)
        if end is not None:
            delta.stopped = end[0] == "stop"
        elif request.guide is not None:
            end, delta.error = follow(request.guide, token)
            delta.stopped = end is not None and delta.error is None and token in self.config.eos_token_ids
        if end is not None:
            delta.finish_reason, delta.stop_reason = end
            self._finish(request, end[0])
        return delta

    def _end_pooled(self, request: Request, pooled: bytes) -> RequestDelta:
        """End a request of a model that pools."""
        times = (request.started - request.arrived, self.clock() - request.started)
        self._finish(request, "stop")
        return RequestDelta(request.id, [], "stop", num_cached=request.num_cached or 0, times=times, pooled=pooled)

    def _will_publish(self, leader: Request, request: Request) -> bool:
        """Whether the leader will soon publish full pages of the prompt that `request` can share."""
        if not self.prefix.enabled or request.status is not Status.WAITING or leader.status is not Status.RUNNING:
            return False
        return leader.num_published < (request.num_prompt - 1) // self.config.page_size

    def _chunk_budget(self, index: int, budget: int, first: bool) -> int:
        """Return the maximum number of tokens of the next chunk of a prompt. `budget` are the step's remaining tokens.

        A token is left to each decoding request from `index` on. The `first` request of a step gets at least one.
        """
        if self._prompt_budget == math.inf:
            self._prompt_budget = budget - num_decoding(self.running, index)
        return min(budget, max(int(self._prompt_budget), first))
