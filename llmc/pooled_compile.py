"""Compiling a model that pools: checks of options, and notes about the model's results."""

from __future__ import annotations

from collections.abc import Iterator

from llmc_runtime.format.pooling import CLASSIFY, EMBED, Pooling

from llmc.diagnostics import Diagnostic
from llmc.frontend.model_folder import Source
from llmc.frontend.pooling_files import embedding_notes
from llmc.options import Options


def check_pooled(o: Options, pooling: Pooling, max_positions: int, tokens: int) -> int:
    """Return the maximum number of tokens in a step: prompts that run whole must fit into one.

    Raises Diagnostic E313 for options of models that generate.
    """
    for name, value in (("--draft", o.draft), ("--speculate", o.speculate)):  # --draft sets the number of drafts, too
        if value:
            raise Diagnostic("E313", f"{name}: the model pools its prompts and generates nothing", f"leave {name} out")
    return max(tokens, max_positions) if pooling.whole else tokens


def pooling_notes(pooling: Pooling, source: Source) -> Iterator[str]:
    """Yield notes about the results of the artifact, and about what sentence-transformers does otherwise."""
    yield _describe(pooling)
    if pooling.task == EMBED:
        yield from embedding_notes(source)


def _describe(pooling: Pooling) -> str:
    what = f"{pooling.width} logits" if pooling.task == CLASSIFY else f"an embedding of {pooling.width} numbers"
    of = {"last": "the last token", "cls": "the first token", "mean": "the mean of all tokens"}[pooling.kind]
    done = ", normalised" if pooling.normalize else ""
    steps = "; a prompt runs in one step, without the prefix cache" if pooling.whole else ""
    return f"the model returns {what} of {of}{done}{steps}"
