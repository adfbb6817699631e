"""Builds the RequestDelta of a token, and checks the executor's output for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmc_runtime.sched.request import Request, RequestDelta
from llmc_runtime.sched.step import TokenLogprobs, Work


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
