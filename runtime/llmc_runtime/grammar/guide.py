"""What the engine holds of a grammar: a guide for each output, and the opening that gives guides to a request."""

from __future__ import annotations

import time
from collections.abc import Callable

from llmc_runtime.format.errors import LlmcError


class GrammarGuide:
    """The Guide (see sched.guide) of one output, computed by a worker process.

    `send` has the worker follow a token, None for the first mask; `leave` has it forget the output. `end_ids` end the
    text where the mask allows them.
    """

    def __init__(
        self,
        send: Callable[[GrammarGuide, int | None], None],
        leave: Callable[[], None],
        end_ids: frozenset[int],
    ) -> None:
        self._send, self._leave, self._end_ids = send, leave, end_ids
        self._mask: bytes | None = None
        self._last = b""  # the mask before the one that is awaited
        self._error: LlmcError | None = None
        self._open = False
        self.sent = 0.0  # when the worker was asked for what is awaited; 0: nothing is

    @property
    def pending(self) -> bool:
        """Whether the next mask is not known yet."""
        return self._mask is None and self._error is None

    @property
    def error(self) -> LlmcError | None:
        """Why the text cannot go on."""
        return self._error

    def start(self) -> None:
        """Have the first mask computed, unless that was done."""
        if not self._open and self._error is None:
            self._open = True
            self._request(None)

    def mask(self) -> bytes | None:
        """See Guide. LlmcError E652, E653."""
        if self._error is not None:
            raise self._error
        self.start()
        return self._mask

    def accept(self, token: int) -> None:
        """See Guide."""
        if token in self._end_ids:
            self._mask = b""
            self.close()
        else:
            self._request(token)

    def close(self) -> None:
        """See Guide."""
        self._leave()
        self.sent = 0.0

    def take(self, mask: bytes | None) -> None:
        """The worker's answer: a mask, empty where the text has ended; None: the same mask as before."""
        self._mask, self.sent = self._last if mask is None else mask, 0.0

    def fail(self, error: LlmcError) -> None:
        """The text cannot go on. The first reason stays."""
        self._error, self.sent = self._error or error, 0.0

    def _request(self, token: int | None) -> None:
        self._last, self._mask = self._mask or b"", None
        self.sent = time.monotonic()
        self._send(self, token)


class Opening:
    """The guides of one request, `count` of them, while its grammar is compiled and their first masks are computed."""

    def __init__(self, count: int) -> None:
        self.count, self.began = count, time.monotonic()
        self._guides: list[GrammarGuide] = []
        self._error: LlmcError | None = None

    @property
    def done(self) -> bool:
        """Whether `guides` has an answer."""
        if self._error is not None:
            return True
        return len(self._guides) == self.count and not any(guide.sent for guide in self._guides)

    def guides(self) -> list[GrammarGuide]:
        """The guides, once `done`. LlmcError E651 (refused), E652 (too costly), E653 (no room for it now)."""
        error = self._error or next((guide.error for guide in self._guides if guide.error is not None), None)
        if error is not None:
            raise error
        return self._guides

    def add(self, guides: list[GrammarGuide]) -> None:
        """The worker that is going to follow the outputs is there."""
        self._guides += guides

    def fail(self, error: LlmcError) -> None:
        """There will be no guides."""
        self._error = self._error or error
