"""Guides: the engine's handles of outputs that a grammar process follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar import wire


class GrammarGuide:
    """The Guide (see sched.token_guide) of one output; a worker computes its masks. Belongs to the engine's thread.

    `send` sends an operation (see wire) with tokens to the worker; its last argument is the operation's number. `leave`
    closes the output. `end_ids` are the tokens that end the text where the mask allows them.

    A draft whose mask is known is accepted without the worker, which receives the token with the next operation.
    """

    def __init__(
        self,
        send: Callable[[GrammarGuide, int, Sequence[int], int], None],
        leave: Callable[[], None],
        end_ids: frozenset[int],
    ) -> None:
        self._send, self._leave, self._end_ids = send, leave, end_ids
        self._mask: bytes | None = None
        self._last = b""  # the mask that was received last
        self._unsent: list[int] = []  # accepted tokens that the worker does not have yet
        self._drafts: Sequence[int] = ()
        self._ahead: list[bytes] = []  # the masks after the first drafts
        self._serial = self._looking = 0  # the number of operations, and that of the pending LOOK (0: none)
        self._known = 0  # results of the pending LOOK that are masks of accepted tokens
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
            self._request(wire.OPEN, ())

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
        elif self._ahead and self._drafts[0] == token:
            self._unsent.append(token)
            self._drafts, self._mask = self._drafts[1:], self._ahead.pop(0)
        else:
            self._forget()
            tokens, self._unsent = [*self._unsent, token], []
            self._request(wire.ACCEPT, tokens)

    def look_ahead(self, drafts: Sequence[int]) -> None:
        """See Guide."""
        self._forget()
        end = next((i for i, token in enumerate(drafts) if token in self._end_ids), len(drafts))
        self._drafts = drafts[:end]
        if end and self._mask != b"" and self._error is None:
            self._known = len(self._unsent)
            self._looking = self._operate(wire.LOOK, [*self._unsent, *self._drafts])

    def masks_ahead(self) -> Sequence[bytes]:
        """See Guide."""
        return self._ahead

    def is_looking_ahead(self) -> bool:
        """See Guide."""
        return self._looking > 0 and self._mask != b"" and self._error is None

    def close(self) -> None:
        """See Guide: release the output."""
        self._leave()
        self.sent = 0.0

    def receive(self, kind: int, serial: int, payload: bytes) -> None:
        """Store a result of the worker (see wire)."""
        if kind == wire.AHEAD_END:
            self._looking = 0 if serial == self._looking else self._looking
            return
        mask = self._last if kind in (wire.SAME, wire.SAME_AHEAD) else payload
        self._last = mask or self._last
        if kind not in (wire.AHEAD, wire.SAME_AHEAD):
            self._mask, self.sent = mask, 0.0
        elif serial == self._looking and self._known:
            self._known -= 1
        elif serial == self._looking:
            self._ahead.append(mask)

    def fail(self, error: LlmcError) -> None:
        """Mark the text as failed. The first error is kept."""
        self._error, self.sent = self._error or error, 0.0

    def _forget(self) -> None:
        """Forget the drafts and their masks."""
        self._drafts, self._looking = (), 0
        self._ahead.clear()

    def _request(self, kind: int, tokens: Sequence[int]) -> None:
        """Request the next mask."""
        self._mask = None
        self.sent = time.monotonic()
        self._operate(kind, tokens)

    def _operate(self, kind: int, tokens: Sequence[int]) -> int:
        """Send an operation to the worker; return its number."""
        self._serial += 1
        self._send(self, kind, tokens, self._serial)
        return self._serial


class Opening:
    """A request's pending `count` guides: the grammar is being compiled, or their first masks are being computed.

    `key` identifies the grammar.
    """

    def __init__(self, count: int, key: tuple[str, bytes]) -> None:
        self.count, self.key, self.began = count, key, time.monotonic()
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

        Raises LlmcError E651 (grammar rejected), E652 (too costly) or E653 (no capacity now), and closes the guides.
        """
        error = self._error or next((guide.error for guide in self._guides if guide.error is not None), None)
        if error is not None:
            self.close()
            raise error
        return self._guides

    def close(self) -> None:
        """Close the guides that there are."""
        for guide in self._guides:
            guide.close()

    def add(self, guides: list[GrammarGuide]) -> None:
        """Add the guides, once a worker is available."""
        self._guides += guides

    def fail(self, error: LlmcError) -> None:
        """Mark the opening as failed. The first error is kept."""
        self._error = self._error or error
