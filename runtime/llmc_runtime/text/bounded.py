"""Tokenizes texts with a bound on the tokens: a text that is far too long costs about as much as one that fits."""

from __future__ import annotations

import json

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.text.tokenizer import Tokenizer

_FIRST = 8  # characters of the first prefix, for each token that is allowed
_SLACK, _SPARE = 1.05, 1024  # a prefix may end within a token, and be split otherwise there


class TooLong(LlmcError):
    """A text has more than `most` tokens."""

    def __init__(self, most: int) -> None:
        super().__init__("E602", f"the prompt is more than {most} tokens", f"shorten the prompt to {most - 1} tokens")
        self.most = most


def encode_bounded(
    tokenizer: Tokenizer, text: str, most: int, *, add_special_tokens: bool = True, longest: int | None = None
) -> list[int]:
    """The ids of `text`, as `Tokenizer.encode` gives them. Raises TooLong instead where a growing prefix of the text
    has clearly more than `most` tokens; a text that is not much longer than `most` is not refused here.

    `longest` is the length in bytes of the longest token (see `longest_token`): it refuses without tokenizing.
    """
    if longest is not None and len(text) > most * longest:  # a character has at least a byte
        raise TooLong(most)
    size = most * _FIRST
    while 2 * size < len(text):
        if len(tokenizer.encode(text[:size], add_special_tokens=add_special_tokens)) > most * _SLACK + _SPARE:
            raise TooLong(most)
        size *= 2
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def longest_token(tokenizer: Tokenizer) -> int | None:
    """The most bytes of text that one token stands for. None where there is no such bound: normalizers may shorten a
    text, added tokens may swallow the white space around them, unknown characters may be fused."""
    backend = tokenizer.backend
    steps = json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer is not None else {}
    byte_level = any(step.get("type") == "ByteLevel" for step in [steps, *steps.get("pretokenizers", ())])
    if not byte_level or backend.normalizer is not None:
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    return max((len(token.encode()) for token in backend.get_vocab(with_added_tokens=True)), default=None)
