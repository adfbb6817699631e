"""Tokenization with a limit of tokens: rejecting a far too long text costs about as much as encoding a fitting one."""

from __future__ import annotations

import json

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.text.tokenizer import Tokenizer

FIRST_CHARACTERS = 8  # characters of the first prefix, per allowed token
_SLACK, _SPARE = 1.05, 1024  # a prefix may end inside a token and be split differently there


class TooLong(LlmcError):
    """A text has more than `limit` tokens."""

    def __init__(self, limit: int) -> None:
        super().__init__("E602", f"the prompt is more than {limit} tokens", f"shorten the prompt to {limit} tokens")
        self.limit = limit


def encode_bounded(
    tokenizer: Tokenizer, text: str, limit: int, *, add_special_tokens: bool = True, longest: int | None = None
) -> list[int]:
    """Tokenize `text` as `Tokenizer.encode` does, unless it is clearly too long.

    Raises TooLong if a growing prefix of the text has clearly more than `limit` tokens. A text that exceeds `limit`
    only slightly is not rejected here. `longest` is the length in bytes of the longest token (see `longest_token`);
    with it, some texts are rejected without tokenization.
    """
    if longest is not None and len(text) > limit * longest:  # a character has at least one byte
        raise TooLong(limit)
    size = limit * FIRST_CHARACTERS
    while 2 * size < len(text):
        if len(tokenizer.encode(text[:size], add_special_tokens=add_special_tokens)) > limit * _SLACK + _SPARE:
            raise TooLong(limit)
        size *= 2
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the largest number of bytes of text that one token represents.

    Returns None if there is no such limit: normalizers may shorten a text, added tokens may consume the white space
    around them, and unknown characters may be merged.
    """
    backend = tokenizer.backend
    steps = json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer is not None else {}
    byte_level = any(step.get("type") == "ByteLevel" for step in [steps, *steps.get("pretokenizers", ())])
    if not byte_level or backend.normalizer is not None:
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    return max((len(token.encode()) for token in backend.get_vocab(with_added_tokens=True)), default=None)
