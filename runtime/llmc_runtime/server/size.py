"""How many bytes an answer will have, estimated before the work begins; it reads no prompt and sends nothing.

The sizes of JSON entries are those of answers measured with vocabularies of 4 to 6 characters a token; a float32 has up
to 20 characters. Only what multiplies is counted: log-probabilities, token ids and texts, not the frame around them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc_runtime.sched.params import SamplingParams
from llmc_runtime.server.errors import ApiError
from llmc_runtime.server.fields import ChatRequest, Generation

MAX_ANSWER = 64 << 20  # bytes of one answer, unless the operator gives another limit
SCORE_WEIGHT = 2  # a scored prompt token needs a row of logits, as a generated token does
_SCORED = 80  # one candidate of prompt_logprobs
_COMPLETION, _CHAT = 40, 105  # one candidate of logprobs
_TOKEN, _ID = 8, 8  # one token as text, and as an id


@dataclass(frozen=True)
class Size:
    """Bytes of an answer: what the prompts cause, what each generated token adds, most generated tokens of all outputs;
    `held`: whether there is more than text, so that the server holds much for the answer until it is sent."""

    fixed: int
    each: int
    tokens: int
    held: bool

    @property
    def total(self) -> int:
        """All of them."""
        return self.fixed + self.each * self.tokens


def size_of(asked: Generation, params: SamplingParams, lengths: list[int], tokens: int) -> Size:
    """The size of the answer to prompts of `lengths` tokens, whose outputs together have up to `tokens` tokens."""
    chat = isinstance(asked, ChatRequest)
    each, prompt = _TOKEN, 0
    if params.logprobs is not None:
        each += (params.logprobs + 2) * (_CHAT if chat else _COMPLETION)
    if asked.prompt_logprobs is not None:
        prompt += (asked.prompt_logprobs + 1) * _SCORED
    if getattr(asked, "echo", None):
        prompt += _TOKEN
        if params.logprobs is not None:
            prompt += (params.logprobs + 2) * _COMPLETION
    if asked.return_token_ids:
        each, prompt = each + _ID, prompt + _ID
    copies = 1 if chat else params.n  # completions repeat what is said of the prompt in each choice
    return Size(sum(lengths) * prompt * copies, each, tokens, each > _TOKEN or prompt > 0)


def check_size(asked: Generation, size: Size, most: int) -> None:
    """ApiError 400 where the answer may have more than `most` bytes."""
    if size.total <= most:
        return
    param = "prompt_logprobs" if asked.prompt_logprobs is not None and size.fixed > most // 2 else "logprobs"
    if not size.held:
        param = "max_tokens"
    cause = f"the answer may have {size.total:,} bytes, and the limit is {most:,} (--max-answer-bytes)"
    remedy = "send fewer prompts or outputs in one request, or ask for fewer alternatives or tokens"
    raise ApiError(f"{cause}. Try: {remedy}", param=param, code="answer_too_large")


def cut(params: SamplingParams, size: Size, most: int, outputs: int) -> SamplingParams:
    """Parameters whose `max_tokens` the client left open, cut so that the answer fits into `most`
    bytes; the same where not even one token fits."""
    room = (most - size.fixed) // (size.each * outputs)
    if room <= 0 or (params.max_tokens is not None and params.max_tokens <= room):
        return params
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
