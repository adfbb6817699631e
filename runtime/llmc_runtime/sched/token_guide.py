"""What a request's next token may be: masks over the vocabulary, fixed or following its tokens. It knows no grammar.

A mask is 4 * ceil(vocabulary / 32) bytes, as the device reads it: id i is allowed where bit i % 8 of byte i // 8 is 1.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from llmc_runtime.format.errors import LlmcError


class Guide(Protocol):
    """Follows one request's tokens. It may compute masks elsewhere: nobody waits in its methods."""

    def mask(self) -> bytes | None:
        """What the next token may be; the same object where nothing changed. None: not known yet; empty: nothing, the
        text has ended. LlmcError where it cannot go on."""

    def accept(self, token: int) -> None:
        """The request got `token`, which the mask allowed."""

    def close(self) -> None:
        """The request has ended, and asks for nothing more."""


def mask_size(vocab_size: int) -> int:
    """Bytes of a mask."""
    return -(-vocab_size // 32) * 4


def mask_of(ids: Iterable[int] | None, vocab_size: int) -> bytes:
    """The mask that allows `ids` alone; None: the whole vocabulary."""
    out = bytearray(mask_size(vocab_size))
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


class Bans:
    """The ids that are never allowed, and sequences whose last id is not, behind the others; made once for all outputs
    of a request, which share it. `needed`: of these ids one must stay allowed (the stop ids that min_tokens masks are
    none of them)."""

    def __init__(self, allowed: bytes, sequences: Sequence[Sequence[int]], needed: bytes) -> None:
        self.mask, self.needed = without(allowed, [s[0] for s in sequences if len(s) == 1]), needed
        self.keep = max(map(len, sequences), default=1) - 1  # tokens that matter for the next
        self._behind: dict[int, list[tuple[bytes, int]]] = {}  # by the token right before the banned one
        for s in sequences:
            if len(s) > 1:
                self._behind.setdefault(s[-2], []).append((array("I", s[:-1]).tobytes(), s[-1]))

    @property
    def fixed(self) -> bool:
        """Whether the tokens so far do not matter."""
        return not self._behind

    def after(self, past: Sequence[int]) -> bytes:
        """The mask behind these tokens, the last `keep` of an output."""
        found = self._behind.get(past[-1]) if past else None
        if not found:
            return self.mask
        text = array("I", past).tobytes()  # comparing bytes takes the same time for long words as for short ones
        hits = [last for begin, last in found if text.endswith(begin)]
        return without(self.mask, hits) if hits else self.mask


class Banned:
    """Follows one output under its request's bans; within another guide where there is one."""

    def __init__(self, bans: Bans, inner: Guide | None = None) -> None:
        self._bans, self._inner = bans, inner
        self._past: list[int] = []
        self._mask: bytes | None = None

    def mask(self) -> bytes | None:
        """See Guide. LlmcError E610 where the token that may follow is banned."""
        if self._mask is None:
            self._mask = self._next()
        return self._mask

    def accept(self, token: int) -> None:
        """See Guide."""
        if self._inner is not None:
            self._inner.accept(token)
        keep = self._bans.keep
        self._past = [*self._past, token][-keep:] if keep else []
        self._mask = None

    def close(self) -> None:
        """See Guide."""
        if self._inner is not None:
            self._inner.close()

    def _next(self) -> bytes | None:
        bans = self._bans
        mask = bans.after(self._past)
        if self._inner is not None:
            inner = self._inner.mask()
            if not inner:
                return inner
            mask = both(inner, mask)
        if mask is not bans.mask and empty(both(mask, bans.needed)):
            cause = "no token may come next: bad_words, allowed_token_ids and structured_outputs leave none"
            raise LlmcError("E610", cause, "ban fewer words, or allow more ids")
        return mask
