"""Plans the work of a draft model after a step: for which tokens to compute KV, and how many tokens to draft.

The draft model has KV pools of its own, with the pages and page tables of the model that verifies. Which KV is there
affects only how many drafts are accepted. A request's `reach` is the number of its first tokens whose KV the draft
model has, as known to the host. A row for which the last plan drafted needs no more KV, since the first draft is made
by a step over the row's last two tokens. A row without drafts falls behind, and catches up when drafting pays again.
A head (EAGLE-3) never falls behind: the steps of the model that verifies compute its KV, or store zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmc_runtime.kv.pages import PagePool
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation import Speculation
from llmc_runtime.sched.step import Step, Work


class DraftPlanner:
    """Plans for one scheduler.

    page_size: tokens of a page. tokens, entries: maximum tokens and rows of a step.
    """

    def __init__(self, speculation: Speculation, pool: PagePool, page_size: int, tokens: int, entries: int) -> None:
        self.speculation, self.pool, self.page_size = speculation, pool, page_size
        self._limits = tokens, entries
        self._tokens = self._entries = self._rows = 0  # what is left of the step's limits
        self._drafted: set[int] = set()  # pages of which the draft model has the KV of all tokens

    def begin(self) -> None:
        """Begin a step."""
        self._tokens, self._entries = self._limits
        self._rows = self.speculation.config.max_rows

    def taken(self, pages: Iterable[int]) -> None:
        """Forget the KV of the draft model in pages that get new content."""
        self._drafted.difference_update(pages)

    def forget(self) -> None:
        """Forget everything, after steps were dropped."""
        self._drafted.clear()
        self.speculation.prompts.forget()

    def plain(self, step: Step, requests: Sequence[Request], only_decodes: bool) -> bool:
        """Return Step.plain of a step of these requests. only_decodes: it has one token of each and no drafts."""
        policy = self.speculation
        return (only_decodes and policy.unmeasured) or policy.plain(step.work, requests)

    def start(self, request: Request, hits: Sequence[int]) -> None:
        """Begin to run a request, with the pages of the prefix cache that it has got."""
        self.speculation.wake()
        count = next((i for i, page in enumerate(hits) if page not in self._drafted), len(hits))
        request.reach = count * self.page_size

    def plan(self, request: Request, item: Work, end: int) -> Work:
        """Return the work of a request in a step, with that of the draft model after it.

        `end` is the maximum number of tokens whose KV the request has after the step. Drafts are limited to the pages
        that are free; the caller takes those for `end + propose` tokens.
        """
        followed = request.num_drafts > 0
        request.num_drafts = request.lookahead = 0
        request.likely, request.from_lookup = [], False
        wanted = self.speculation.proposals(request) if request.may_draft else 0
        if not wanted:
            return item
        missing = 0 if followed or self.speculation.config.head else max(0, end - request.reach)
        fill, start = min(missing, self._tokens) if self._entries else 0, request.reach
        if fill:
            self._tokens -= fill
            self._entries -= 1
            self._advance(request, start + fill)
        propose = 0
        if item.emit and fill == missing and self._rows:
            free = (len(request.pages) + self.pool.num_free) * self.page_size - end
            propose = max(0, min(wanted, request.limit - 2 - end, free))
        if propose:
            self._rows -= 1
            self._advance(request, len(request.tokens))
        request.num_drafts = request.lookahead = propose
        if not (fill or propose):
            return item
        stop = self.speculation.stop(request) if propose > 1 else None
        lookup = self.speculation.prefers_lookup(request)
        if lookup:
            request.num_drafts = 0  # the step's output tells how many there are, and by which method
        return Work(item.row, item.num_tokens, item.emit, item.score, item.drafts, fill, start, propose, stop, lookup)

    def _advance(self, request: Request, reach: int) -> None:
        """Record that the draft model gets the KV of the first `reach` tokens, as far as they are known."""
        reach = min(reach, len(request.tokens))
        size = self.page_size
        self._drafted.update(request.pages[request.reach // size : reach // size])
        request.reach = max(request.reach, reach)
