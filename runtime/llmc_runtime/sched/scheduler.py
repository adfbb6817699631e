"""The scheduler: which requests compute how many tokens in the next step, and on which pages. It runs no model.

One token budget a step, no prefill or decode phase: every request lets its computed tokens catch up with its known
tokens, the running ones first, then the waiting ones as rows and pages allow (the scheme of vLLM's V1 scheduler).
Invariants: `running` and `waiting` are sorted by key, so the first running request runs in every step and is the last
to be preempted; the pages of a running request cover its computed tokens and, from admission, all tokens then known.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from operator import attrgetter

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.kv.pages import PagePool
from llmc_runtime.kv.prefix import PrefixCache
from llmc_runtime.metrics import Counters
from llmc_runtime.sched.config import POLICIES, SchedulerConfig, admit
from llmc_runtime.sched.request import Request, RequestDelta, Status
from llmc_runtime.sched.step import RowInit, RowPages, Step, StepOutput, TokenLogprobs, Work

_KEY = attrgetter("key")


class Scheduler:
    """next() plans a step; then exactly one of commit() (it ran) or rollback() (nobody knows) follows.

    `seeds` draws 64 bits for a request that brings no seed; by default from the system.
    """

    def __init__(self, config: SchedulerConfig, seeds: Callable[[], int] | None = None) -> None:
        self.config = config
        self.counters = Counters()
        self.requests: dict[str, Request] = {}  # the live ones
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._step: Step | None = None  # planned, neither committed nor rolled back
        self._planned: list[Request] = []  # beside the work of _step, in its order
        self._empty()
        self._seeds = seeds or partial(secrets.randbits, 64)
        self._rank = POLICIES[config.policy]
        self._reserve = int(config.watermark * config.num_pages)
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a new request. LlmcError E601 to E607 where it can never run; nothing else is touched then."""
        if request.id in self.requests or request.status is not Status.NEW:
            raise LlmcError("E607", f"request {request.id!r} was added already", "give every request an id of its own")
        admit(request, self.config, self._seeds())
        self._arrivals += 1
        request.key = (self._rank(request), self._arrivals)
        request.chain.append(self.prefix.root(request.cache_salt))
        request.status = Status.WAITING
        self.requests[request.id] = request
        _insert(self.waiting, request)

    def abort(self, request_id: str) -> bool:
        """End a request now, whatever it is doing; late output of it is dropped. False where no such request lives."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, "abort")
        return True

    def has_work(self) -> bool:
        """Some request has not ended."""
        return bool(self.requests)

    def next(self) -> Step:
        """Plan one step; it is empty only where no request lives."""
        if self._step is not None:
            raise RuntimeError("the last step was neither committed nor rolled back")
        step = self._step = Step()
        planned = self._planned = []
        budget, preempted = self._go_on(step, planned)
        if not preempted and self.waiting:
            self._admit(step, planned, budget)
        return step

    def commit(self, output: StepOutput) -> list[RequestDelta]:
        """Take the step's tokens: what each request got, and which of them ended. RuntimeError on malformed output."""
        step, planned = self._take_step()
        if not len(output.tokens) == len(output.logprobs) == len(step.work):
            raise RuntimeError(f"{len(step.work)} rows ran, the executor answered for {len(output.tokens)}")
        self.counters.num_steps += 1
        size, publish, deltas = self.config.page_size, self.prefix.publish, []
        for request, work, token, logprobs in zip(planned, step.work, output.tokens, output.logprobs):
            self.counters.num_scheduled_tokens += work.num_tokens
            if request.status is not Status.RUNNING:
                continue  # it ended while the step ran
            request.num_computed += work.num_tokens
            full = request.num_computed // size
            if full > request.num_published:
                publish(request.chain, request.tokens, request.pages, request.num_published, full)
                request.num_published = full
            if work.emit:
                deltas.append(self._append(request, token, logprobs))
        return deltas

    def rollback(self) -> None:
        """Forget the planned step: its requests wait again and recompute, whatever the device has done of it."""
        _, planned = self._take_step()
        for request in reversed(planned):
            if request.status is Status.RUNNING:
                self.running.remove(request)
                self._preempt(request)

    def end_all(self, error: LlmcError) -> list[RequestDelta]:
        """End every live request with `error`: each is told once, in order of arrival. It may follow a failure anywhere
        in here, so it builds on nothing but `requests`; no cached prefix outlives it."""
        ended = sorted(self.requests.values(), key=lambda request: request.key[1])
        for request in ended:
            request.status, request.pages, request.row = Status.FINISHED, [], -1
        self.counters.request_success["error"] += len(ended)
        for queue in (self.requests, self.waiting, self.running):
            queue.clear()
        self._empty()
        return [RequestDelta(r.id, [], "error", num_cached=r.num_cached or 0, error=error) for r in ended]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing happens, while a page is in use."""
        if self.pool.num_used:
            return False
        self.prefix.reset()
        return True

    def _empty(self) -> None:
        """All pages and rows free, nothing cached, nothing planned."""
        config = self.config
        self.pool = PagePool(config.num_pages)
        self.prefix = PrefixCache(self.pool, config.page_size, config.context, config.prefix_caching)
        self.free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._step, self._planned = None, []

    def _take_step(self) -> tuple[Step, list[Request]]:
        if self._step is None:
            raise RuntimeError("no step was planned")
        step, planned = self._step, self._planned
        self._step, self._planned = None, []
        return step, planned

    def _go_on(self, step: Step, planned: list[Request]) -> tuple[int, bool]:
        """Plan the running requests; the budget left, and whether any was preempted."""
        running, pool, config = self.running, self.pool, self.config
        budget = config.max_num_batched_tokens
        most = config.long_prefill_threshold or budget
        size, preempted, index = config.page_size, False, 0
        while budget and index < len(running):
            request = running[index]
            missing = len(request.tokens) - request.num_computed
            count = min(missing, most, budget)
            need = -(-(request.num_computed + count) // size) - len(request.pages)
            if need > 0:
                # Victims come from the end of `running`: none of them is in the plan yet.
                while need > pool.num_free:
                    victim = running.pop()
                    self._preempt(victim)
                    self.counters.num_preemptions += 1
                    preempted = True
                    if victim is request:
                        return budget, True
                taken = pool.take(need)
                step.pages.append(RowPages(request.row, len(request.pages), taken))
                request.pages += taken
            step.work.append(Work(request.row, count, count == missing))
            planned.append(request)
            budget -= count
            index += 1
        return budget, preempted

    def _admit(self, step: Step, planned: list[Request], budget: int) -> None:
        """Give rows and pages to waiting requests, in order; the first that does not fit holds up the others."""
        config, pool, waiting = self.config, self.pool, self.waiting
        most = config.long_prefill_threshold or budget
        admitted = 0
        while budget and self.free_rows and admitted < len(waiting):
            request = waiting[admitted]
            hits = self.prefix.match(request.chain, request.tokens)
            fresh = config.pages_for(len(request.tokens)) - len(hits)
            idle = sum(1 for page in hits if not pool.refs[page])
            if fresh + idle + (self._reserve if self.running else 0) > pool.num_free:
                break
            for page in hits:
                pool.share(page)
            self._start(request, hits + pool.take(fresh), len(hits))
            missing = len(request.tokens) - request.num_computed
            count = min(missing, most, budget)
            step.inits.append(
                RowInit(
                    request.row,
                    list(request.tokens),
                    request.num_computed,
                    request.num_prompt,
                    request.row_params,
                    list(request.pages),
                )
            )
            step.work.append(Work(request.row, count, count == missing))
            planned.append(request)
            budget -= count
            admitted += 1
        del waiting[:admitted]

    def _start(self, request: Request, pages: list[int], hits: int) -> None:
        """A waiting request becomes a running one, `hits` of its pages already computed."""
        counters = self.counters
        cached = hits * self.config.page_size
        counters.prefix_cache_queries += len(request.tokens)
        counters.prefix_cache_hits += cached
        if request.num_cached is None:
            request.num_cached = cached
            counters.prompt_tokens += request.num_prompt
            counters.prompt_tokens_cached += cached
        request.pages = pages
        request.num_computed, request.num_published = cached, hits
        request.row = self.free_rows.pop()
        request.status = Status.RUNNING
        _insert(self.running, request)

    def _append(self, request: Request, token: int | None, logprobs: TokenLogprobs | None) -> RequestDelta:
        if token is None or not 0 <= token < self.config.vocab_size:
            raise RuntimeError(f"row {request.row} of request {request.id!r}: the executor answered token {token}")
        request.tokens.append(token)
        self.counters.generation_tokens += 1
        delta = RequestDelta(request.id, [token], num_cached=request.num_cached or 0)
        most = request.params.logprobs
        if most is not None:
            if logprobs is None:
                raise RuntimeError(f"row {request.row} of request {request.id!r}: no log-probabilities came back")
            tops = (tuple(logprobs.top_ids[:most]), tuple(logprobs.top_logprobs[:most]))
            delta.logprobs = [TokenLogprobs(logprobs.logprob, logprobs.rank, *tops)]
        end = request.finish_of(token)
        if end is not None:
            delta.finish_reason, delta.stop_reason = end
            self._finish(request, end[0])
        return delta

    def _preempt(self, request: Request) -> None:
        """A request already taken from `running` gives back everything and waits; its tokens stay."""
        self._free(request)
        request.status = Status.PREEMPTED
        _insert(self.waiting, request)

    def _finish(self, request: Request, reason: str) -> None:
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._free(request)
        else:
            del self.waiting[bisect_left(self.waiting, request.key, key=_KEY)]
        request.status = Status.FINISHED
        del self.requests[request.id]
        self.counters.request_success[reason] += 1

    def _free(self, request: Request) -> None:
        self.pool.release(reversed(request.pages))
        request.pages = []
        request.num_computed = request.num_published = 0
        self.free_rows.append(request.row)
        request.row = -1


def _insert(queue: list[Request], request: Request) -> None:
    if not queue or queue[-1].key < request.key:
        queue.append(request)
    else:
        insort(queue, request, key=_KEY)
