"""Request: one output of a user's request as the scheduler sees it, and RequestDelta: what a step adds to it."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.packed_logprobs import PackedLogprobs
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.step import RowInit, RowParams, TokenLogprobs, Work
from llmc_runtime.sched.token_guide import Bans, Guide


class Status(IntEnum):
    """NEW (not added yet), WAITING (never ran), RUNNING (has a row), PREEMPTED (waits again), FINISHED, PARKED (in no
    queue, waits for the mask of its guide)."""

    NEW = 0
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4
    PARKED = 5


@dataclass(slots=True, eq=False)
class Account:
    """The service that a tenant has received, in weighted tokens (see waiting_queue)."""

    service: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One output to generate.

    id:          unique among live requests
    priority:    smaller runs first under the policy "priority"
    cache_salt:  prefixes are shared among requests with the same salt only
    bad_words:   token ids of `params.bad_words`
    guide:       restricts each next token
    leader:      a request with the same prompt, added before, whose pages this one waits for
    tenant:      tenants get equal service when capacity is short
    checked:     the prompt is known to consist of integers that are ids of the vocabulary

    The other fields belong to the scheduler.
    """

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: str = ""
    bad_words: Sequence[Sequence[int]] = ()
    guide: Guide | None = None
    leader: Request | None = None
    tenant: str = ""
    checked: bool = False

    status: Status = field(default=Status.NEW, init=False)
    key: tuple[int, int] = field(default=(0, 0), init=False)  # order in queues: the policy's value, then arrival
    # Prompt and output as known to the host; until the first start the prompt itself, which others may share. Those of
    # a long request that has ended are freed (see discarded_tokens).
    tokens: MutableSequence[int] = field(default_factory=list, init=False)
    num_prompt: int = field(default=0, init=False)
    num_total: int = field(default=0, init=False)  # while running: len(tokens) plus those that steps in flight sample
    num_planned: int = field(default=0, init=False)  # tokens whose KV is in `pages` after the steps in flight
    num_computed: int = field(default=0, init=False)  # tokens whose KV is in `pages` as known to the host
    num_published: int = field(default=0, init=False)  # pages offered to the prefix cache, or taken from it
    num_cached: int | None = field(default=None, init=False)  # prompt tokens found in the cache at first admission
    pages: list[int] = field(default_factory=list, init=False)
    chain: list[bytes] = field(default_factory=list, init=False)  # prefix digests of its tokens so far
    row: int = field(default=-1, init=False)
    num_cached_pages: int = field(default=0, init=False)  # cached pages of the prompt, with and without a snapshot
    snapshot: int = field(default=-1, init=False)  # the snapshot that its row starts from, until that is planned
    # Positions at which to take snapshots, ascending.
    snapshot_positions: list[int] = field(default_factory=list, init=False)
    # Digest of the last snapshot that was taken while it decoded.
    last_decode_snapshot: bytes = field(default=b"", init=False)
    decode: Work = field(default_factory=lambda: Work(-1, 1, emit=True), init=False)  # computes one token of its row
    row_params: RowParams = field(default_factory=RowParams, init=False)
    bans: Bans | None = field(default=None, init=False)
    account: Account = field(default_factory=Account, init=False)  # the tenant's account
    has_output: bool = field(default=False, init=False)  # a token was generated
    arrived: float = field(default=0.0, init=False)  # time at which it was added, by the scheduler's clock
    queued: float = field(default=0.0, init=False)  # time at which it last began to wait for a row
    started: float = field(default=0.0, init=False)  # time of its first admission
    limit: int = field(default=0, init=False)  # maximum number of tokens, including the prompt
    min_length: int = field(default=0, init=False)  # below this many tokens no stop token ends it
    eos: frozenset[int] = field(default=frozenset(), init=False)  # empty with ignore_eos
    stops: frozenset[int] = field(default=frozenset(), init=False)
    # Log-probabilities of the prompt from its second token, if requested.
    scores: PackedLogprobs | None = field(default=None, init=False)
    needs_init: bool = field(default=False, init=False)  # the next step that runs it builds its row
    # Tokens that the step in flight samples with their masks; the others are dropped. None: all.
    num_masked: int | None = field(default=None, init=False)
    late_masks: int = field(default=0, init=False)
    num_drafts: int = field(default=0, init=False)  # tokens drafted for its row, as known to the host
    drafted: Sequence[int] = field(default=(), init=False)  # if it has a guide: tokens drafted after its last one
    masks_requested: bool = field(default=False, init=False)  # the masks after them were requested
    likely: list[float] = field(default_factory=list, init=False)  # probabilities of these tokens, if known
    # Probabilities of the drafts that the last step verified.
    verified: list[float] = field(default_factory=list, init=False)
    lookahead: int = field(default=0, init=False)  # tokens that the last plan drafts, for which `pages` has room
    reach: int = field(default=0, init=False)  # tokens whose KV the draft model has (see draft_planner)
    draft_trials: tuple[float, float] = field(default=(0.0, 0.0), init=False)  # drafts tested lately, and accepted
    # Trials of drafts that prompt lookup made for a head.
    lookup_trials: tuple[float, float] = field(default=(0.0, 0.0), init=False)
    from_lookup: bool = field(default=False, init=False)  # its drafts were looked up; the head did not make them
    # Whether prompt lookup made the drafts that the last step verified.
    verifies_lookup: bool = field(default=False, init=False)
    last_probe: int = field(default=-1 << 40, init=False)  # plan that last verified a draft to learn whether it pays
    idle_plans: int = field(default=0, init=False)  # consecutive plans that left it out because its mask was not known
    slow_until: int = field(default=0, init=False)  # below this many tokens steps do not wait for its mask

    @property
    def may_draft(self) -> bool:
        """Whether its steps can verify drafts: if it has a guide, the device must have room for a mask after each."""
        return self.guide is None or self.row_params.guided > 1

    @property
    def verifiable(self) -> int:
        """The number of drafts that a step can verify now, if it has a guide and all its tokens are known."""
        return len(self.masks_ahead()) if self.may_draft else 0

    def masks_ahead(self) -> Sequence[bytes]:
        """Return the known masks after the first of its drafts. Those of a guide that has not looked at these drafts
        are the masks after other tokens.
        """
        return () if self.guide is None or not self.masks_requested else self.guide.masks_ahead()

    def take_drafts(self, drafts: Sequence[int]) -> None:
        """Set the tokens that are drafted after its last one."""
        self.drafted, self.masks_requested = drafts, False

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return list(self.tokens[self.num_prompt :])

    def inherit(self, page_size: int) -> None:
        """Copy the prompt's prefix digests that the leader has computed."""
        leader = self.leader
        if leader is None or leader.prompt_token_ids is not self.prompt_token_ids:
            return
        if len(self.chain) == 1 and leader.chain[:1] == self.chain:
            self.chain += leader.chain[1 : 1 + self.num_prompt // page_size]

    def start(self, row: int, pages: list[int], hits: int, cached: int) -> None:
        """Run on these pages, of which the first `hits` hold the KV of the first `cached` tokens."""
        self.status = Status.RUNNING
        self.row, self.pages, self.num_published = row, pages, hits
        self.needs_init = True
        if self.tokens is self.prompt_token_ids:
            self.tokens = self._own_tokens()
        self.num_total = len(self.tokens)
        self.num_planned = self.num_computed = cached
        self.num_drafts = self.lookahead = self.reach = 0
        self.take_drafts(())
        self.decode = Work(row, 1, emit=True)

    def _own_tokens(self) -> list[int]:
        """Return a list of the prompt's tokens. The outputs of a request share the objects that its leader has made."""
        leader, source = self.leader, self.tokens
        if leader is not None and leader.status is not Status.FINISHED and leader.prompt_token_ids is source:
            source = leader.tokens
        tokens = source[: self.num_prompt]
        return tokens if isinstance(tokens, list) else list(tokens)

    def row_init(self) -> RowInit:
        """Return the data that builds the row of this running request."""
        self.needs_init = False
        tokens, computed = self.prompt_token_ids, self.num_computed  # the prompt is never changed
        if len(self.tokens) > self.num_prompt:
            tokens = list(self.tokens)
        return RowInit(self.row, tokens, computed, self.num_prompt, self.row_params, list(self.pages), self.snapshot)

    def restart(self) -> None:
        """Drop the tokens of the step in flight that are not appended: the row, if there is one, is rebuilt without."""
        self.num_masked = None
        if self.status is Status.RUNNING:
            self.num_drafts = self.lookahead = 0
            self.take_drafts(())
            self.num_planned = self.num_computed
            self.num_total = len(self.tokens)
            self.needs_init = True

    def finish_of(self, token: int) -> tuple[str, int | None] | None:
        """Return (finish reason, stop reason) if `token`, the last of `tokens`, ends the request, else None.

        The stop reason is the id for a stop token id, None for an end-of-sequence token (as in vLLM).
        """
        length = len(self.tokens)
        if length >= self.min_length:
            if token in self.eos:
                return "stop", None
            if token in self.stops:
                return "stop", token
        return ("length", None) if length >= self.limit else None


@dataclass(slots=True)
class RequestDelta:
    """The result of one step for one request.

    new_token_ids:    includes a stop token, in which case `stopped` is True
    finish_reason:    None while the request runs, else "stop", "length" or "error" (with `error`)
    num_cached:       prompt tokens found in the prefix cache
    prompt_logprobs:  with the first token only, if requested: of the prompt's tokens from the second on
    times:            with the first token only: seconds in the queue, and from the start to that token
    pooled:           of a model that pools, at the end: f32 numbers
    """

    id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    num_cached: int = 0
    error: LlmcError | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    stopped: bool = False
    times: tuple[float, float] | None = None
    pooled: bytes | None = None


def delta_of(request: Request, token: int, logprobs: TokenLogprobs | None, clock: Callable[[], float]) -> RequestDelta:
    """Return the delta of a token that was just appended to the request, by the scheduler's `clock`.

    Raises RuntimeError if requested log-probabilities, or scores of the prompt, are missing.
    """
    delta = RequestDelta(request.id, [token], None, None, None, request.num_cached or 0)
    if not request.has_output:
        request.has_output = True
        delta.times = (request.started - request.arrived, clock() - request.started)
        delta.prompt_logprobs = _scores_of(request)
    num_logprobs = request.params.logprobs
    if num_logprobs is not None:
        if logprobs is None:
            raise RuntimeError(f"row {request.row} of request {request.id!r}: log-probabilities are missing")
        ids, values = logprobs.top_ids[:num_logprobs], logprobs.top_logprobs[:num_logprobs]
        delta.logprobs = [TokenLogprobs(logprobs.logprob, logprobs.rank, tuple(ids), tuple(values))]
    return delta


def _scores_of(request: Request) -> Sequence[TokenLogprobs] | None:
    """Return the log-probabilities of the prompt, if they were requested."""
    if request.scores is not None and len(request.scores) != request.num_prompt - 1:
        count = f"{len(request.scores)} scores of a prompt of {request.num_prompt}"
        raise RuntimeError(f"request {request.id!r}: {count}")
    return request.scores


def extend(delta: RequestDelta | None, more: RequestDelta) -> RequestDelta:
    """Return the delta of a run of tokens that `more` continues; None is the delta of no tokens."""
    if delta is None:
        return more
    delta.new_token_ids += more.new_token_ids
    if more.logprobs is not None:
        delta.logprobs = [*(delta.logprobs or ()), *more.logprobs]
    delta.finish_reason, delta.stop_reason, delta.stopped = more.finish_reason, more.stop_reason, more.stopped
    delta.error = more.error
    return delta


def add_scores(request: Request, item: Work, scores: Sequence[TokenLogprobs]) -> None:
    """Take the log-probabilities of the prompt tokens that follow those of a chunk. Raises RuntimeError for a wrong
    number of them.
    """
    if request.scores is None or len(scores) != item.num_tokens - item.emit:
        raise RuntimeError(f"request {request.id!r}: {len(scores)} scores of a chunk of {item.num_tokens} tokens")
    request.scores.extend(scores)
