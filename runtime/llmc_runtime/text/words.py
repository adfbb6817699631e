"""Bad words as token ids, at the beginning of a text and behind a space, as vLLM does; it bans nothing itself."""

from __future__ import annotations

from collections.abc import Iterable

from llmc_runtime.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """The sequences whose last ids are not to be generated behind the others: of each word its ids, and its ids behind
    a space where they are as many and begin with another one."""
    out: list[list[int]] = []
    for word in words:
        bare, spaced = (tokenizer.encode(lead + word.lstrip(), add_special_tokens=False) for lead in ("", " "))
        out.append(bare)
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            out.append(spaced)
    return out
