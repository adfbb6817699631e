"""SpeculationConfig: the method of speculative decoding, and its limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Drafts by prompt lookup, by a draft model or head, or on the host.

    num_tokens:     maximum number of drafted tokens per row
    min_ngram, max_ngram: lengths in tokens of the suffixes that prompt lookup searches for; 0: no prompt lookup. With a
                    head, prompt lookup comes first (see lookup_first)
    max_rows:       maximum number of rows for which a step of the draft model or head drafts; 0: there is none
    head:           the method of the head, whose KV every step computes; "": there is none
    host:           the method that drafts on the host (see host_draft); "": there is none
    stops:          the draft model or head can stop after an unlikely token (see draft_stops)
    skips_prompts:  steps with prompts can be plain, too (see Step)
    """

    num_tokens: int
    min_ngram: int = 0
    max_ngram: int = 0
    max_rows: int = 0
    head: str = ""
    host: str = ""
    stops: bool = False
    skips_prompts: bool = False

    @property
    def method(self) -> str:
        """The name of the method, as users give it."""
        return self.host or self.head or ("draft" if self.max_rows else "ngram")

    @property
    def looks_up(self) -> bool:
        """Whether every step drafts by prompt lookup, so that the number of drafts is known before it is chosen."""
        return not self.host and not self.max_rows

    @property
    def looks_first(self) -> bool:
        """Whether prompt lookup drafts before the head does."""
        return self.max_rows > 0 and self.max_ngram > 0

    @property
    def proposals(self) -> int:
        """The number of tokens that every step drafts for a row, regardless of the plan."""
        return self.num_tokens if self.looks_up or self.looks_first else 0

    @property
    def drafting(self) -> tuple[int, int, int]:
        """The columns of a device row (see RowParams)."""
        return (self.num_tokens, self.min_ngram, self.max_ngram) if self.proposals else (0, 0, 0)
