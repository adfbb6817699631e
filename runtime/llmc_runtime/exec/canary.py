"""The canary: recorded prompts and continuations that detect a machine on which the model computes wrong results.

The first prompt runs by itself and the others run together, which covers the programs for prompts, one row and several
rows. Each token is predicted from the recorded tokens before it, so that one difference does not hide the next.
A different token passes if the recorded choice was nearly tied with the next most likely one. Log-probabilities pass if
they are within `tolerance`, in nats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from llmc_runtime.exec.capacity import KvCapacity
from llmc_runtime.exec.executor import Executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import CANARY
from llmc_runtime.format.json_fields import Fields, an_integer, anything, damaged, load_json
from llmc_runtime.format.pooling import require_generation
from llmc_runtime.format.record import Record, stored
from llmc_runtime.sched.step import RowInit, RowParams, Step, TokenLogprobs, Work

LENGTHS = (16, 150, 1)  # maximum tokens per prompt
STEPS = 16  # tokens generated after each prompt
TOP = 5  # most likely ids recorded per token
TOLERANCE = 0.05  # nats; bf16 sums in another order differ by less

_PARAMS = RowParams(want_logprobs=True)

Prediction = tuple[int, TokenLogprobs]  # a greedy token and its log-probabilities


def _list(value: Any, where: str, item: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > 64:
        raise damaged(where, "must be a short list")
    return tuple(item(v, where) for v in value)


def _number(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise damaged(where, "must be a number")
    return float(value)


@dataclass(frozen=True)
class Run(Record):
    """A prompt, the tokens generated after it with their log-probabilities, and the most likely ids at each position
    with their log-probabilities.
    """

    prompt: tuple[int, ...] = stored(Fields.list, item=an_integer, cap=4096)
    tokens: tuple[int, ...] = stored(Fields.list, item=an_integer, cap=4096)
    logprobs: tuple[float, ...] = stored(Fields.list, item=_number, cap=4096)
    top_ids: tuple[tuple[int, ...], ...] = stored(Fields.list, item=partial(_list, item=an_integer), cap=4096)
    top_logprobs: tuple[tuple[float, ...], ...] = stored(Fields.list, item=partial(_list, item=_number), cap=4096)

    def margin(self, i: int) -> float:
        """Return the difference between the two largest log-probabilities at position `i`, in nats."""
        tops = self.top_logprobs[i]
        return tops[0] - tops[1] if len(tops) > 1 else math.inf

    def validate(self, where: str) -> None:
        """See Record: the lists have an entry for each token."""
        lengths = {len(self.tokens), len(self.logprobs), len(self.top_ids), len(self.top_logprobs)}
        if not self.prompt or len(lengths) > 1 or [*map(len, self.top_ids)] != [*map(len, self.top_logprobs)]:
            raise damaged(where, "its lists differ in length")


@dataclass(frozen=True)
class Canary(Record):
    """The recorded runs, the tolerance of log-probabilities in nats, and a description of the recording device."""

    json_order = ("tolerance", "device", "runs")

    runs: tuple[Run, ...] = stored(Fields.list, item=Run, cap=16)
    tolerance: float = stored(Fields.item, item=_number)
    device: Mapping[str, Any] = stored(Fields.table, item=anything)

    def dump(self) -> bytes:
        """Serialize to JSON."""
        return json.dumps(self.json(), indent=1, allow_nan=False).encode() + b"\n"

    @staticmethod
    def load(data: bytes, where: str = CANARY) -> Canary:
        """Parse a canary file; raise LlmcError E103 if it is malformed."""
        return Canary.read(load_json(data, where), where)

    def validate(self, where: str) -> None:
        """See Record."""
        if not self.runs or len({len(r.tokens) for r in self.runs}) > 1 or not 0 < self.tolerance <= 1:
            raise damaged(where, "it has no runs, runs of different lengths, or a tolerance outside (0, 1]")


@dataclass(frozen=True)
class Verdict:
    """The result of a check. `problems` describes the failures, `ties` counts differing tokens that a near tie excuses,
    and `worst` is the largest difference of a log-probability, in nats.
    """

    checked: int
    ties: int
    worst: float
    problems: tuple[str, ...]


def prompts_of(executor: Executor) -> tuple[tuple[int, ...], ...]:
    """Return prompts of ids spread over the vocabulary: they need no tokenizer and use many rows of the embedding."""
    vocab = executor.artifact.manifest.vocab_size
    longest = max(1, _max_row_tokens(executor) // 2)
    return tuple(tuple((i * 7919 + 11 + 5 * k) % vocab for i in range(min(n, longest))) for k, n in enumerate(LENGTHS))


def _max_row_tokens(executor: Executor) -> int:
    """Return the maximum length of each of the rows that run together, in tokens."""
    page = executor.capacity.page_size
    tokens = executor.capacity.pages // len(LENGTHS) * page or executor.capacity.tokens
    return min(executor.artifact.manifest.limits.max_model_len, tokens)


def record(executor: Executor) -> Canary:
    """Run the prompts greedily and record the results. The executor must not run anything else meanwhile.

    Raises LlmcError E125 if log-probabilities are not finite, E616 if the model pools.
    """
    require_generation(executor.artifact.manifest.pooling, "a canary records generated tokens")
    prompts = prompts_of(executor)
    steps = min(STEPS, _max_row_tokens(executor) - max(map(len, prompts)))
    runs: list[Run] = []
    for group in _groups(executor, prompts):
        past: list[list[int]] = [[] for _ in group]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in group]
        for _ in range(steps):
            for row, (token, row_logprobs) in enumerate(_next(executor, group, past, steps)):
                past[row].append(token)
                logprobs[row].append(row_logprobs)
        runs += [_run(p, t, lps) for p, t, lps in zip(group, past, logprobs, strict=True)]
    return Canary(tuple(runs), TOLERANCE, executor.device.describe())


def _run(prompt: tuple[int, ...], tokens: list[int], outputs: list[TokenLogprobs]) -> Run:
    """Return one prompt's outputs as a record. Raises LlmcError E125 for log-probabilities that are not finite."""
    if not all(math.isfinite(t.logprob) for t in outputs):
        cause = "the model computes log-probabilities that are not finite"
        raise LlmcError("E125", cause, "check the checkpoint's weights, and the target's kernels")
    tops = [_finite_tops(t)[:TOP] for t in outputs]
    top_ids = tuple(tuple(token for token, _ in top) for top in tops)
    top_logprobs = tuple(tuple(logprob for _, logprob in top) for top in tops)
    return Run(prompt, tuple(tokens), tuple(t.logprob for t in outputs), top_ids, top_logprobs)


def _finite_tops(logprobs: TokenLogprobs) -> list[tuple[int, float]]:
    """Return the (token, log-probability) of the most likely tokens whose log-probability is finite."""
    return [(int(token), float(logprob)) for token, logprob in _tops(logprobs) if math.isfinite(logprob)]


def _tops(logprobs: TokenLogprobs) -> Iterator[tuple[int, float]]:
    return zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)


def _groups(executor: Executor, prompts: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the groups of prompts that run together: the first one by itself, the others as rows of the same steps."""
    rows = min(len(prompts), executor.artifact.manifest.limits.max_num_seqs)
    return [prompts[:1], *(prompts[i : i + rows] for i in range(1, len(prompts), rows))]


def check(executor: Executor, canary: Canary) -> Verdict:
    """Compare the executor with a recording. The executor must not run anything else meanwhile.

    Raises LlmcError E202 if the KV cache is too small for the prompts.
    """
    problems: list[str] = []
    ties, worst = 0, 0.0
    first_number = 1  # number of the first prompt of the current group
    for group in _groups(executor, canary.runs):
        steps = len(group[0].tokens)
        for i in range(steps):
            outputs = _next(executor, [r.prompt for r in group], [r.tokens[:i] for r in group], steps)
            for number, (run, (token, logprobs)) in enumerate(zip(group, outputs, strict=True), first_number):
                difference = _compare(run, i, token, logprobs, canary.tolerance)
                ties += difference.tied
                worst = max(worst, difference.nats)
                if difference.problem:
                    problems.append(f"prompt {number}, token {i}: {difference.problem}")
        first_number += len(group)
    return Verdict(sum(len(r.tokens) for r in canary.runs), ties, worst, tuple(problems))


class _Difference(NamedTuple):
    """How a token differs from the recorded one.

    tied:     another token was chosen, which a near tie excuses
    nats:     the largest difference of a log-probability
    problem:  description of a difference that is not allowed, "" if there is none
    """

    tied: bool
    nats: float
    problem: str


def _compare(run: Run, i: int, token: int, logprobs: TokenLogprobs, tolerance: float) -> _Difference:
    """Compare a token and its log-probabilities with those recorded at position `i`."""
    recorded = run.tokens[i]
    if token != recorded:
        if run.margin(i) <= 2 * tolerance and recorded in list(logprobs.top_ids)[:2]:
            return _Difference(True, 0.0, "")
        problem = f"got {token}, recorded {recorded} (more likely by {run.margin(i):.3g} nats)"
        return _Difference(False, 0.0, problem)
    actual = {int(k): float(x) for k, x in _tops(logprobs)} | {token: logprobs.logprob}
    lowest = min(actual.values())
    worst, problem = 0.0, ""
    for k, expected in ((recorded, run.logprobs[i]), *zip(run.top_ids[i], run.top_logprobs[i], strict=True)):
        # An id that is not listed is at most as likely as the last listed one.
        difference = abs(actual[k] - expected) if k in actual else max(0.0, expected - lowest)
        difference = difference if math.isfinite(difference) else math.inf
        if difference > tolerance and not problem:
            shown = f"{actual[k]:.4g}" if k in actual else f"below {lowest:.4g}"
            problem = f"log-probability of {k} is {shown}, recorded {expected:.4g} (tolerance {tolerance:g})"
        worst = max(worst, difference)
    return _Difference(False, worst, problem)


def require(executor: Executor) -> None:
    """Check the artifact's canary before serving.

    Raises LlmcError E125 if the check fails, and E126 if the artifact has no canary.
    """
    artifact = executor.artifact
    if CANARY not in artifact.manifest.files:
        remedy = f"run llmc verify --record {artifact.root} on a trusted machine"
        raise LlmcError("E126", f"{artifact.root} has no canary", remedy)
    canary = Canary.load(artifact.read(CANARY))
    if error := failure(check(executor, canary), canary, executor):
        raise error


def failure(verdict: Verdict, canary: Canary, executor: Executor) -> LlmcError | None:
    """Return the error for a failed check, naming the first differences and both devices; None if it passed."""
    if not verdict.problems:
        return None
    more = len(verdict.problems) - 2
    details = "; ".join([*verdict.problems[:2], *([f"and {more} more"] if more > 0 else [])])
    devices = f"on {_device(executor.device.describe())}, recorded on {_device(canary.device)}"
    cause = f"the canary fails at {len(verdict.problems)} of {verdict.checked} tokens {devices}: {details}"
    return LlmcError("E125", cause, "do not serve from this machine; if the artifact may be damaged, compile it again")


def _device(facts: Mapping[str, Any]) -> str:
    return " ".join(str(facts[k]) for k in ("name", "model") if k in facts)[:120]


def _next(
    executor: Executor, prompts: Sequence[Sequence[int]], past: Sequence[Sequence[int]], steps: int
) -> list[Prediction]:
    """Return the token and its log-probabilities after each prompt and its past, in rows 0 and up.

    Pages are reserved for `steps` tokens after each prompt. If there is a past, the previous call must have left the KV
    of all tokens but the last one.
    """
    inits = _row_inits(executor.capacity, prompts, past, steps)
    remaining = [len(init.tokens) - init.computed for init in inits]
    limit = executor.artifact.manifest.limits.max_num_batched_tokens
    while sum(remaining) > limit:
        row = remaining.index(max(remaining))
        count = min(limit, remaining[row] - 1)
        executor.run(Step(inits=inits, work=[Work(row, count, emit=False)]))
        inits, remaining[row] = [], remaining[row] - count
    out = executor.run(Step(inits=inits, work=[Work(row, n, emit=True) for row, n in enumerate(remaining)]))
    return [_prediction(token, logprobs) for token, logprobs in zip(out.tokens, out.logprobs, strict=True)]


def _row_inits(
    capacity: KvCapacity, prompts: Sequence[Sequence[int]], past: Sequence[Sequence[int]], steps: int
) -> list[RowInit]:
    """Return the rows from 0 on, each with the pages after those of the row before. Raises LlmcError E202."""
    inits, first_page = [], 0
    for row, (prompt, after) in enumerate(zip(prompts, past, strict=True)):
        tokens = [*prompt, *after]
        pages = list(range(first_page, first_page + capacity.pages_for(len(tokens))))
        inits.append(RowInit(row, tokens, len(tokens) - 1 if after else 0, len(prompt), _PARAMS, pages))
        first_page += capacity.pages_for(len(prompt) + steps)
    if first_page > capacity.pages:
        cause = f"the canary's prompts need {first_page} KV pages; the cache has {capacity.pages}"
        raise LlmcError("E202", cause, "increase --kv-cache-memory-bytes, or skip the canary")
    return inits


def _prediction(token: int | None, logprobs: TokenLogprobs | None) -> Prediction:
    assert token is not None and logprobs is not None
    return token, logprobs
