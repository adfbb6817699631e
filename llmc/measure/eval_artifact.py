"""`llmc eval`: perplexity of an artifact on a text; top-1 agreement and KL divergence against another artifact.

Logits are compared over the whole vocabulary. Both models score the same tokens in lockstep, so that memory does not
grow with the text: it is that of the two models, with KV pages for one window.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llmc_runtime.api.llm import resolve
from llmc_runtime.api.model_api import open_tokenizer
from llmc_runtime.exec.executor import Executor
from llmc_runtime.exec.load_executor import load_executor
from llmc_runtime.exec.score_tokens import Scores, max_scored, score_tokens
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import Manifest

from llmc import __version__
from llmc.artifact.amend import put_file
from llmc.artifact.integrity import open_undamaged
from llmc.artifact.publish import EVALUATION
from llmc.console import Console
from llmc.measure.eval_statistics import Distribution, Mean, kl_divergence
from llmc.measure.eval_text import Encode, Survey, changed, read_pieces, survey, too_short, windows
from llmc.report.accuracy import accuracy_rows, scored_text

CONTEXT = 512  # tokens in a window, by default


@dataclass(frozen=True)
class Settings:
    """The options of an evaluation.

    against: artifact, Hugging Face folder or hub id of the reference; "" for none. A model that is not compiled is
             compiled for the artifact's target into `cache`
    context: tokens in a window (None: 512, or the artifact's max_model_len if that is smaller)
    limit:   maximum number of tokens in all windows (None: the whole text)
    record:  write the result into the artifact
    """

    cache: Path
    against: str = ""
    context: int | None = None
    limit: int | None = None
    record: bool = False


@dataclass(frozen=True)
class _Model:
    """An artifact, with the ids that its tokenizer puts before a text."""

    path: Path
    manifest: Manifest
    encode: Encode
    prefix: tuple[int, ...]

    @property
    def first(self) -> int:
        """The index of the first token of a window that is scored: special tokens are not."""
        return max(1, len(self.prefix))

    def load(self, context: int) -> Executor:
        """Load the model with KV pages for one window."""
        kv = self.manifest.kv
        return load_executor(self.path, kv_bytes=-(-context // kv.page_size) * kv.bytes_per_page)


@dataclass(frozen=True)
class _Work:
    """The windows to score: their number, their length, and the first token of each that is scored."""

    path: Path
    text: Survey
    context: int
    windows: int
    first: int

    @property
    def tokens(self) -> int:
        """The number of tokens that are scored."""
        return self.windows * (self.context - self.first)


class _Measures:
    """Sums over the scored tokens of one model."""

    def __init__(self) -> None:
        self.losses = Mean()

    def add(self, scores: Scores) -> None:
        if not np.isfinite(scores.logprobs).all():
            cause = "the model computes log-probabilities that are not finite"
            raise LlmcError("E125", cause, "check the checkpoint's weights, and the target's kernels")
        self.losses.add(-scores.logprobs)

    def result(self, text: Survey) -> dict[str, float]:
        loss = self.losses.mean
        perplexity = math.exp(min(loss, 700.0))
        bits = loss / math.log(2) * text.tokens / text.text_bytes
        stderr = perplexity * self.losses.stderr
        return {"perplexity": perplexity, "perplexity_stderr": stderr, "nll": loss, "bits_per_byte": bits}


class _Differences:
    """Sums over the tokens that two models scored."""

    def __init__(self) -> None:
        self.agreed, self.kl = Mean(), Distribution()

    def add(self, ours: Scores, theirs: Scores) -> None:
        assert ours.logits is not None and theirs.logits is not None
        self.agreed.add((ours.top_ids == theirs.top_ids).astype(np.float64))
        kl = kl_divergence(theirs.logits, ours.logits)
        if not np.isfinite(kl).all():
            cause = "the KL divergence is not finite: a model computes logits that are not"
            raise LlmcError("E125", cause, "check the checkpoints' weights, and the targets' kernels")
        self.kl.add(kl)

    def result(self) -> dict[str, float]:
        kl = self.kl
        return {
            "top1_agreement_percent": 100 * self.agreed.mean, "kl_mean": kl.mean, "kl_stderr": kl.stderr,
            "kl_p99": kl.percentile(99), "kl_max": kl.maximum,
        }  # fmt: skip


def eval_artifact(path: Path, text: Path, settings: Settings, console: Console) -> dict[str, Any]:
    """Score a text with the artifact at `path`, and compare it with a reference if there is one.

    Raises LlmcError E130 if the text cannot be used, E131 if the two models have different tokens, E201 if a window is
    too long or too short, E125 if results are not finite, and the errors of opening an artifact.
    """
    begin = time.monotonic()
    ours = _open(path)
    if settings.record and not os.access(path, os.W_OK):
        raise LlmcError("E123", f"{path} cannot be written", "copy the artifact, or leave out --record")
    theirs = _open_reference(ours, settings, console) if settings.against else None
    work = _plan(ours, theirs, text, settings)
    measures, device = _score(ours, theirs, work, console)
    result = {
        "text": {"name": text.name, "sha256": work.text.sha256, "bytes": work.text.file_bytes},
        "context": work.context, "windows": work.windows, "tokens": work.tokens, **measures,
        "device": device, "compiler": f"llmc {__version__}",
    }  # fmt: skip
    if settings.record:
        put_file(path, EVALUATION, json.dumps(result, indent=1, allow_nan=False).encode() + b"\n")
    seconds = time.monotonic() - begin
    console.stage("eval", scored_text(result), seconds)
    return {"artifact": str(path), **result, "recorded": settings.record, "seconds": round(seconds, 3)}


def _open(path: Path) -> _Model:
    """Check the small files of an artifact, and open its tokenizer."""
    manifest = open_undamaged(Folder(path))
    tokenizer, _ = open_tokenizer(path / "tokenizer", manifest)
    if tokenizer is None:
        raise LlmcError("E620", f"{path} has no tokenizer.json", "add one to the model's folder, and compile again")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    plain, whole = encode("a"), tokenizer.encode("a")
    before = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return _Model(path, manifest, encode, tuple(whole[:before]))


def _open_reference(ours: _Model, settings: Settings, console: Console) -> _Model:
    options = {"target": ours.manifest.target.name}
    theirs = _open(resolve(settings.against, options, settings.cache, console.note))
    sizes = ours.manifest.vocab_size, theirs.manifest.vocab_size
    if sizes[0] != sizes[1]:
        raise _incomparable(settings.against, f"has {sizes[1]} tokens in its vocabulary, {ours.path} has {sizes[0]}")
    return theirs


def _checked(ours: _Model, theirs: _Model | None) -> Encode:
    """Return the artifact's tokenization; it raises LlmcError E131 if the reference's is another one."""
    if theirs is None:
        return ours.encode
    if ours.prefix != theirs.prefix:
        raise _incomparable(str(theirs.path), "begins texts with other special tokens")

    def encode(text: str) -> list[int]:
        ids = ours.encode(text)
        if ids != theirs.encode(text):
            raise _incomparable(str(theirs.path), "has another tokenizer: it splits the text into other tokens")
        return ids

    return encode


def _incomparable(name: str, why: str) -> LlmcError:
    return LlmcError("E131", f"{name} {why}", "compare with the model from which the artifact was made")


def _context(ours: _Model, theirs: _Model | None, settings: Settings) -> int:
    """Return the length of a window; raise LlmcError E201 if it is out of range."""
    limits = [(m.manifest.limits.max_model_len, m.path) for m in (ours, theirs) if m is not None]
    longest, path = min(limits, key=lambda pair: pair[0])
    context = settings.context or min(CONTEXT, longest)
    shortest = ours.first + 1
    if not shortest <= context <= longest:
        cause = f"--context {context} is not between {shortest} and {longest}, the max_model_len of {path}"
        raise LlmcError("E201", cause, "use a context in this range, or compile with a larger --max-model-len")
    if settings.limit is not None and settings.limit < context:
        cause = f"--limit {settings.limit} is less than one window of {context} tokens"
        raise LlmcError("E201", cause, "use a larger --limit, or a smaller --context")
    return context


def _plan(ours: _Model, theirs: _Model | None, text: Path, settings: Settings) -> _Work:
    """Check the text and the settings, and count the windows."""
    context, limit = _context(ours, theirs, settings), settings.limit
    surveyed = survey(text, _checked(ours, theirs), limit)
    size = context - len(ours.prefix)
    if surveyed.tokens < size:
        raise too_short(text, surveyed.tokens, size)
    count = surveyed.tokens // size if limit is None else min(surveyed.tokens // size, limit // context)
    return _Work(text, surveyed, context, count, ours.first)


@contextmanager
def _loaded(models: Sequence[_Model], context: int, console: Console) -> Iterator[list[Executor]]:
    """Yield an executor for each model, and close them at the end."""
    with ExitStack() as stack:
        executors: list[Executor] = []
        for model in models:
            console.begin("load", str(model.path))
            executors.append(model.load(context))
            stack.callback(executors[-1].close)
        yield executors


def _score(
    ours: _Model, theirs: _Model | None, work: _Work, console: Console
) -> tuple[dict[str, Any], Mapping[str, object]]:
    """Score all windows. Returns the measures and a description of the artifact's device."""
    measured, reference, differences = _Measures(), _Measures(), _Differences()
    with _loaded([ours] if theirs is None else [ours, theirs], work.context, console) as executors:
        per_step = min(map(max_scored, executors))
        for tokens in windows(read_pieces(work.path), ours.encode, ours.prefix, work.context, work.windows):
            steps = [score_tokens(e, tokens, per_step, work.first, theirs is not None) for e in executors]
            for scores in zip(*steps, strict=True):  # the same tokens' scores by each model
                measured.add(scores[0])
                if theirs is not None:
                    reference.add(scores[1])
                    differences.add(*scores)
                console.part("tokens scored", measured.losses.count, work.tokens)
        device = dict(executors[0].device.describe())
    if measured.losses.count != work.tokens:
        raise changed(work.path)
    measures = measured.result(work.text)
    if theirs is None:
        return {**measures, "against": None}, device
    against = _against(theirs.manifest, measures, reference.result(work.text), differences)
    return {**measures, "against": against}, device


def _against(
    m: Manifest, ours: Mapping[str, Any], theirs: Mapping[str, float], differences: _Differences
) -> dict[str, Any]:
    """Return the comparison, with the identity of the reference."""
    change = 100 * (ours["perplexity"] / theirs["perplexity"] - 1)
    identity = {"name": m.source.name, "revision": m.source.revision, "target": m.target.name, "digest": m.digest}
    return {**identity, **theirs, "perplexity_change_percent": change, **differences.result()}


def render(result: Mapping[str, Any]) -> str:
    """Format the data of `eval_artifact` as text."""
    lines = [f"{result['artifact']}: {scored_text(result)} ({result['seconds']:.2f} s)"]
    lines += [f"  {name:<16} {value}" for name, value in accuracy_rows(result)]
    return "\n".join(lines + (["  recorded in the artifact"] if result["recorded"] else []))
