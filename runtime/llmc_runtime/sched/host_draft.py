"""Draft: the interface of methods of speculative decoding that run on the host, ours and those of other packages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class DraftContext:
    """The tokens of one output while it is generated.

    id:          unique among all outputs of the engine
    tokens:      prompt and output so far; the engine appends to this list, which no other code may change. After `end`,
                 the engine may empty it: a method that needs the tokens later copies them in `end`
    num_prompt:  this many first tokens are the prompt
    scope:       what a method has learnt from an output may be used for outputs of the same scope only: requests of the
                 same API key and `cache_salt`
    """

    id: str
    tokens: Sequence[int]
    num_prompt: int
    scope: str


class Draft(ABC):
    """A method that drafts tokens on the host, between the steps of an engine.

    There is one instance per engine, made without arguments and used by one thread. Drafts decide how many tokens a
    step gives, never which: an id that is wrong is rejected by the step that verifies it. The engine waits for
    `propose`, so that its time has to be bounded. An exception ends drafting, not the requests; it is logged once.
    """

    @abstractmethod
    def propose(self, context: DraftContext, max_tokens: int) -> Sequence[int]:
        """Return up to `max_tokens` ids that are likely to follow `context.tokens`; none if nothing is likely.

        Ids after the first `max_tokens`, and those from the first on that the vocabulary lacks, are dropped.
        """

    @abstractmethod
    def end(self, context: DraftContext) -> None:
        """Forget an output that has ended, or learn from it. Called only if `propose` was."""
