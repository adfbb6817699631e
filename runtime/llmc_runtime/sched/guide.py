"""What a request's next token may be: masks over the vocabulary, fixed or following its tokens. It knows no grammar.

A mask is 4 * ceil(vocabulary / 32) bytes, as the device reads it: id i is allowed where bit i % 8 of byte i // 8 is 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from llmc_runtime.format.errors import LlmcError


class Guide(Protocol):
    """Follows one request's tokens. Where its last is not known yet, the step that has it waits with sampling."""

    def mask(self) -> bytes:
        """What the next token may be; at least one id is allowed, the same object where nothing changed."""

    def accept(self, token: int) -> bool:
        """The request got `token`; True: nothing may follow it. LlmcError where it cannot go on."""


def mask_of(ids: Iterable[int] | None, vocab_size: int) -> bytes:
    """The mask that allows `ids` alone; None: the whole vocabulary."""
    out = bytearray(-(-vocab_size // 32) * 4)
    if ids is None:
        out[: vocab_size // 8] = b"\xff" * (vocab_size // 8)
        ids = range(vocab_size & ~7, vocab_size)
    for token in ids:
        out[token >> 3] |= 1 << (token & 7)
    return bytes(out)


def without(mask: bytes, ids: Iterable[int]) -> bytes:
    """The mask less `ids`."""
    out = bytearray(mask)
    for token in ids:
        out[token >> 3] &= ~(1 << (token & 7))
    return bytes(out)


def both(a: bytes, b: bytes) -> bytes:
    """What two masks allow."""
    value = int.from_bytes(a, "little") & int.from_bytes(b, "little")
    return value.to_bytes(len(a), "little")


def empty(mask: bytes) -> bool:
    """Whether nothing is allowed."""
    return mask.count(0) == len(mask)


class Banned:
    """A mask less the last ids of sequences whose beginning the output ends with; within another guide where there is
    one. `needed`: of these ids one must stay allowed (the stop ids that min_tokens masks are none of them)."""

    def __init__(
        self, allowed: bytes, sequences: Sequence[Sequence[int]], needed: bytes, inner: Guide | None = None
    ) -> None:
        self._allowed, self._needed, self._inner = allowed, needed, inner
        self._sequences = [tuple(s) for s in sequences]
        self._past: list[int] = []
        self._keep = max(map(len, self._sequences), default=1) - 1
        self._mask = self._next()

    def mask(self) -> bytes:
        """See Guide."""
        return self._mask

    def accept(self, token: int) -> bool:
        """See Guide. LlmcError E610 where the token that may follow is banned."""
        if self._inner is not None and self._inner.accept(token):
            return True
        self._past = [*self._past, token][-self._keep :] if self._keep else []
        self._mask = self._next()
        return False

    def _next(self) -> bytes:
        mask = self._allowed if self._inner is None else both(self._inner.mask(), self._allowed)
        past = tuple(self._past)
        hits = [s[-1] for s in self._sequences if past[len(past) - len(s) + 1 :] == s[:-1] and len(past) >= len(s) - 1]
        mask = without(mask, hits) if hits else mask
        if empty(both(mask, self._needed)):
            cause = "no token may come next: bad_words, allowed_token_ids and structured_outputs leave none"
            raise LlmcError("E610", cause, "ban fewer words, or allow more ids")
        return mask
