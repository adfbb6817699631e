"""Pairs of texts to score: which belong together, and the prompts that a model reads for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import CLASSIFY, EMBED
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.pooling_params import require_pooling
from llmc_runtime.prompts import Prompt, require_tokenizer
from llmc_runtime.text.tokenizer import Tokenizer


def require_scores(pooling: Pooling | None) -> Pooling:
    """Return the pooling of a model that scores pairs. Raises LlmcError E616 for others.

    These are embedding models, by the cosine similarity of two embeddings, and classifiers with one label.
    """
    model_pooling = require_pooling(pooling, EMBED, CLASSIFY)
    if model_pooling.task == CLASSIFY and model_pooling.width != 1:
        cause = f"the model has {model_pooling.width} labels; a score needs a classifier with one"
        raise LlmcError("E616", cause, "use classify, or /classify")
    return model_pooling


def paired(first: Any, second: Any) -> list[tuple[str, str]]:
    """Return the pairs of a text and a text or several, or of as many first as second texts. Raises LlmcError E625."""
    left, right = ([x] if isinstance(x, str) else x for x in (first, second))
    for name, texts in (("text_1", left), ("text_2", right)):
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts) or not texts:
            cause = f"{name} is neither a text nor a list of one or more texts"
            raise LlmcError("E625", cause, "pass one text, or a list of them")
    if len(left) == 1:
        left = [*left] * len(right)
    if len(left) != len(right):
        cause = f"text_1 has {len(left)} texts, text_2 {len(right)}"
        raise LlmcError("E625", cause, "pass one first text, or as many as second ones")
    return list(zip(left, right))


def pair_prompts(
    tokenizer: Tokenizer | None, pairs: Sequence[tuple[str, str]], pooling: Pooling, vocab_size: int
) -> list[Prompt]:
    """Return the prompts of a cross-encoder for pairs of texts. `vocab_size` is that of all segments together.

    Raises LlmcError E620 and E621.
    """
    tokenizer = require_tokenizer(tokenizer, ", and pairs are texts")
    segment = vocab_size // pooling.segments if pooling.segments > 1 else 0
    return [Prompt(ids) for ids in tokenizer.encode_pairs(pairs, segment)]
