"""Bugs for the simulator to detect. Each function takes a correct method and returns a faulty one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llmc_runtime.kv.pages import PagePool
from llmc_runtime.kv.prefix import PrefixCache
from llmc_runtime.kv.prefix_match import PrefixMatch
from llmc_runtime.sched import scheduler as scheduler_module
from llmc_runtime.sched.request import Request, Status
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.step import RowMasks, Step, Work
from llmc_runtime.sched.token_guide import Banned
from llmc_runtime.sched.waiting_queue import WaitingQueue

from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.guides import Wandering


def hit_of_the_whole_prompt(right: Any) -> Any:
    def match(self: PrefixCache, chain: list[bytes], tokens: list[int], length: int) -> PrefixMatch:
        return right(self, chain, [*tokens, 0], length + 1)

    return match


def hit_that_ignores_the_parent(right: Any) -> Any:
    def extend(self: PrefixCache, chain: list[bytes], tokens: list[int], upto: int) -> None:
        for page in range(len(chain) - 1, upto):
            alone = [chain[0]]
            right(self, alone, tokens[page * self.page_size :], 1)
            chain.append(alone[1])

    return extend


def hit_on_the_page_beside(right: Any) -> Any:
    def match(self: PrefixCache, chain: list[bytes], tokens: list[int], length: int) -> PrefixMatch:
        hits = right(self, chain, tokens, length)
        hits.pages[:] = [page + 1 if page + 1 < self.pool.num_pages else 0 for page in hits.pages]
        return hits

    return match


def match_that_keeps_evicted_pages(right: Any) -> Any:
    return lambda self, digest: None


def match_that_misses_new_references(right: Any) -> Any:
    return lambda self, count, pool: min(count, self._in_use)


def published_before_it_is_full(right: Any) -> Any:
    def publish(
        self: PrefixCache, chain: list[bytes], tokens: list[int], pages: list[int], start: int, stop: int, *tenant: str
    ) -> None:
        right(self, chain, tokens, pages, start, min(stop + 1, len(pages), len(tokens) // self.page_size), *tenant)

    return publish


def eviction_that_is_forgotten(right: Any) -> Any:
    return lambda self, page: None


def freed_twice(right: Any) -> Any:
    def release(self: PagePool, pages: Any) -> None:
        pages = list(pages)
        right(self, pages)
        if pages and self.refs[pages[-1]]:
            right(self, pages[-1:])

    return release


def shared_without_leaving_the_free_list(right: Any) -> Any:
    def share(self: PagePool, page: int) -> None:
        self.refs[page] += 1

    return share


def leaked_by_a_request_that_ends(right: Any) -> Any:
    def free(self: Scheduler, request: Request) -> None:
        if len(request.tokens) % 7 == 0:
            request.pages = request.pages[:-1]
        right(self, request)

    return free


def after_planning(change: Callable[[Scheduler, Step], None]) -> Callable[[Any], Any]:
    def make(right: Any) -> Any:
        def next(self: Scheduler) -> Step:
            step = right(self)
            change(self, step)
            return step

        return next

    return make


def wrong_row(self: Scheduler, step: Step) -> None:
    if len(step.work) > 1 and step.work[0].num_tokens == step.work[1].num_tokens == 1:
        step.work[0].row, step.work[1].row = step.work[1].row, step.work[0].row


def pages_in_the_wrong_order(self: Scheduler, step: Step) -> None:
    for init in step.inits:
        init.pages.reverse()


def table_that_misses_growth(self: Scheduler, step: Step) -> None:
    del step.pages[1:]


def prompt_length_of_a_resumed_request(self: Scheduler, step: Step) -> None:
    for init in step.inits:
        init.num_prompt = len(init.tokens)


def budget_overdrawn(self: Scheduler, step: Step) -> None:
    left = self.config.max_num_batched_tokens - sum(work.num_tokens for work in step.work)
    for request in self.running[len(step.work) :]:
        if left == 0 and step.work and request.num_total < request.limit:
            request.num_planned += 1
            step.work.append(Work(request.row, 1, request.num_total == request.num_planned))
            request.num_total += step.work[-1].emit
            self._in_flight[-1][1].append(request)


def preempted_but_still_computed(right: Any) -> Any:
    def preempt(self: Scheduler, request: Request, now: float) -> None:
        computed = request.num_computed
        right(self, request, now)
        request.num_computed = computed

    return preempt


def last_come_first_served(right: Any) -> Any:
    def add(self: Scheduler, request: Request) -> None:
        right(self, request)
        self.waiting.remove(request)
        request.key = (request.key[0], -request.key[1])
        self.waiting.add(request)

    return add


def first_of_all_tenants(right: Any) -> Any:
    return lambda self: next(iter(self), None)


def the_tenant_with_the_most_service(right: Any) -> Any:
    def first(self: WaitingQueue) -> Request | None:
        heads = [tenant for tenant in self.tenants.values() if tenant.queue]
        return max(heads, key=lambda tenant: (tenant.service, -tenant.turn)).head if heads else None

    return first


def service_saved_up(right: Any) -> Any:
    def begin(self: WaitingQueue, tenant: Any) -> None:
        before = tenant.service
        right(self, tenant)
        tenant.service = before
        self._heap[self._heap.index(max(self._heap, key=lambda entry: entry[1]))] = (before, tenant.turn, tenant)
        self._heap.sort()

    return begin


def victim_that_came_first(right: Any) -> Any:
    def victim(running: list[Request]) -> Request:
        return running[0]

    return victim


def stops_that_the_row_does_not_mask(self: Scheduler, step: Step) -> None:
    for init in step.inits:
        init.params = replace(init.params, stops=())


def masks_of_the_step_before(right: Any) -> Any:
    def mask(self: Any) -> bytes:
        before = getattr(self, "before", right(self))
        self.before = right(self)
        return before

    return mask


def masked_without_its_last_token(right: Any) -> Any:
    def next(self: Scheduler) -> Step:
        step = right(self)
        if step.open:
            step.open = False
            for request, work in zip(self._in_flight[-1][1], step.work):
                if request.guide is not None and work.emit:
                    masks = [request.guide.mask()] * (1 + work.drafts)
                    step.masks.append(RowMasks(work.row, len(request.tokens), masks))
        return step

    return next


def planned_behind_an_open_step(right: Any) -> Any:
    def next(self: Scheduler) -> Step:
        late = [step for step, _ in self._in_flight if step.open]
        for step in late:
            step.open = False
        found = right(self)
        for step in late:
            step.open = True
        return found

    return next


def guided_too_freely(right: Any) -> Any:
    def guide(self: Scheduler) -> Any:
        masks = right(self)
        return masks and [replace(m, masks=[self._full_mask] * len(m.masks)) for m in masks]

    return guide


def scored_without_rows_for_it(right: Any) -> Any:
    def chunk(self: Scheduler, request: Request, missing: int, most: int) -> Work:
        self._free_logits += 1
        return right(self, request, missing, most)

    return chunk


def a_guide_that_gets_no_tokens(right: Any) -> Any:
    return lambda self, token: None


def ends_one_token_late(right: Any) -> Any:
    def finish_of(self: Request, token: int) -> Any:
        self.tokens.pop()
        end = right(self, token)
        self.tokens.append(token)
        return end

    return finish_of


def rollback_that_keeps_the_row(right: Any) -> Any:
    def rollback(self: Scheduler) -> None:
        self._in_flight.clear()

    return rollback


def rollback_of_the_newest_step(right: Any) -> Any:
    def rollback(self: Scheduler) -> None:
        newest = self._in_flight.pop()
        self._in_flight.clear()
        self._in_flight.append(newest)
        right(self)

    return rollback


def work_behind_the_last_token(right: Any) -> Any:
    def go_on(self: Scheduler, *args: Any) -> Any:
        for request in (live := list(self.running)):
            request.limit += 1
        found = right(self, *args)
        for request in live:
            request.limit -= 1
        return found

    return go_on


def resumed_with_tokens_under_way(right: Any) -> Any:
    def admit(self: Scheduler, *args: Any) -> None:
        held, self._in_flight = self._in_flight, deque()
        right(self, *args)
        self._in_flight = held

    return admit


def output_after_the_end(right: Any) -> Any:
    def commit(self: Scheduler, output: Any) -> Any:
        for request in self._in_flight[0][1]:
            if request.status is Status.FINISHED:
                request.status = Status.PREEMPTED
        return right(self, output)

    return commit


def published_while_under_way(right: Any) -> Any:
    def next(self: Scheduler) -> Step:
        step = right(self)
        for request in self.running:
            full = min(request.num_planned, len(request.tokens)) // self.config.page_size
            if full > request.num_published:
                self._publish(request, full)
        return step

    return next


def steps_that_overtake(right: Any) -> Any:
    def go(self: FakeExecutor, count: int) -> None:
        if count > 1:
            self._queue.reverse()
        right(self, count)

    return go


def tokens_that_come_late(right: Any) -> Any:
    def launch(self: FakeExecutor, step: Step) -> int:
        ticket = right(self, step)
        if len(self._queue) > 1:  # the newer step runs on the row's previous content
            for work in self._queue[0].work:
                row = self.rows[work.row]
                if work.emit and row is not None:
                    row.tokens[-1:] = [0]
        return ticket

    return launch


# Bugs that only appear with steps in flight, and the depth at which they do.
OVERLAPS: tuple[tuple[type, str, Callable[[Any], Any], int], ...] = (
    (Scheduler, "rollback", rollback_of_the_newest_step, 2),
    (Scheduler, "_plan_running", work_behind_the_last_token, 2),
    (Scheduler, "_admit", resumed_with_tokens_under_way, 3),
    (Scheduler, "commit", output_after_the_end, 2),
    (Scheduler, "next", published_while_under_way, 2),
    (Scheduler, "next", masked_without_its_last_token, 2),
    (Scheduler, "next", planned_behind_an_open_step, 3),
    (Scheduler, "guide", guided_too_freely, 2),
    (FakeExecutor, "_go", steps_that_overtake, 2),
    (FakeExecutor, "launch", tokens_that_come_late, 2),
)

BUGS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (PrefixCache, "match", hit_of_the_whole_prompt),
    (PrefixCache, "extend", hit_that_ignores_the_parent),
    (PrefixCache, "match", hit_on_the_page_beside),
    (PrefixMatch, "forget", match_that_keeps_evicted_pages),
    (PrefixMatch, "max_in_use", match_that_misses_new_references),
    (PrefixCache, "publish", published_before_it_is_full),
    (PrefixCache, "_forget", eviction_that_is_forgotten),
    (PagePool, "release", freed_twice),
    (PagePool, "share", shared_without_leaving_the_free_list),
    (Scheduler, "_free_row", leaked_by_a_request_that_ends),
    (Scheduler, "next", after_planning(wrong_row)),
    (Scheduler, "next", after_planning(pages_in_the_wrong_order)),
    (Scheduler, "next", after_planning(table_that_misses_growth)),
    (Scheduler, "next", after_planning(prompt_length_of_a_resumed_request)),
    (Scheduler, "next", after_planning(budget_overdrawn)),
    (Scheduler, "_preempt", preempted_but_still_computed),
    (Scheduler, "add", last_come_first_served),
    (Scheduler, "next", after_planning(stops_that_the_row_does_not_mask)),
    (Wandering, "mask", masks_of_the_step_before),
    (Banned, "accept", a_guide_that_gets_no_tokens),
    (Scheduler, "_chunk", scored_without_rows_for_it),
    (Request, "finish_of", ends_one_token_late),
    (Scheduler, "rollback", rollback_that_keeps_the_row),
    (WaitingQueue, "first", first_of_all_tenants),
    (WaitingQueue, "first", the_tenant_with_the_most_service),
    (WaitingQueue, "_start_waiting", service_saved_up),
    (scheduler_module, "last_of_most_served", victim_that_came_first),
)
