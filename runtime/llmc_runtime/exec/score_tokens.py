"""Scores the tokens of a sequence: the log-probability of each, given the preceding tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llmc_runtime.exec.executor import Executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.pooling import require_generation
from llmc_runtime.sched.step import RowInit, RowParams, Step, Work

_PARAMS = RowParams(want_logprobs=True)


@dataclass(frozen=True)
class Scores:
    """Of consecutive tokens of a sequence: their log-probabilities f64[n], the most likely ids i64[n], and the logits
    f32[n, vocabulary], None unless requested.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    logits: np.ndarray | None


def max_scored(executor: Executor) -> int:
    """Return the maximum number of tokens that one step can score."""
    limits = executor.artifact.manifest.limits
    return min(limits.max_num_seqs, limits.max_num_batched_tokens)


def score_tokens(
    executor: Executor, tokens: Sequence[int], per_step: int, first: int = 1, logits: bool = False
) -> Iterator[Scores]:
    """Score the tokens from index `first` (at least 1) on, `per_step` in each step.

    The executor must not run anything else meanwhile.

    Raises LlmcError E202 if the KV cache is too small for the sequence, E113 if logits are requested and the program
    does not keep them, and E616 if the model pools.
    """
    require_generation(executor.artifact.manifest.pooling, "tokens are scored")
    capacity = executor.capacity
    pages = capacity.pages_for(len(tokens))
    if pages > capacity.pages:
        cause = f"{len(tokens)} tokens need {pages} KV pages; the cache has {capacity.pages}"
        raise LlmcError("E202", cause, "use a smaller context")
    inits = [RowInit(0, list(tokens), 0, len(tokens), _PARAMS, list(range(pages)))]
    if first > 1:
        executor.run(Step(inits=inits, work=[Work(0, first - 1, emit=False)]))
        inits = []
    for begin in range(first - 1, len(tokens) - 1, per_step):
        count = min(per_step, len(tokens) - 1 - begin)
        rows = executor.run(Step(inits=inits, work=[Work(0, count, emit=False, score=True)])).scores[0]
        inits = []
        logprobs = np.array([row.logprob for row in rows], np.float64)
        top_ids = np.array([row.top_ids[0] for row in rows], np.int64)
        yield Scores(logprobs, top_ids, executor.logits() if logits else None)
