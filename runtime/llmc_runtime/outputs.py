"""What a program gets back for a request, in vLLM's words, assembled from the engine's deltas; it runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.logprobs import Logprob as Logprob
from llmc_runtime.logprobs import LogprobRows, Row
from llmc_runtime.sched.packed_logprobs import PackedLogprobs
from llmc_runtime.sched.request import RequestDelta
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.text.output_text import OutputText
from llmc_runtime.text.tokenizer import Tokenizer


@dataclass
class CompletionOutput:
    """The generated side of a request.

    `token_ids` includes the token that ended it; `text` leaves out stop strings and stop tokens unless asked for.
    `finish_reason`: "stop", "length", "abort", or None while it goes on; `stop_reason`: the stop string or stop
    token id, None for the model's own end token. `logprobs`: per token, candidates by id, the sampled one first; in
    outputs of the kind "delta" a sequence that makes each mapping when it is read, otherwise a list.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[Row | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether nothing will be added."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request and what it produced; `num_cached_tokens` prompt tokens came from the prefix cache. `prompt_logprobs`:
    per prompt token, candidates by id, its own first; None for the first token, which has no predecessor. It is a list,
    or for the kind "delta" a sequence as `logprobs` are.
    `times`: the seconds that it waited for a row, and from there to its first token; None before that."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[Row | None] | None = None
    times: tuple[float, float] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Piece:
    """What is new since the last piece of a stream; the texts of all pieces of an `index` joined are that output's."""

    text: str
    token_ids: list[int]
    logprobs: list[Row | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    index: int = 0


@dataclass
class Collector:
    """Follows one output of a request: takes the engine's deltas, gives pieces or the whole. `visible` special tokens
    are in its text even where others are skipped."""

    request_id: str
    index: int
    prompt_ids: Sequence[int]
    params: SamplingParams
    tokenizer: Tokenizer | None
    visible: frozenset[int] = frozenset()
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: LlmcError | None = None
    num_cached: int = 0
    times: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        params = self.params
        self._text = OutputText(
            self.tokenizer if params.detokenize else None,
            self.prompt_ids,
            stop=tuple(params.stop or ()),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            visible=self.visible,
        )
        self._given = 0
        self._total = 0.0  # log-probability of all tokens
        self._rows = PackedLogprobs(params.logprobs or 0)
        self._scores: PackedLogprobs | None = None  # of the prompt, from its second token
        self._listed: list[Row | None] | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing will be added."""
        return self.finish_reason is not None

    @property
    def fresh(self) -> bool:
        """Whether there are tokens that no piece has told of yet."""
        return len(self.token_ids) > self._given

    @property
    def num_scored(self) -> int:
        """Prompt tokens whose log-probabilities are there and not in a list yet."""
        return 0 if self._scores is None or self._listed is not None else len(self._scores)

    @property
    def scores(self) -> LogprobRows | None:
        """The log-probabilities of the prompt, each made when it is read."""
        if self._scores is None:
            return None
        if len(self._scores) != len(self.prompt_ids) - 1:
            raise ValueError("the log-probabilities are not those of the prompt")
        return LogprobRows(self.prompt_ids, self._scores, self._spelled, 0, len(self.prompt_ids), 1)

    @property
    def prompt_logprobs(self) -> list[Row | None] | None:
        """The same as a list, made on first use. A thread may do that: a long prompt has a million objects."""
        scores = self.scores
        if self._listed is None and scores is not None:
            self._listed = list(scores)
        return self._listed

    def take(self, delta: RequestDelta) -> bool:
        """Add a delta; True if a stop string ended the request, which the engine then has to be told."""
        if self.finished:
            return False
        self.num_cached = delta.num_cached
        if delta.times is not None:
            self.times = delta.times
        if delta.prompt_logprobs is not None:
            self._scores = PackedLogprobs(self.params.prompt_logprobs or 0)
            self._scores.extend(delta.prompt_logprobs)
        rows, last = delta.logprobs, len(delta.new_token_ids) - 1
        for i, token in enumerate(delta.new_token_ids):
            self.token_ids.append(token)
            if rows:
                self._rows.append(rows[i])
                self._total += rows[i].logprob
            silent = i == last and delta.stopped and not self.params.include_stop_str_in_output
            if not silent and (stop := self._text.push(token)) is not None:
                self._end("stop", stop)
                return not (i == last and delta.finish_reason)
        if delta.finish_reason is not None:
            self.error = delta.error
            self._end(delta.finish_reason, delta.stop_reason)
        return False

    def abort(self) -> None:
        """End it where it is, because nobody waits for the rest."""
        if not self.finished:
            self._end("abort", None)

    def piece(self) -> Piece:
        """What is new since the last call."""
        one = self.news()
        rows = None if one.logprobs is None else list(one.logprobs)
        return Piece(one.text, one.token_ids, rows, one.finish_reason, one.stop_reason, one.index)

    def news(self) -> CompletionOutput:
        """The same, as an output."""
        start, self._given = self._given, len(self.token_ids)
        tokens, total, logprobs = self.token_ids[start:], None, None
        if self.params.logprobs is not None:
            logprobs = LogprobRows(self.token_ids, self._rows, self._spelled, start, self._given)
            total = sum(self._rows.own(i)[0] for i in range(start, self._given))
        text = self._text.take(final=self.finished)
        return CompletionOutput(self.index, text, tokens, total, logprobs, self.finish_reason, self.stop_reason)

    def output(self) -> CompletionOutput:
        """Everything so far."""
        wanted, count = self.params.logprobs is not None, len(self.token_ids)
        return CompletionOutput(
            self.index,
            self._text.text,
            list(self.token_ids),
            self._total if wanted else None,
            list(LogprobRows(self.token_ids, self._rows, self._spelled, 0, count)) if wanted else None,
            self.finish_reason,
            self.stop_reason,
        )

    def _end(self, reason: str, stop: int | str | None) -> None:
        late = self._text.finish()
        if late is not None and reason != "stop":
            reason, stop = "stop", late
        self.finish_reason, self.stop_reason = reason, stop

    def _spelled(self, token: int) -> str | None:
        if self.tokenizer is None or not self.params.detokenize:
            return None
        return self.tokenizer.spelled(token)


@dataclass
class Answer:
    """A request and its n outputs, by index; the engine knows each by an id of its own."""

    request_id: str
    prompt: str | None
    prompt_ids: Sequence[int]
    parts: Sequence[Collector]

    @property
    def finished(self) -> bool:
        """Whether nothing will be added to any of them."""
        return all(part.finished for part in self.parts)

    @property
    def error(self) -> LlmcError | None:
        """Why the request failed, where it did."""
        return next((part.error for part in self.parts if part.error is not None), None)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(part.token_ids) for part in self.parts)

    def output(self) -> RequestOutput:
        """Everything so far."""
        outputs = [part.output() for part in self.parts]
        first, ids = self.parts[0], list(self.prompt_ids)
        cached, scores = first.num_cached, first.prompt_logprobs
        return RequestOutput(self.request_id, self.prompt, ids, outputs, self.finished, cached, scores, first.times)
