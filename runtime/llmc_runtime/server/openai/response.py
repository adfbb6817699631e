"""Collects the outputs of a response, and the usage object common to both kinds of completion."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from llmc_runtime.logprobs import Logprob, LogprobRows, Row
from llmc_runtime.outputs import CompletionOutput, RequestOutput
from llmc_runtime.prompts import Prompt
from llmc_runtime.server.http.lazy_json import Lazy
from llmc_runtime.server.serving import News

LEAST = -9999.0  # smallest log-probability sent, as JSON has no infinity


@dataclass
class Choice:
    """One output so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, news: CompletionOutput) -> None:
        """Append an update."""
        self.text.append(news.text)
        self.token_ids += news.token_ids
        rows = news.logprobs
        if isinstance(rows, LogprobRows):
            self.logprobs = rows if self.logprobs is None else self.logprobs.joined(rows)
        self.finish_reason, self.stop_reason = news.finish_reason, news.stop_reason


@dataclass
class Usage:
    """The tokens of a response; `generated` covers all outputs."""

    prompt: int
    generated: int = 0
    reasoning: int | None = None  # part of `generated`; None if reasoning is not separated
    cached: dict[int, int] = field(default_factory=dict)  # cached prompt tokens by prompt

    def take(self, index: int, news: RequestOutput) -> None:
        """Count an update of prompt `index`."""
        self.cached[index] = news.num_cached_tokens
        self.generated += sum(len(one.token_ids) for one in news.outputs)

    def told(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        details = {} if self.reasoning is None else {"completion_tokens_details": {"reasoning_tokens": self.reasoning}}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            **details,
        }


@dataclass
class Whole:
    """A finished response: outputs by prompt, the scores of each prompt, and usage."""

    choices: list[list[Choice]]
    prompt_logprobs: list[Sequence[Row | None] | None]
    usage: Usage


async def gather(news: News, prompts: list[Prompt], n: int) -> Whole:
    """Collect all outputs until they have ended."""
    usage = Usage(sum(len(prompt.ids) for prompt in prompts))
    whole = Whole([[Choice() for _ in range(n)] for _ in prompts], [None] * len(prompts), usage)
    async with aclosing(news) as items:  # type: ignore[type-var]
        async for index, output in items:
            usage.take(index, output)
            for one in output.outputs:
                whole.choices[index][one.index].take(one)
            if output.prompt_logprobs is not None:
                whole.prompt_logprobs[index] = output.prompt_logprobs
    return whole


def told_scores(rows: Sequence[Row | None] | None) -> Lazy | None:
    """Return prompt_logprobs in vLLM's format: per position, {id: {logprob, rank, decoded_token}}."""
    if rows is None:
        return None
    return Lazy(
        None
        if row is None
        else {
            str(token): {"logprob": clamped(one), "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in row.items()
        }
        for row in rows
    )


def clamped(one: Logprob) -> float:
    """Return the log-probability, limited to a value that JSON can represent."""
    return max(one.logprob, LEAST)


def spelled(token: int, one: Logprob, as_id: bool | None = False) -> str:
    """Return a candidate's text, or "token_id:N" if it has none or `as_id` is set."""
    return f"token_id:{token}" if as_id or one.decoded_token is None else one.decoded_token
