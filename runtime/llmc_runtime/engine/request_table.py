"""Live requests: what a caller asks for becomes engine requests, and their deltas become answers. No text, no turns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from llmc_runtime.engine.engine import Engine
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar import GrammarGuide
from llmc_runtime.outputs import Answer, Collector
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.text.bad_words import bad_word_ids
from llmc_runtime.text.tokenizer import Tokenizer

_SEEDS = (1 << 64) - 1


class Live:
    """The requests of one engine; whoever calls has a turn."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._parts: dict[str, tuple[Answer, Collector]] = {}  # by the engine's ids
        self._ids = itertools.count()

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        guides: Sequence[GrammarGuide] = (),
        salt: str = "",
    ) -> Answer:
        """Queue a request, all of its outputs or none of them; `guides` follow its structured outputs, one each, and it
        shares prefixes with requests of the same `salt`. LlmcError E6xx where it cannot run."""
        words = words_of(params, self._tokenizer)
        name = str(next(self._ids))
        names = [name] if params.n == 1 else [f"{i}_{name}" for i in range(params.n)]
        try:
            leader = None
            for i, one in enumerate(names):
                mine = one_of(params, i)
                guide = guides[i] if guides else None
                request = Request(one, prompt.ids, mine, priority, salt, words, guide, leader)
                self._engine.add(request)
                leader = leader or request
            parts = [Collector(one, i, prompt.ids, params, self._tokenizer) for i, one in enumerate(names)]
        except BaseException:
            for one in names:
                self._engine.abort(one)
            for guide in guides:
                guide.close()
            raise
        answer = Answer(name, prompt.text, prompt.ids, parts)
        self._parts |= {part.request_id: (answer, part) for part in parts}
        return answer

    def step(self) -> None:
        """One step of the engine, for whoever has requests in it."""
        for delta in self._engine.step():
            if delta.id not in self._parts:
                continue
            answer, part = self._parts[delta.id]
            if part.take(delta):
                self._engine.abort(delta.id)
            if part.finished:
                del self._parts[delta.id]
            if part.error is not None:
                self.drop(answer)

    def drop(self, answer: Answer) -> None:
        """End a request, finished or not: all of its outputs."""
        for part in answer.parts:
            if self._parts.pop(part.request_id, None) is not None:
                self._engine.abort(part.request_id)
            part.abort()

    def drop_all(self) -> None:
        """End every request."""
        for answer, _ in list(self._parts.values()):
            self.drop(answer)


def words_of(params: SamplingParams, tokenizer: Tokenizer | None) -> list[list[int]]:
    """The bad words as token ids. LlmcError E620 where the request needs a tokenizer and there is none."""
    for name, value in (("stop strings", params.stop), ("bad_words", params.bad_words)):
        if value and tokenizer is None:
            remedy = "use stop_token_ids, allowed_token_ids or logit_bias"
            raise LlmcError("E620", f"{name} need the tokenizer, which the artifact lacks", remedy)
    return bad_word_ids(tokenizer, params.bad_words or ()) if tokenizer else []


def one_of(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of n outputs: a seed of its own, as vLLM derives it; the first scores the prompt."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else params.seed + index & _SEEDS
    return params.changed(n=1, seed=seed, prompt_logprobs=None if index else params.prompt_logprobs)
