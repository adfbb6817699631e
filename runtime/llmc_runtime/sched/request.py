"""One request: what was asked, and how far it is. It decides when it ends; who runs next is the scheduler's affair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.packed_logprobs import PackedLogprobs
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.step import RowInit, RowParams, TokenLogprobs, Work
from llmc_runtime.sched.token_guide import Bans, Guide


class Status(IntEnum):
    """NEW (not added yet), WAITING (never ran), RUNNING (has a row), PREEMPTED (waits again), FINISHED, PARKED (in no
    queue, until the mask of its guide is there)."""

    NEW = 0
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4
    PARKED = 5


@dataclass(slots=True, eq=False)
class Account:
    """How much service somebody got, in weighted tokens (see waiting)."""

    service: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """What was asked: `id` is unique among live requests, smaller `priority` runs first (policy "priority"), prefixes
    are shared within one `cache_salt`; `bad_words` are those of the parameters as token ids; a `leader` is a request of
    the same prompt, added before, whose pages it waits for; tenants get equal service where there is too little. The
    other fields belong to the scheduler."""

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: str = ""
    bad_words: Sequence[Sequence[int]] = ()
    guide: Guide | None = None
    leader: Request | None = None
    tenant: str = ""

    status: Status = field(default=Status.NEW, init=False)
    key: tuple[int, int] = field(default=(0, 0), init=False)  # its place in the queue: the policy's value, then arrival
    tokens: list[int] = field(default_factory=list, init=False)  # prompt and output, as far as the host knows
    num_prompt: int = field(default=0, init=False)
    num_total: int = field(default=0, init=False)  # while it runs: len(tokens) and those that steps under way sample
    num_planned: int = field(default=0, init=False)  # tokens whose KV is in `pages` after the steps under way
    num_computed: int = field(default=0, init=False)  # tokens whose KV is in `pages` as far as the host knows
    num_published: int = field(default=0, init=False)  # pages offered to the prefix cache, or taken from it
    num_cached: int | None = field(default=None, init=False)  # prompt tokens found in the cache at first admission
    pages: list[int] = field(default_factory=list, init=False)
    chain: list[bytes] = field(default_factory=list, init=False)  # prefix digests of its tokens so far
    row: int = field(default=-1, init=False)
    decode: Work = field(default_factory=lambda: Work(-1, 1, True), init=False)  # one token of its row
    row_params: RowParams = field(default_factory=RowParams, init=False)
    bans: Bans | None = field(default=None, init=False)
    account: Account = field(default_factory=Account, init=False)  # its tenant's
    silent: bool = field(default=True, init=False)  # nothing was generated yet
    arrived: float = field(default=0.0, init=False)  # when it was added, by the scheduler's clock
    started: float = field(default=0.0, init=False)  # when it was first admitted
    limit: int = field(default=0, init=False)  # it ends at this many tokens, prompt included
    gate: int = field(default=0, init=False)  # below this many tokens nothing stops it
    eos: frozenset[int] = field(default=frozenset(), init=False)  # empty where ignored
    stops: frozenset[int] = field(default=frozenset(), init=False)
    scores: PackedLogprobs | None = field(default=None, init=False)  # of the prompt from its second token, if wanted
    needs_init: bool = field(default=False, init=False)  # its row is built by the next step that runs it
    dropped: bool = field(default=False, init=False)  # its mask was late for the step under way, whose token is dropped
    late_masks: int = field(default=0, init=False)
    idle_plans: int = field(default=0, init=False)  # in a row, that left it out because its mask was not known
    slow_until: int = field(default=0, init=False)  # below this many tokens no step waits for its mask

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.num_prompt :]

    def inherit(self, page_size: int) -> None:
        """Take the prefix digests of the prompt from the leader, as far as they are known there."""
        leader = self.leader
        if leader is not None and len(self.chain) == 1 and leader.chain[:1] == self.chain:
            if leader.prompt_token_ids is self.prompt_token_ids:
                self.chain += leader.chain[1 : 1 + self.num_prompt // page_size]

    def row_init(self) -> RowInit:
        """Builds the row of a running request from what the host knows."""
        self.needs_init = False
        known, computed = list(self.tokens), self.num_computed
        return RowInit(self.row, known, computed, self.num_prompt, self.row_params, list(self.pages))

    def restart(self) -> None:
        """The token of the step under way is dropped: the row, if it has one, is rebuilt as it was before that step."""
        self.dropped = False
        if self.status is Status.RUNNING:
            self.num_planned, self.num_total, self.needs_init = self.num_computed, len(self.tokens), True

    def finish_of(self, token: int) -> tuple[str, int | None] | None:
        """(finish reason, stop reason) if `token`, the last of `tokens`, ends the request; else None.

        The stop reason is the id for a stop token id, None for an end-of-sequence token (as in vLLM).
        """
        length = len(self.tokens)
        if length >= self.gate:
            if token in self.eos:
                return "stop", None
            if token in self.stops:
                return "stop", token
        return ("length", None) if length >= self.limit else None


@dataclass(slots=True)
class RequestDelta:
    """What one step did for one request. A stop token is among `new_token_ids` (`stopped`: the last one is such);
    `finish_reason` is None while it goes on, else "stop", "length" or "error" (then with `error`); `num_cached`: prompt
    tokens found in the cache; `prompt_logprobs`, with the first token alone: of the prompt's tokens from the second on,
    where wanted; `times`, with the first token alone: the seconds that it waited, and from its start to that token."""

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
