"""Guides: the engine's handles of outputs that a grammar process follows."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmc_runtime.format.errors import LlmcError


class GrammarGuide:
    """The Guide (see sched.guide) of one output, whose masks a worker process computes.

    `send` makes the worker accept a token and compute the next mask, or with None the first mask. `leave` makes it
    forget the output. `end_ids` are the tokens that end the text where the mask allows them.
    """

    def __init__(
        self,
        send: Callable[[GrammarGuide, int | None], None],
        leave: Callable[[], None],
        end_ids: frozenset[int],
    ) -> None:
        self._send, self._leave, self._end_ids = send, leave, end_ids
        self._mask: bytes | None = None
        self._last = b""  # the mask before the one being computed
        self._error: LlmcError | None = None
        self._open = False
        self.sent = 0.0  # monotonic time of the pending request to the worker; 0: nothing is pending

    @property
    def pending(self) -> bool:
        """Whether the next mask is not known yet."""
        return self._mask is None and self._error is None

    @property
    def error(self) -> LlmcError | None:
        """The reason why the text cannot continue, or None."""
        return self._error

    def start(self) -> None:
        """Request the first mask, if that has not been done."""
        if not self._open and self._error is None:
            self._open = True
            self._request(None)

    def mask(self) -> bytes | None:
        """See Guide. Raises LlmcError E652 or E653."""
        if self._error is not None:
            raise self._error
        self.start()
        return self._mask

    def accept(self, token: int) -> None:
        """See Guide: accept the next token."""
        if token in self._end_ids:
            self._mask = b""
            self.close()
        else:
            self._request(token)

    def close(self) -> None:
        """See Guide: release the output."""
        self._leave()
        self.sent = 0.0

    def take(self, mask: bytes | None) -> None:
        """Store the worker's answer: a mask, empty if the text has ended, or None if the mask did not change."""
        self._mask, self.sent = self._last if mask is None else mask, 0.0

    def fail(self, error: LlmcError) -> None:
        """Mark the text as failed. The first error is kept."""
        self._error, self.sent = self._error or error, 0.0

    def _request(self, token: int | None) -> None:
        self._last, self._mask = self._mask or b"", None
        self.sent = time.monotonic()
        self._send(self, token)


class Opening:
    """A request's pending `count` guides: the grammar is being compiled, or their first masks are being computed."""

    def __init__(self, count: int) -> None:
        self.count, self.began = count, time.monotonic()
        self._guides: list[GrammarGuide] = []
        self._error: LlmcError | None = None

    @property
    def done(self) -> bool:
        """Whether `guides` returns without waiting."""
        if self._error is not None:
            return True
        return len(self._guides) == self.count and not any(guide.sent for guide in self._guides)

    def guides(self) -> list[GrammarGuide]:
        """Return the guides, once `done`.

        Raises LlmcError E651 (grammar rejected), E652 (too costly) or E653 (no capacity now).
        """
        error = self._error or next((guide.error for guide in self._guides if guide.error is not None), None)
        if error is not None:
            raise error
        return self._guides

    def add(self, guides: list[GrammarGuide]) -> None:
        """Add the guides, once a worker is available."""
        self._guides += guides

    def fail(self, error: LlmcError) -> None:
        """Mark the opening as failed. The first error is kept."""
        self._error = self._error or error
