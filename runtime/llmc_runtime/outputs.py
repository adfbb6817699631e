"""The outputs of requests, with vLLM's names and fields, and their assembly from the engine's deltas."""

from __future__ import annotations

import sys
import time
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
    """One generated output of a request.

    token_ids:      includes the token that ended the output
    text:           without stop strings and stop tokens, unless include_stop_str_in_output is set
    logprobs:       for each token a dict from token ids to Logprob, the sampled id first. With output_kind "delta" a
                    sequence that makes each dict when it is read, otherwise a list
    finish_reason:  "stop", "length", "abort", or None while the output is not complete
    stop_reason:    the stop string or stop token id; None for the model's end-of-sequence token
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[Row | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request and its outputs.

    finished:           whether all outputs are complete
    num_cached_tokens:  prompt tokens found in the prefix cache
    prompt_logprobs:    for each prompt token a dict from token ids to Logprob, its own id first; None for the first
                        token. With output_kind "delta" a sequence that makes each dict when it is read
    times:              seconds in the queue, and from there to the first token; None before the first token
    num_accepted_tokens:  generated tokens that were drafted (speculative decoding)
    pooled:             of a model that pools, which has no tokens in its outputs: f32 numbers
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[Row | None] | None = None
    times: tuple[float, float] | None = field(default=None, compare=False)
    num_accepted_tokens: int = field(default=0, compare=False)
    pooled: bytes | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Piece:
    """The new part of one output of a stream. The texts of all pieces with the same `index`, joined, are its text."""

    text: str
    token_ids: list[int]
    logprobs: list[Row | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    index: int = 0


@dataclass
class OutputAssembler:
    """Assembles one output of a request from the engine's deltas. Special tokens in `visible` are part of its text
    even if skip_special_tokens is set."""

    index: int
    prompt_ids: Sequence[int]
    params: SamplingParams
    tokenizer: Tokenizer | None
    visible: frozenset[int] = frozenset()
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: LlmcError | None = None
    pooled: bytes | None = None  # the result of a model that pools: f32 numbers
    num_cached: int = 0
    num_accepted: int = 0  # tokens that were drafted
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
        self._num_returned = 0  # tokens that `new_output` has returned
        self._total = 0.0  # log-probability of all tokens
        self._rows = PackedLogprobs(params.logprobs or 0)
        self._scores: PackedLogprobs | None = None  # log-probabilities of the prompt from its second token
        self._listed: list[Row | None] | None = None

    @property
    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.finish_reason is not None

    @property
    def has_new_tokens(self) -> bool:
        """Whether there are tokens that `new_output` has not returned yet."""
        return len(self.token_ids) > self._num_returned

    @property
    def num_scored(self) -> int:
        """Prompt tokens whose log-probabilities are known and not converted to a list yet."""
        return 0 if self._scores is None or self._listed is not None else len(self._scores)

    @property
    def scores(self) -> LogprobRows | None:
        """The log-probabilities of the prompt, each row made when it is read."""
        if self._scores is None:
            return None
        if len(self._scores) != len(self.prompt_ids) - 1:
            raise ValueError("the log-probabilities are not those of the prompt")
        return LogprobRows(self.prompt_ids, self._scores, self._decoded, 0, len(self.prompt_ids), 1)

    @property
    def prompt_logprobs(self) -> list[Row | None] | None:
        """The same as a list, made on first use. A long prompt has a million objects: make it in a thread."""
        scores = self.scores
        if self._listed is None and scores is not None:
            self._listed = list(scores)
        return self._listed

    def add(self, delta: RequestDelta) -> bool:
        """Add a delta. Return True if a stop string ended the output, which must then be aborted in the engine."""
        if self.finish_reason is not None:
            return False
        self.num_cached = delta.num_cached
        if delta.times is not None:
            self.times = delta.times
        elif len(delta.new_token_ids) == 1 and delta.logprobs is None and delta.finish_reason is None:
            token = delta.new_token_ids[0]  # the usual case, without the tests of the others
            self.token_ids.append(token)
            if (stop := self._text.push(token)) is None:
                return False
            self._end("stop", stop)
            return True
        if delta.prompt_logprobs is not None:
            self._scores = PackedLogprobs(self.params.prompt_logprobs or 0)
            self._scores.extend(delta.prompt_logprobs)
        return self._add_tokens(delta)

    def _add_tokens(self, delta: RequestDelta) -> bool:
        """Add the tokens of a delta, then its end if it has one; the result is that of `add`."""
        rows, last = delta.logprobs, len(delta.new_token_ids) - 1
        self.num_accepted += max(0, last)  # a step yields the drafts that it accepts, and one token
        for i, token in enumerate(delta.new_token_ids):
            self.token_ids.append(token)
            if rows:
                self._rows.append(rows[i])
                self._total += rows[i].logprob
            hidden = i == last and delta.stopped and not self.params.include_stop_str_in_output
            if not hidden and (stop := self._text.push(token)) is not None:
                self._end("stop", stop)
                return not (i == last and delta.finish_reason)
        if delta.finish_reason is not None:
            self.error, self.pooled = delta.error, delta.pooled
            self._end(delta.finish_reason, delta.stop_reason)
        return False

    def abort(self) -> None:
        """End the output with finish reason "abort", unless it has finished."""
        if not self.finished:
            self._end("abort", None)

    def piece(self) -> Piece:
        """Return what is new since the last call of `piece` or `new_output`."""
        new = self.new_output()
        rows = None if new.logprobs is None else list(new.logprobs)
        return Piece(new.text, new.token_ids, rows, new.finish_reason, new.stop_reason, new.index)

    def new_output(self, max_tokens: int = sys.maxsize) -> CompletionOutput:
        """Return up to `max_tokens` tokens that are new since the last call of `piece` or `new_output`, and their text.

        The finish reason comes with the last tokens.
        """
        start, end = self._num_returned, min(len(self.token_ids), self._num_returned + max_tokens)
        self._num_returned, later = end, len(self.token_ids) - end
        tokens, total, logprobs = self.token_ids[start:end], None, None
        if self.params.logprobs is not None:
            logprobs = LogprobRows(self.token_ids, self._rows, self._decoded, start, end)
            total = sum(self._rows.own(i)[0] for i in range(start, end))
        after_later = later + self.finished if later else 0  # the end of the output is a piece of text, too
        text = self._text.new_text(final=self.finished and not later, later=after_later)
        reason, stop = (None, None) if later else (self.finish_reason, self.stop_reason)
        return CompletionOutput(self.index, text, tokens, total, logprobs, reason, stop)

    def output(self) -> CompletionOutput:
        """Return everything so far."""
        with_logprobs, count = self.params.logprobs is not None, len(self.token_ids)
        return CompletionOutput(
            self.index,
            self._text.text,
            list(self.token_ids),
            self._total if with_logprobs else None,
            list(LogprobRows(self.token_ids, self._rows, self._decoded, 0, count)) if with_logprobs else None,
            self.finish_reason,
            self.stop_reason,
        )

    def _end(self, reason: str, stop: int | str | None) -> None:
        late_stop = self._text.finish()  # a stop string may be found in characters that were held back
        if late_stop is not None and reason != "stop":
            reason, stop = "stop", late_stop
        self.finish_reason, self.stop_reason = reason, stop

    def _decoded(self, token: int) -> str | None:
        if self.tokenizer is None or not self.params.detokenize:
            return None
        return self.tokenizer.token_text(token)


class RequestState:
    """An open request and its n outputs, `parts`, by index. OutputProcessor adds the engine's deltas to them.

    `ids` are the engine's ids of the outputs; `error` is set if the request fails; `began` is a time.monotonic().
    """

    ids: tuple[str, ...] = ()
    error: LlmcError | None = None

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        self.request_id, self.prompt, self.prompt_ids = request_id, prompt, prompt_ids
        self.parts = [OutputAssembler(i, prompt_ids, params, tokenizer, visible) for i in range(params.n)]
        self.began = time.monotonic()

    def notify(self) -> None:
        """Called after an output or the error has changed. For subclasses."""

    @property
    def finished(self) -> bool:
        """Whether all outputs are complete."""
        for part in self.parts:  # read for every token: a generator takes three times as long
            if part.finish_reason is None:
                return False
        return True

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(part.token_ids) for part in self.parts)

    @property
    def num_accepted(self) -> int:
        """Tokens generated so far that were drafted."""
        accepted = 0
        for part in self.parts:
            accepted += part.num_accepted
        return accepted

    def output(self) -> RequestOutput:
        """Return everything so far."""
        outputs = [part.output() for part in self.parts]
        first, ids = self.parts[0], list(self.prompt_ids)
        cached, scores = first.num_cached, first.prompt_logprobs
        return RequestOutput(
            self.request_id, self.prompt, ids, outputs, self.finished, cached, scores, first.times, self.num_accepted,
            first.pooled,
        )  # fmt: skip
