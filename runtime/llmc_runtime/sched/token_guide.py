"""Masks over the vocabulary, which restrict a request's next token, and the guides that compute them.

A mask has 4 * ceil(vocabulary / 32) bytes, as the device reads it: id i is allowed if bit i % 8 of byte i // 8 is 1.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from llmc_runtime.format.errors import LlmcError

_SHOWN = 8  # ids of a mask in a message


class Guide(Protocol):
    """Follows the tokens of one request. It may compute masks in another process: its methods never wait."""

    def mask(self) -> bytes | None:
        """Return the mask of the next token: None if it is not known yet, empty if the text has ended.

        The same object is returned until a token is accepted. Raises LlmcError if the guide has failed.
        """

    def accept(self, token: int) -> None:
        """Continue with `token`, which the mask allowed."""

    def look_ahead(self, drafts: Sequence[int]) -> None:
        """Also compute the masks after `drafts`, in place of those of an earlier call. Called when no mask is late. If
        the first draft is accepted, the other masks remain valid."""

    def masks_ahead(self) -> Sequence[bytes]:
        """Return the known masks after the drafts of `look_ahead`, in order, each the same object until a token is
        accepted. The first draft that is not allowed has no mask. The last mask is empty if the text has ended there.
        """

    def is_looking_ahead(self) -> bool:
        """Whether more masks after drafts will be known."""

    def close(self) -> None:
        """Free the guide: the request has ended."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """A set of token ids as a mask, for SamplingParams.allowed_token_ids: its cost does not depend on their number."""

    mask: bytes

    def __repr__(self) -> str:
        """Return the first ids as a list, for error messages."""
        allowed = (i << 3 | bit for i, byte in enumerate(self.mask) if byte for bit in range(8) if byte >> bit & 1)
        first = [str(token) for token in islice(allowed, _SHOWN + 1)]
        return f"[{', '.join([*first[:_SHOWN], '...'] if len(first) > _SHOWN else first)}]"


def mask_size(vocab_size: int) -> int:
    """Return the size of a mask in bytes."""
    return -(-vocab_size // 32) * 4


def mask_of(ids: Iterable[int] | None, vocab_size: int) -> bytes:
    """Return the mask that allows only `ids`, or the whole vocabulary for None."""
    out = bytearray(mask_size(vocab_size))
    if ids is None:
        out[: vocab_size // 8] = b"\xff" * (vocab_size // 8)
        ids = range(vocab_size & ~7, vocab_size)
    for token in ids:
        out[token >> 3] |= 1 << (token & 7)
    return bytes(out)


def without_ids(mask: bytes, ids: Iterable[int]) -> bytes:
    """Return the mask without `ids`."""
    out = bytearray(mask)
    for token in ids:
        out[token >> 3] &= ~(1 << (token & 7))
    return bytes(out)


def both(a: bytes, b: bytes) -> bytes:
    """Return the intersection of two masks."""
    value = int.from_bytes(a, "little") & int.from_bytes(b, "little")
    return value.to_bytes(len(a), "little")


def allows(mask: bytes, token: int) -> bool:
    """Whether the mask allows a token."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def empty(mask: bytes) -> bool:
    """Whether the mask allows no ids."""
    return mask.count(0) == len(mask)


class Bans:
    """Banned token ids, and banned sequences: the last id of a sequence is banned after the others.

    Shared by all outputs of a request. `allowed` is the mask without bans, which allows every id with `allows_all`; one
    of the ids in the mask `needed` must remain allowed (it lacks the stop ids that min_tokens excludes).

    Operations on two whole masks take 60 us for 262,144 ids, and a step has many guides: most do without.
    """

    def __init__(
        self, allowed: bytes, sequences: Sequence[Sequence[int]], needed: bytes, *, allows_all: bool = False
    ) -> None:
        self._ids = [s[0] for s in sequences if len(s) == 1]
        self.mask, self._needed = without_ids(allowed, self._ids), needed
        self._allows_all, self._needs_any = allows_all, allows_all and needed == allowed
        self._num_needed = int.from_bytes(both(self.mask, needed), "little").bit_count()
        self.window = max(map(len, sequences), default=1) - 1  # number of last tokens that determine the next mask
        self._endings: dict[int, list[tuple[bytes, int]]] = {}  # by the token before the banned one
        for s in sequences:
            if len(s) > 1:
                self._endings.setdefault(s[-2], []).append((array("I", s[:-1]).tobytes(), s[-1]))

    @property
    def fixed(self) -> bool:
        """Whether the mask does not depend on the output so far."""
        return not self._endings

    @property
    def leave_none(self) -> bool:
        """Whether no needed id is allowed at the start."""
        return not self._num_needed

    def after(self, past: Sequence[int]) -> bytes | None:
        """Return the mask after `past`, the last `window` tokens of an output; None if it allows no needed id."""
        hits = self._hits(past)
        if not hits:
            return self.mask
        mask = without_ids(self.mask, hits)
        return None if len(hits) >= self._num_needed and empty(both(mask, self._needed)) else mask

    def within(self, inner: bytes, past: Sequence[int]) -> bytes | None:
        """Return `after` for the ids of another mask."""
        hits = self._hits(past)
        if self._allows_all:
            mask = without_ids(inner, [*self._ids, *hits])
        else:
            mask = both(inner, without_ids(self.mask, hits) if hits else self.mask)
        return None if empty(mask if self._needs_any else both(mask, self._needed)) else mask

    def _hits(self, past: Sequence[int]) -> list[int]:
        """Return the ids that end a banned sequence after `past`."""
        endings = self._endings.get(past[-1]) if past else None
        if not endings:
            return []
        text = array("I", past).tobytes()  # comparing bytes is fast for long words, too
        return [last for prefix, last in endings if text.endswith(prefix)]


class Banned:
    """A guide that applies the request's bans to one output, on top of the guide `inner` if there is one."""

    def __init__(self, bans: Bans, inner: Guide | None = None) -> None:
        self._bans, self._inner = bans, inner
        self._past: list[int] = []
        self._mask: bytes | None = None
        self._drafts: list[int] = []
        self._ahead: list[bytes] = []  # the masks after the first drafts

    def mask(self) -> bytes | None:
        """See Guide. Raises LlmcError E610 if all tokens that may follow are banned."""
        if self._mask is None:
            self._mask = self._next(self._past, None if self._inner is None else self._inner.mask())
        return self._mask

    def accept(self, token: int) -> None:
        """See Guide."""
        if self._inner is not None:
            self._inner.accept(token)
        self._past = self._after([token])
        follows = bool(self._drafts) and self._drafts[0] == token
        self._mask = self._ahead[0] if follows and self._ahead else None
        self._drafts, self._ahead = (self._drafts[1:], self._ahead[1:]) if follows else ([], [])

    def look_ahead(self, drafts: Sequence[int]) -> None:
        """See Guide."""
        self._drafts, self._ahead = list(drafts), []
        if self._inner is not None:
            self._inner.look_ahead(drafts)

    def masks_ahead(self) -> Sequence[bytes]:
        """See Guide."""
        inner = None if self._inner is None else self._inner.masks_ahead()
        known = len(self._drafts) if inner is None else min(len(self._drafts), len(inner))
        try:
            last = self._ahead[-1] if self._ahead else self.mask()
            while last and len(self._ahead) < known and allows(last, self._drafts[len(self._ahead)]):
                count = len(self._ahead)
                last = self._next(self._after(self._drafts[: count + 1]), None if inner is None else inner[count])
                self._ahead.append(last or b"")
        except LlmcError:  # `mask` raises it, now or when the draft is accepted
            pass
        return self._ahead

    def is_looking_ahead(self) -> bool:
        """See Guide."""
        return self._inner is not None and self._inner.is_looking_ahead()

    def close(self) -> None:
        """See Guide."""
        if self._inner is not None:
            self._inner.close()

    def _after(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens that determine the bans, with `tokens` at the end of the output."""
        window = self._bans.window
        return [*self._past, *tokens][-window:] if window else []

    def _next(self, past: Sequence[int], inner: bytes | None) -> bytes | None:
        """Return the mask after `past`; `inner` is that of the guide below."""
        if self._inner is None:
            mask = self._bans.after(past)
        elif inner:
            mask = self._bans.within(inner, past)
        else:
            return inner
        if mask is None:
            cause = "no token is allowed next: bad_words, allowed_token_ids and structured_outputs exclude all of them"
            raise LlmcError("E610", cause, "ban fewer words, or allow more ids")
        return mask
