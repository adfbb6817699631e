"""The expected output of a request, computed from its true prefix alone, without scheduler, pages or batches."""

from __future__ import annotations

from itertools import accumulate

from llmc_runtime.sched.request import Request
from llmc_runtime.sched.scheduler_config import SchedulerConfig

from tests.runtime.fake_executor import ROOT, draw, link, score
from tests.runtime.guides import allowed, ends


class Expected:
    """The expected output of one request on the fake device, token by token."""

    __slots__ = ("chain", "config", "guided", "late", "num_prompt", "request", "tokens")

    def __init__(self, request: Request, config: SchedulerConfig, guided: bool = False) -> None:
        """`guided`: the request was added with a Wandering guide."""
        self.request, self.config, self.guided = request, config, guided
        self.late: str | None = None  # the finish reason from its guide, if it arrives in a separate delta
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.chain = list(accumulate(self.tokens, link, initial=ROOT))  # one more than tokens: chain[0] is the root

    def next(self) -> tuple[int, str | None, int | None]:
        """Return the next token, and the finish and stop reasons if it is the last one."""
        chain, length, request = self.chain, len(self.tokens), self.request
        head = chain[length]
        earlier = chain[head % length + 1]
        mask = allowed(request, self.guided, self.tokens[self.num_prompt :], self.config.vocab_size)
        token = draw(head, earlier, self.num_prompt, length, request.row_params, mask, self.config.vocab_size)
        self.tokens.append(token)
        chain.append(link(head, token))
        return (token, *self._finish(token))

    def scores(self) -> list[tuple[float, int, tuple[int, ...], tuple[float, ...]]] | None:
        """Return the scores of the prompt's tokens, which arrive with the first new token."""
        most = self.request.params.prompt_logprobs
        if most is None or len(self.tokens) != self.num_prompt + 1:
            return None
        result = [score(self.chain[i], self.tokens[i], self.config.vocab_size) for i in range(1, self.num_prompt)]
        return [(value, rank, tuple(ids[:most]), tuple(tops[:most])) for value, rank, ids, tops in result]

    def _finish(self, token: int) -> tuple[str | None, int | None]:
        params, config = self.request.params, self.config
        generated = len(self.tokens) - self.num_prompt
        if generated >= params.min_tokens:
            if token in config.eos_token_ids and not params.ignore_eos:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        if generated == params.max_tokens or len(self.tokens) == self.longest():
            return "length", None
        return (ends(self.tokens[self.num_prompt :]) if self.guided else None), None

    def ended_by_guide(self, finish: str | None) -> bool:
        """Return whether only the guide ends the sequence here, with the reason `finish`."""
        return self.guided and finish in ("stop", "error") and ends(self.tokens[self.num_prompt :]) == finish

    def longest(self) -> int:
        """Return the maximum number of tokens of the sequence."""
        config, max_tokens = self.config, self.request.params.max_tokens
        room = min(config.max_model_len, config.num_pages * config.page_size + 1)
        return room if max_tokens is None else min(room, self.num_prompt + max_tokens)
