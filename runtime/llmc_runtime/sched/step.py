"""Step and StepOutput: the scheduler's message to an executor for one step, and the executor's result.

A device row holds the state of one request: its page table, tokens, length (tokens whose KV is written), sampling
parameters, counts, and the states of recurrent layers. The host sends only changes. An executor applies a Step in this
order: `inits` (rebuild a row from host data), `pages` (extend a row's page table), `drafts` (place drafted tokens),
`masks` (restrict a row's next tokens), `work` (compute tokens), `saves` (copy states of recurrent layers).
An open step computes logits and samples later, when its remaining masks are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any, NamedTuple

from llmc_runtime.format.row_abi import STOPS, WIDTH
from llmc_runtime.sched.draft_stops import Stop
from llmc_runtime.sched.row_columns import FLOAT_COLUMNS, INT_COLUMNS, OFF
from llmc_runtime.sched.sampling_params import PARAMETERS, SamplingParams

_Columns: Any = make_dataclass(
    "_Columns",
    [(name, type(PARAMETERS[name].default), value) for name, value in OFF.items()],
    frozen=True,
    slots=True,
)


@dataclass(frozen=True, slots=True)
class RowParams(_Columns):
    """The sampling parameters of a row: those that are columns of the device row (see row_columns), and these.

    Greedy is temperature 0 (the default). The seed is always set, and stop ids include the model's.
    """

    seed: int = 0  # unsigned, 64 bits
    min_tokens: int = 0
    want_logprobs: bool = False
    stops: tuple[int, ...] = ()  # excluded until min_tokens are generated; empty if min_tokens is 0
    biases: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit), by id
    allowed: bytes = b""  # a mask (see token_guide) for all tokens; empty: none
    guided: int = 0  # the number of masks that the row has room for, if each token has one of its own (see RowMasks)
    drafting: tuple[int, int, int] = (0, 0, 0)  # max_drafts, min_ngram, max_ngram (see format.row_abi)

    @classmethod
    def of(cls, params: SamplingParams, **more: Any) -> RowParams:
        """Return the row for these parameters; `more` are the fields that are not columns of the same name."""
        return cls(**{name: getattr(params, name) for name in OFF}, **more)

    def floats(self) -> list[float]:
        """Return the row of the state `fparams`: f32[8]."""
        return [*(getattr(self, name) for name in FLOAT_COLUMNS), *[0.0] * (WIDTH - len(FLOAT_COLUMNS))]

    def ints(self, num_prompt: int) -> list[int]:
        """Return the row of the state `iparams`: i32[8]. The halves of the seed wrap into the signed range."""
        derived = {
            "seed_lo": _signed(self.seed & 0xFFFFFFFF), "seed_hi": _signed(self.seed >> 32 & 0xFFFFFFFF),
            "prompt_len": num_prompt, "min_len": num_prompt + self.min_tokens,
            "want_logprobs": int(self.want_logprobs), "num_biases": len(self.biases),
            "masked": self.guided or int(bool(self.allowed)),
        }  # fmt: skip
        return [derived[name] if name in derived else getattr(self, name) for name in INT_COLUMNS]

    def stop_row(self) -> list[int]:
        """Return the row of the state `stops`: i32[32], -1 for empty entries."""
        return [*self.stops, *[-1] * (STOPS - len(self.stops))]

    def draft_row(self) -> list[int]:
        """Return the row of the state `drafts`, with no tokens drafted."""
        return [0, *self.drafting]


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@dataclass(slots=True)
class RowInit:
    """Build a row from host data, at admission and after a preemption.

    tokens:      all tokens known so far; outputs of a request that have none of their own share its prompt
    computed:    the KV of this many first tokens is in `pages` already
    num_prompt:  this many first tokens are the prompt: they set the `seen` bitmap, the others the output counts
    pages:       cover all tokens
    snapshot:    copy the states of recurrent layers from this entry; -1: leave them (they are not read if `computed` is
                 0, and else those of the same request)
    """

    row: int
    tokens: Sequence[int]
    computed: int
    num_prompt: int
    params: RowParams
    pages: list[int]
    snapshot: int = -1


@dataclass(slots=True)
class RowPages:
    """Append `pages` to a row's page table, whose length is `start`."""

    row: int
    start: int
    pages: list[int]


@dataclass(slots=True)
class RowDrafts:
    """Tokens drafted on the host for a row that has `start` tokens, which are placed after them."""

    row: int
    start: int
    tokens: list[int]


@dataclass(slots=True)
class RowMasks:
    """The masks of the next tokens of a guided row (see token_guide), of which the first has the position `start`: one
    for the next token, and one after each draft that the step verifies.

    look:  if it is not 0, the step returns that many of the row's tokens, from `start` on, with drafts after the last
    """

    row: int
    start: int
    masks: list[bytes]
    look: int = 0


@dataclass(slots=True)
class Work:
    """Compute the next `num_tokens` tokens of a row.

    emit:   they include the row's last token, so sample one
    score:  return the log-probability of the prompt's next token for each of the others, which belong to the prompt
    drafts: the last `drafts` of them are drafted. Those that agree with what is sampled are accepted

    After that, a draft model computes the KV of `fill` tokens of the row, beginning with the token at `fill_from`, and
    drafts `propose` tokens after the row's last one, or fewer if `stop` ends drafting. With `lookup`, it drafts nothing
    if prompt lookup has found drafts.
    """

    row: int
    num_tokens: int
    emit: bool
    score: bool = False
    drafts: int = 0
    fill: int = 0
    fill_from: int = 0
    propose: int = 0
    stop: Stop | None = None
    lookup: bool = False

    @property
    def rows(self) -> int:
        """The number of rows of logits that it needs."""
        return self.num_tokens if self.score or self.drafts else 1


@dataclass(slots=True)
class RowSave:
    """After the step's work, copy the states of a row's recurrent layers to the snapshot `entry`.

    `position` is the number of tokens after which a row can go on from there. If drafts are verified, it may be any
    after the step's first token.
    """

    row: int
    entry: int
    position: int


class TokenLogprobs(NamedTuple):
    """The (natural) log-probability of a token, its rank (1: most likely), and the most likely ids with theirs."""

    logprob: float
    rank: int
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]


@dataclass(slots=True)
class StepOutput:
    """The output of a step, with one entry per Work.

    tokens:    the sampled ids, None without `emit`
    logprobs:  those of the sampled tokens, None if not requested
    scores:    those of the prompt's next tokens, by the index of the Work
    accepted:  the tokens after the first one, with their log-probabilities, by the index of a Work with drafts
    proposed:  the number of tokens drafted now for each Work's row; empty if none are
    looked:    the tokens that RowMasks with `look` request, by row
    likely:    the probabilities that a draft model gives to the tokens which it has drafted, by index of the Work;
               empty if the device does not return them
    pooled:    for a model that pools, which samples nothing: f32 numbers, empty without `emit`; else empty
    """

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None]
    scores: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    accepted: Mapping[int, Sequence[tuple[int, TokenLogprobs | None]]] = field(default_factory=dict)
    proposed: Sequence[int] = ()
    pooled: Sequence[bytes] = ()
    looked: Mapping[int, Sequence[int]] = field(default_factory=dict)
    likely: Mapping[int, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """One step. A row occurs at most once in each list.

    open:  it samples when the masks of guided rows follow
    plain: no program of a draft model or head follows, and it may store zeros as the head's keys and values
    """

    inits: list[RowInit] = field(default_factory=list)
    pages: list[RowPages] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    masks: list[RowMasks] = field(default_factory=list)
    open: bool = False
    drafts: list[RowDrafts] = field(default_factory=list)
    plain: bool = False
    saves: list[RowSave] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all rows, the dimension T of the step's program."""
        return sum(work.num_tokens for work in self.work)


def prompt_tokens(work: Sequence[Work]) -> int:
    """Return the number of tokens that a step computes for rows that do not decode."""
    return sum(item.num_tokens for item in work if item.num_tokens > 1 + item.drafts)
