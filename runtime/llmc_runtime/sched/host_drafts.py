"""HostDrafts: calls a Draft for tokens that may follow those of running requests, and passes them to the device.

A request is drafted for while no step of it is in flight, since only then all its tokens are known. Therefore the
scheduler plans a step with drafts only after the steps before it were committed (see Scheduler.next).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile
from operator import index

from llmc_runtime.sched.host_draft import Draft, DraftContext
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation import HOST_TRIES, Speculation
from llmc_runtime.sched.step import RowDrafts, Work

_MAX_FRUITLESS = 16  # fruitless tries in a row after which plans pass before the next one
FIRST_RETRY, LAST_RETRY = 16, 128  # plans between such tries: at first, and at most. Doubled after each fruitless one

log = logging.getLogger("llmc.engine")


class HostDrafts:
    """The drafts of one scheduler. Logs the first exception of the Draft, and drafts nothing from then on."""

    def __init__(self, draft: Draft, speculation: Speculation, vocab_size: int) -> None:
        self._draft: Draft | None = draft
        self.speculation, self._vocab_size = speculation, vocab_size
        self._contexts: dict[str, DraftContext] = {}
        self._drafts: dict[str, list[int]] = {}  # request id -> drafts of the plan that is being made
        self._fruitless = 0  # consecutive tries for which nothing was drafted
        self._retry_wait, self._next_try = FIRST_RETRY, 0  # plans between tries, and the plan of the next one

    @property
    def wanted(self) -> bool:
        """Whether drafts of some rows pay, or are to be tried, so that a plan needs all tokens of the requests."""
        speculation = self.speculation
        tries = self._fruitless < _MAX_FRUITLESS or speculation.plans >= self._next_try
        return self._draft is not None and speculation.wants and tries

    def propose(self, running: Sequence[Request]) -> None:
        """Draft for each running request as many tokens as are worth verifying, and set its `num_drafts`."""
        self._drafts.clear()
        tried = new = False
        for request in running:
            room = self._room(request)
            tried = tried or room > 0
            if request.guide is not None:
                drafts = list(request.drafted[: min(room, request.verifiable)])
            else:
                new = new or (room > 0 and request.id not in self._contexts)
                max_tokens = self.speculation.choose(request, room) if room else 0
                drafts = self._proposal(request, max_tokens) if max_tokens else []
            request.num_drafts = len(drafts)
            if drafts:
                self._drafts[request.id] = drafts
        if tried:
            self._wait_after(bool(self._drafts), new)
        elif self.speculation.plans >= self._next_try + HOST_TRIES:  # no request decodes
            self._next_try = self.speculation.plans + FIRST_RETRY

    def _wait_after(self, fruitful: bool, new: bool) -> None:
        """Set when to try again. `new`: some requests were drafted for the first time, so it is worth trying soon."""
        self._fruitless = 0 if fruitful else self._fruitless + 1
        if fruitful or new or self._fruitless <= _MAX_FRUITLESS:
            self._retry_wait = FIRST_RETRY
        else:
            self._retry_wait = min(2 * self._retry_wait, LAST_RETRY)
        self._next_try = self.speculation.plans + self._retry_wait

    def look(self, request: Request) -> None:
        """Draft for a request with a guide, which can thus compute the masks after the drafts before the next plan."""
        if not request.drafted and self.wanted:
            max_tokens = self.speculation.num_masked_drafts(request, self._room(request))
            if max_tokens:
                request.take_drafts(self._proposal(request, max_tokens))

    def placed(self, request: Request, item: Work) -> RowDrafts:
        """Return the change of the device row that places the tokens which `item` verifies after the last token."""
        return RowDrafts(request.row, len(request.tokens), self._drafts[request.id][: item.drafts])

    def end(self, request: Request) -> None:
        """Pass on that a request has ended."""
        context = self._contexts.pop(request.id, None)
        if context is not None and self._draft is not None:
            try:
                self._draft.end(context)
            except Exception as error:
                self._stop(error)

    def _room(self, request: Request) -> int:
        """The maximum number of tokens to draft for a request."""
        decodes = request.num_total - request.num_planned == 1 and request.num_total == len(request.tokens)
        if not decodes or not request.may_draft or self._draft is None:
            return 0
        return max(0, min(self.speculation.config.num_tokens, request.limit - 1 - request.num_total))

    def _proposal(self, request: Request, max_tokens: int) -> list[int]:
        """Return the ids that the method drafts, up to the first invalid one; an error ends drafting."""
        context = self._contexts.get(request.id)
        if context is None:
            scope = f"{len(request.tenant)}:{request.tenant}{request.cache_salt}"
            context = self._contexts[request.id] = DraftContext(request.id, request.tokens, request.num_prompt, scope)
        try:
            proposed = () if self._draft is None else self._draft.propose(context, max_tokens)
            return list(takewhile(lambda token: 0 <= token < self._vocab_size, map(index, proposed[:max_tokens])))
        except Exception as error:
            self._stop(error)
            return []

    def _stop(self, error: Exception) -> None:
        log.error("drafting has ended: %s failed", type(self._draft).__name__, exc_info=error)
        self._draft = None
        self._contexts.clear()
