"""A guide of a grammar process followed token by token, for tests that have no engine."""

from __future__ import annotations

from llmc_runtime.grammar import GrammarGuide, Grammars
from llmc_runtime.sched.structured import StructuredOutputsParams


class Followed:
    """One output of a grammar, waited for after each token."""

    def __init__(self, grammars: Grammars, guide: GrammarGuide) -> None:
        self._grammars, self.guide = grammars, guide

    @classmethod
    def of(cls, grammars: Grammars, wanted: StructuredOutputsParams) -> Followed:
        """An output of this form, at its beginning."""
        (guide,) = grammars.wait(grammars.open(wanted))
        return cls(grammars, guide)

    def mask(self) -> bytes:
        """What may come next, empty where the text has ended. LlmcError where it cannot go on."""
        self.guide.start()
        while self.guide.pending:
            self._grammars.pump(0.05)
        mask = self.guide.mask()
        assert mask is not None
        return mask

    def accept(self, token: int) -> bool:
        """Follow a token: whether the text has ended with it."""
        self.guide.accept(token)
        return self.mask() == b""
