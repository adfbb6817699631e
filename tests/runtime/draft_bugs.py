"""Bugs of speculative decoding for the simulator to detect, in the form of those in bugs.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llmc_runtime.sched import guided_requests, live_requests, scheduler
from llmc_runtime.sched.draft_planner import DraftPlanner
from llmc_runtime.sched.host_drafts import HostDrafts
from llmc_runtime.sched.request import Request, Status, extend
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.speculation import Speculation
from llmc_runtime.sched.step import RowDrafts, RowMasks, Work
from llmc_runtime.sched.token_guide import Banned


def rejected_drafts_that_stay(right: Any) -> Any:
    def append_run(self: Scheduler, request: Request, item: Work, run: Any) -> Any:
        done = right(self, request, item, run)
        if request.status is Status.RUNNING:
            request.num_computed += item.num_tokens - len(run)
        return done

    return append_run


def pages_of_drafts_that_leak(right: Any) -> Any:
    def append_run(self: Scheduler, request: Request, item: Work, run: Any) -> Any:
        pages = list(request.pages)
        done = right(self, request, item, run)
        if request.status is Status.RUNNING and len(pages) > len(request.pages):
            self.pool.take(1)
        return done

    return append_run


def pages_freed_while_drafts_need_them(right: Any) -> Any:
    def append_run(self: Scheduler, request: Request, item: Work, run: Any) -> Any:
        planned = request.num_planned
        request.num_planned = max(0, planned - self.config.page_size)
        done = right(self, request, item, run)
        request.num_planned += planned - max(0, planned - self.config.page_size)
        return done

    return append_run


def drafts_behind_the_last_token(right: Any) -> Any:
    def with_drafts(self: Scheduler, speculation: Any, request: Request, budget: int) -> Work:
        request.limit += 2
        item = right(self, speculation, request, budget)
        request.limit -= 2
        return item

    return with_drafts


def tokens_accepted_behind_the_end(right: Any) -> Any:
    def extend(delta: Any, more: Any) -> Any:
        done = right(delta, more)
        if done.finish_reason == "stop":
            done.new_token_ids.append(0)
        return done

    return extend


def tokens_appended_behind_the_end(right: Any) -> Any:
    def append_run(self: Scheduler, request: Request, item: Work, run: Any) -> Any:
        done = right(self, request, item, run)
        for token, logprobs in run[len(done.new_token_ids) :]:
            done = extend(done, self._append(request, token, logprobs))
        return done

    return append_run


def pages_published_without_the_last_kv(right: Any) -> Any:
    def append_run(self: Scheduler, request: Request, item: Work, run: Any) -> Any:
        done = right(self, request, item, run)
        full = (request.num_computed + 1) // self.config.page_size
        if request.status is Status.RUNNING and request.num_published < full <= len(request.pages):
            self._publish(request, full)
        return done

    return append_run


def tokens_without_masks_appended(right: Any) -> Any:
    def append_verified(self: Scheduler, request: Request, *step: Any) -> Any:
        request.num_masked = None
        return right(self, request, *step)

    return append_verified


def kv_that_the_draft_model_lacks(right: Any) -> Any:
    def plan(self: DraftPlanner, request: Request, item: Work, end: int) -> Work:
        if not request.num_drafts:
            request.reach = max(request.reach, min(len(request.tokens), request.reach + 1))
        done: Work = right(self, request, item, end)
        return done

    return plan


def pages_of_dropped_content(right: Any) -> Any:
    return lambda self, pages: None


def drafts_behind_the_pages(right: Any) -> Any:
    def plan(self: DraftPlanner, request: Request, item: Work, end: int) -> Work:
        done: Work = right(self, request, item, end)
        return replace(done, propose=done.propose + 1) if done.propose else done

    return plan


def pages_of_a_draft_freed(right: Any) -> Any:
    def append_run(self: Scheduler, request: Request, item: Work, run: Any) -> Any:
        request.lookahead = 0
        return right(self, request, item, run)

    return append_run


def drafts_placed_behind_a_gap(right: Any) -> Any:
    def placed(self: HostDrafts, request: Request, item: Work) -> RowDrafts:
        return replace(right(self, request, item), start=len(request.tokens) + 1)

    return placed


def ids_that_the_vocabulary_lacks(right: Any) -> Any:
    def proposal(self: HostDrafts, request: Request, most: int) -> list[int]:
        found: list[int] = right(self, request, most)
        return [*found, self._vocab_size]

    return proposal


def outputs_that_never_end(right: Any) -> Any:
    return lambda self, request: None


def one_mask_for_all_drafts(right: Any) -> Any:
    def masks_of(request: Request, work: Work, *more: Any) -> RowMasks:
        made: RowMasks = right(request, work, *more)
        return replace(made, masks=made.masks[:1] * len(made.masks))

    return masks_of


def tokens_kept_without_masks(right: Any) -> Any:
    return lambda request, work, mask: None


def masks_behind_other_drafts(right: Any) -> Any:
    def take_drafts(request: Request, work: Work, output: Any, proposals: int, count: int = 1, *more: bool) -> None:
        right(request, work, output, proposals, count - 1, *more)

    return take_drafts


def planned_behind_tokens_without_masks(right: Any) -> Any:
    def may_sample(request: Request) -> bool:
        masked, request.num_masked = request.num_masked, request.num_masked or None
        if masked:
            request.num_masked = None
        can: bool = right(request)
        request.num_masked = masked
        return can

    return may_sample


def masks_of_rejected_drafts(right: Any) -> Any:
    def accept(self: Banned, token: int) -> None:
        ahead = self._ahead
        right(self, token)
        self._mask = ahead[0] if ahead else None

    return accept


def steps_that_skip_what_drafts_need(right: Any) -> Any:
    return lambda self, work, requests=(): True


def drafts_that_were_not_made(right: Any) -> Any:
    def learn(self: Speculation, work: Any, requests: Any, output: Any, *more: Any) -> None:
        right(self, work, requests, output, *more)
        for index in output.likely:
            requests[index].num_drafts, requests[index].likely = work[index].propose, []

    return learn


DRAFT_BUGS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (Scheduler, "_append_run", rejected_drafts_that_stay),
    (Scheduler, "_append_run", pages_of_drafts_that_leak),
    (Scheduler, "_append_run", pages_freed_while_drafts_need_them),
    (Scheduler, "_with_drafts", drafts_behind_the_last_token),
    (live_requests, "extend", tokens_accepted_behind_the_end),
    (Scheduler, "_append_run", tokens_appended_behind_the_end),
    (Scheduler, "_append_run", pages_published_without_the_last_kv),
    (Scheduler, "_append_verified", tokens_without_masks_appended),
    (DraftPlanner, "plan", kv_that_the_draft_model_lacks),
    (DraftPlanner, "taken", pages_of_dropped_content),
    (DraftPlanner, "plan", drafts_behind_the_pages),
    (Scheduler, "_append_run", pages_of_a_draft_freed),
    (HostDrafts, "placed", drafts_placed_behind_a_gap),
    (HostDrafts, "_proposal", ids_that_the_vocabulary_lacks),
    (HostDrafts, "end", outputs_that_never_end),
    (guided_requests, "_masks_of", one_mask_for_all_drafts),
    (guided_requests, "_num_masked", tokens_kept_without_masks),
    (scheduler, "take_drafts", masks_behind_other_drafts),
    (scheduler, "may_sample", planned_behind_tokens_without_masks),
    (Banned, "accept", masks_of_rejected_drafts),
    (Speculation, "plain", steps_that_skip_what_drafts_need),
    (Speculation, "learn", drafts_that_were_not_made),
)
