"""How much may be open at a time: sequences, tokens, requests of one key, and nothing more once the server drains.

It counts; it queues nothing and knows no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from llmc_runtime.server.errors import ApiError, retry_after, unavailable

SECONDS = 1  # after which a refused client may try again


@dataclass
class Admission:
    """`sequences` and `tokens` (prompts and what may be generated) bound what is open, waiting and running;
    `per_key` bounds the sequences of one API key. `refused` is told why a request was."""

    sequences: int
    tokens: int
    per_key: int | None = None
    refused: Callable[[str], None] = lambda reason: None
    draining: bool = False
    open_sequences: int = 0
    open_tokens: int = 0
    by_key: Counter[str] = field(default_factory=Counter)

    @property
    def full(self) -> bool:
        """Whether one more sequence would be refused."""
        return self.open_sequences >= self.sequences or self.open_tokens >= self.tokens

    def check_open(self) -> None:
        """ApiError 503 while the server drains, or is full."""
        if self.draining:
            self.refused("draining")
            raise unavailable("the server is shutting down", "shutting_down")
        if self.full:
            self.refused("queue_full")
            raise unavailable("the server's queue is full", seconds=SECONDS)

    @contextmanager
    def place(self, sequences: int, tokens: int, key: str) -> Iterator[None]:
        """Room for so much, given back at the end. ApiError 429 where the key has too much open, 503 where all have."""
        if self.per_key is not None and self.by_key[key] + sequences > self.per_key:
            self.refused("key_limit")
            cause = f"this API key has {self.by_key[key]} sequences open, of {self.per_key} allowed"
            kind, code = "rate_limit_error", "rate_limit_exceeded"
            raise ApiError(cause, status=429, kind=kind, code=code, headers=retry_after(SECONDS))
        if sequences > self.sequences or tokens > self.tokens:
            self.refused("too_large")
            cause = f"the request asks for {sequences} sequences and {tokens} tokens, with its prompts"
            raise ApiError(f"{cause}; the server takes {self.sequences} and {self.tokens} at a time", param="n")
        if self.open_sequences + sequences > self.sequences or self.open_tokens + tokens > self.tokens:
            self.refused("queue_full")
            raise unavailable("the server's queue is full", seconds=SECONDS)
        self._add(sequences, tokens, key)
        try:
            yield
        finally:
            self._add(-sequences, -tokens, key)

    def _add(self, sequences: int, tokens: int, key: str) -> None:
        self.open_sequences += sequences
        self.open_tokens += tokens
        self.by_key[key] += sequences
        if not self.by_key[key]:
            del self.by_key[key]
