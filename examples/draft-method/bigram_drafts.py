"""A method of speculative decoding: drafts what followed the last two tokens when they last occurred together."""

from __future__ import annotations

from collections.abc import Sequence

from llmc_runtime.drafts import Draft, DraftContext


class Bigrams(Draft):
    """--speculate bigrams: looks in the last 256 tokens of the output and its prompt."""

    def propose(self, context: DraftContext, max_tokens: int) -> Sequence[int]:
        """Return up to `max_tokens` ids that followed the last two."""
        recent = context.tokens[-256:]
        for at in range(len(recent) - 2, 1, -1):
            if recent[at - 2 : at] == recent[-2:]:
                return recent[at : at + max_tokens]
        return []

    def end(self, context: DraftContext) -> None:
        """Nothing is kept of outputs that have ended."""
