"""What the scheduler says to an executor in one step, and what the executor answers. No device, no request.

A device row holds everything of one request that the step needs: its page table, tokens, length (tokens whose KV is
written), sampling parameters and counts. The host sends only what changed. An executor applies a Step in this order:
`inits` (a row is rebuilt from host data), `pages` (a row's table grows), `masks` (what a row's next token may be),
`work` (rows compute tokens). An open step computes and does not sample yet: some of its masks come later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any, NamedTuple

from llmc_runtime.format.row_abi import FLOAT_COLUMNS, INT_COLUMNS, STOPS, WIDTH
from llmc_runtime.sched.sampling_params import PARAMETERS, SamplingParams

_NAMES = (*FLOAT_COLUMNS, *(name for name in INT_COLUMNS if name in PARAMETERS))
_Columns: Any = make_dataclass(
    "_Columns",
    [(name, float, 0.0 if name == "temperature" else PARAMETERS[name].default) for name in _NAMES],
    frozen=True,
    slots=True,
)


@dataclass(frozen=True, slots=True)
class RowParams(_Columns):
    """How one row samples, ready for the device: the parameters that are columns of it (see format.row), and these.

    Greedy is temperature 0 (the default), every seed is drawn, stop ids include the model's.
    """

    seed: int = 0  # unsigned, 64 bits
    min_tokens: int = 0
    want_logprobs: bool = False
    stops: tuple[int, ...] = ()  # masked until min_tokens are generated; empty if min_tokens is 0
    biases: tuple[tuple[int, float], ...] = ()  # (id, what is added to its logit), by id
    allowed: bytes = b""  # a mask (see guide) for all its tokens; empty: none
    guided: bool = False  # every token has a mask of its own, see RowMask

    @classmethod
    def of(cls, params: SamplingParams, **more: Any) -> RowParams:
        """The row of these parameters; `more` are the fields that are no columns of the same name."""
        return cls(**{name: getattr(params, name) for name in _NAMES}, **more)

    def floats(self) -> list[float]:
        """The row of the `fparams` state: f32[8]."""
        return [*(getattr(self, name) for name in FLOAT_COLUMNS), *[0.0] * (WIDTH - len(FLOAT_COLUMNS))]

    def ints(self, num_prompt: int) -> list[int]:
        """The row of the `iparams` state: i32[8]; the halves of the seed wrap into signed range."""
        made = {
            "seed_lo": _signed(self.seed & 0xFFFFFFFF), "seed_hi": _signed(self.seed >> 32 & 0xFFFFFFFF),
            "prompt_len": num_prompt, "min_len": num_prompt + self.min_tokens,
            "want_logprobs": int(self.want_logprobs), "num_biases": len(self.biases),
            "masked": int(self.guided or bool(self.allowed)),
        }  # fmt: skip
        return [made[name] if name in made else getattr(self, name) for name in INT_COLUMNS]

    def stop_row(self) -> list[int]:
        """The row of the `stops` state: i32[32], -1 where empty."""
        return [*self.stops, *[-1] * (STOPS - len(self.stops))]


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@dataclass(slots=True)
class RowInit:
    """(Re)build a row from host data, at admission and at resume.

    `tokens` are all tokens known so far, of which the first `num_prompt` are the prompt (they set the `seen` bitmap,
    the others the output counts); the KV of the first `computed` is already in `pages`. `pages` covers all `tokens`.
    """

    row: int
    tokens: list[int]
    computed: int
    num_prompt: int
    params: RowParams
    pages: list[int]


@dataclass(slots=True)
class RowPages:
    """Append `pages` to a row's table, whose length so far is `start`."""

    row: int
    start: int
    pages: list[int]


@dataclass(slots=True)
class RowMask:
    """What the next token of a guided row may be: a mask (see guide)."""

    row: int
    mask: bytes


@dataclass(slots=True)
class Work:
    """Run `num_tokens` tokens of a row from its device length on; `emit`: they end at its last token, so sample one;
    `score`: of each of the others, which are the prompt's, tell the log-probability of the prompt's next token."""

    row: int
    num_tokens: int
    emit: bool
    score: bool = False

    @property
    def rows(self) -> int:
        """Rows of logits that it takes."""
        return self.num_tokens if self.score else 1


class TokenLogprobs(NamedTuple):
    """Of one sampled token: its log-probability, its rank (1 is the likeliest), the likeliest ids and theirs."""

    logprob: float
    rank: int
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]


LogprobsTuple = tuple[float, int, Sequence[int], Sequence[float]]


@dataclass(slots=True)
class StepOutput:
    """One entry per Work, in its order: the sampled id (None where not `emit`), log-probabilities where wanted.
    `scores`: those of the prompt's next tokens, by the index of the Work."""

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None]
    scores: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)


@dataclass(slots=True)
class Step:
    """One step: every row occurs at most once in each list. `open`: masks of guided rows follow before it samples."""

    inits: list[RowInit] = field(default_factory=list)
    pages: list[RowPages] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    masks: list[RowMask] = field(default_factory=list)
    open: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens over all rows, the T of the step's program."""
        return sum(work.num_tokens for work in self.work)

    def reply(
        self,
        tokens: list[int | None],
        logprobs: Sequence[LogprobsTuple | None] | None = None,
        scores: Mapping[int, Sequence[LogprobsTuple]] | None = None,
    ) -> StepOutput:
        """The answer to this step, for executors that import nothing from here: plain tuples in TokenLogprobs' order;
        no logprobs at all means none wanted."""
        told = {index: [TokenLogprobs(*found) for found in row] for index, row in (scores or {}).items()}
        if logprobs is None:
            return StepOutput(tokens, [None] * len(tokens), told)
        return StepOutput(tokens, [None if found is None else TokenLogprobs(*found) for found in logprobs], told)
