"""The canary: a prompt and the tokens that followed it when it was recorded, to show a machine that computes wrongly.

Every expected token is offered to the model as its past, so one difference does not hide the next. A different token
passes where the recorded choice was nearly a tie; a log-probability passes within `TOLERANCE`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc_runtime.exec.executor import Executor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.fields import Fields, an_integer, damaged, load_json
from llmc_runtime.sched.step import RowInit, RowParams, Step, TokenLogprobs, Work

NAME = "canary.json"
LENGTH = 16
TOLERANCE = 0.05  # nats: bf16 sums in another order differ by less


@dataclass(frozen=True)
class Canary:
    """`logprobs` of the `tokens`, and by how much each was likelier than the second choice (`margins`), in nats."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]
    device: Mapping[str, Any]

    def dump(self) -> bytes:
        doc = {**vars(self), "device": dict(self.device)}
        return json.dumps(doc, indent=1, allow_nan=False).encode() + b"\n"

    @staticmethod
    def load(data: bytes, where: str = NAME) -> Canary:
        """The canary that a file spells; LlmcError E103 where it is none."""
        f = Fields(load_json(data, where), where)
        canary = Canary(
            f.list("prompt", an_integer, cap=4096),
            f.list("tokens", an_integer, cap=4096),
            f.list("logprobs", _number, cap=4096),
            f.list("margins", _number, cap=4096),
            f.table("device", lambda v, w: v),
        )
        f.close()
        if not canary.prompt or len({len(canary.tokens), len(canary.logprobs), len(canary.margins)}) > 1:
            raise damaged(where, "its lists differ in length")
        return canary


@dataclass(frozen=True)
class Verdict:
    """What a check found: `problems` in words, none where all is well; `ties` counts tokens that near ties excuse."""

    checked: int
    ties: int
    worst: float
    problems: tuple[str, ...]


def prompt_of(executor: Executor) -> tuple[int, ...]:
    """Ids spread over the vocabulary: they need no tokenizer and touch many rows of the embedding."""
    manifest = executor.artifact.manifest
    room = min(manifest.limits.max_model_len, executor.capacity.tokens)
    count = max(1, min(LENGTH, room // 2))
    return tuple((i * 7919 + 11) % manifest.vocab_size for i in range(count))


def record(executor: Executor) -> Canary:
    """Run the prompt greedily; nothing else may run on the executor meanwhile."""
    prompt = prompt_of(executor)
    room = min(executor.artifact.manifest.limits.max_model_len, executor.capacity.tokens)
    tokens: list[int] = []
    found: list[TokenLogprobs] = []
    for _ in range(min(LENGTH, room - len(prompt))):
        token, told = _next(executor, prompt, tokens)
        tokens.append(token)
        found.append(told)
    if not all(math.isfinite(t.logprob) for t in found):
        cause = "the model computes log-probabilities that are not finite"
        raise LlmcError("E125", cause, "check the checkpoint's weights, and the target's kernels")
    margins = tuple(_margin(t) for t in found)
    return Canary(prompt, tuple(tokens), tuple(t.logprob for t in found), margins, executor.device.describe())


def check(executor: Executor, canary: Canary) -> Verdict:
    """Compare the executor with the recording; nothing else may run on it meanwhile."""
    problems: list[str] = []
    ties, worst = 0, 0.0
    for i, want in enumerate(canary.tokens):
        token, told = _next(executor, canary.prompt, canary.tokens[:i])
        if token != want:
            if canary.margins[i] <= 2 * TOLERANCE and want in list(told.top_ids)[:2]:
                ties += 1
                continue
            problems.append(f"token {i} is {token}, recorded was {want} (by a margin of {canary.margins[i]:.3g} nats)")
            continue
        off = abs(told.logprob - canary.logprobs[i])
        worst = max(worst, off) if math.isfinite(off) else math.inf
        if not off <= TOLERANCE:
            problems.append(f"log-probability {i} is {told.logprob:.4g}, recorded was {canary.logprobs[i]:.4g}")
    return Verdict(len(canary.tokens), ties, worst, tuple(problems))


def require(executor: Executor) -> None:
    """Compare with the artifact's own recording, before it serves. LlmcError E125 where it fails, E126 without one."""
    artifact = executor.artifact
    if NAME not in artifact.manifest.files:
        remedy = f"llmc verify --record {artifact.root}, on a machine that you trust"
        raise LlmcError("E126", f"{artifact.root} has no canary", remedy)
    verdict = check(executor, Canary.load(artifact.read(NAME)))
    if verdict.problems:
        words = "; ".join(verdict.problems[:2])
        raise LlmcError("E125", f"the canary fails: {words}", "do not serve from this machine; recompile")


def _next(executor: Executor, prompt: tuple[int, ...], past: Any) -> tuple[int, TokenLogprobs]:
    """The token after prompt and past on row 0; the last call left the KV of all but the last token there."""
    tokens = [*prompt, *past]
    computed = len(tokens) - 1 if past else 0
    pages = list(range(-(-len(tokens) // executor.capacity.page_size)))
    init = RowInit(0, tokens, computed, len(prompt), RowParams(want_logprobs=True), pages)
    limit = executor.artifact.manifest.limits.max_num_batched_tokens
    inits = [init]
    while len(tokens) - computed > limit:
        executor.run(Step(inits, [], [Work(0, limit, False)]))
        inits, computed = [], computed + limit
    out = executor.run(Step(inits, [], [Work(0, len(tokens) - computed, True)]))
    (token,), (told,) = out.tokens, out.logprobs
    assert token is not None and told is not None
    return token, told


def _margin(told: TokenLogprobs) -> float:
    tops = list(told.top_logprobs)
    return min(tops[0] - tops[1], 1e30) if len(tops) > 1 else 1e30


def _number(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise damaged(where, "must be a number")
    return float(value)
