"""Follows a guide of a grammar process token by token, for tests without an engine."""

from __future__ import annotations

from llmc_runtime.grammar import GrammarGuide, Grammars
from llmc_runtime.sched.structured_outputs import StructuredOutputsParams


class Followed:
    """One output of a grammar. Every operation waits for its result."""

    def __init__(self, grammars: Grammars, guide: GrammarGuide) -> None:
        self._grammars, self.guide = grammars, guide
        self.accepted: list[int] = []

    @classmethod
    def of(cls, grammars: Grammars, wanted: StructuredOutputsParams) -> Followed:
        """Start an output in this format."""
        (guide,) = grammars.wait(grammars.open(wanted))
        return cls(grammars, guide)

    def mask(self) -> bytes:
        """Return the next mask, empty if the text has ended. Raises LlmcError if it cannot continue."""
        self.guide.start()
        while self.guide.pending:
            self._grammars.pump(0.05)
        mask = self.guide.mask()
        assert mask is not None
        return mask

    def look(self, drafts: list[int]) -> list[bytes]:
        """Return the masks for the tokens after drafts."""
        self.guide.look_ahead(drafts)
        while self.guide.is_looking_ahead():
            self._grammars.pump(0.05)
        return list(self.guide.masks_ahead())

    def accept(self, token: int) -> bool:
        """Accept a token, and return whether the text has ended with it."""
        self.guide.accept(token)
        self.accepted.append(token)
        return self.mask() == b""
