"""A set of token ids as the device's mask: bytes that cost the same to send, check and combine however many ids."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenMask:
    """`mask` has a bit for each id of the vocabulary (see guide). SamplingParams takes one for allowed_token_ids."""

    mask: bytes
