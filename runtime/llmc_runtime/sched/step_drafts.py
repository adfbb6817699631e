"""What a step verifies, drafts and computes for a draft model, summed over its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmc_runtime.sched.step import StepOutput, Work


class StepDrafts(NamedTuple):
    """The drafts that a step verified and proposed, the tokens whose KV a draft model computed after it, and the number
    of its prompts' tokens.
    """

    verified: int
    proposed: int
    fill: int
    prompt: int

    @classmethod
    def of(cls, work: Sequence[Work], output: StepOutput, stops: bool) -> StepDrafts:
        """Return the sums of a step. stops: drafting can stop early, so the output says how many drafts were made."""
        proposed = sum(map(len, output.likely.values())) if stops else sum(item.propose for item in work)
        verified, fill = sum(item.drafts for item in work), sum(item.fill for item in work)
        return cls(verified, proposed, fill, prompt_tokens(work))


def prompt_tokens(work: Sequence[Work]) -> int:
    """Return the number of tokens that a step computes for rows that do not decode."""
    return sum(item.num_tokens for item in work if item.num_tokens > 1 + item.drafts)
