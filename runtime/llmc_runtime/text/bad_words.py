"""Converts bad words to token ids, at the start of a text and after a space, as vLLM does."""

from __future__ import annotations

from collections.abc import Iterable

from llmc_runtime.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Return the token sequences of bad words; the last id of a sequence must not be generated after the ids before it.

    Each word yields its ids, and its ids after a space if they are equally many and differ in the first one.
    """
    out: list[list[int]] = []
    texts = [lead + word.lstrip() for word in words for lead in ("", " ")]
    encoded = tokenizer.encode_all(texts, add_special_tokens=False)  # one call: each of many would take the GIL
    for bare, spaced in zip(encoded, encoded):
        out.append(bare)
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            out.append(spaced)
    return out
