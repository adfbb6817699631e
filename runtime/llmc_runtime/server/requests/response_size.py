"""Estimates the size of a response in bytes before work on it starts.

The sizes of JSON entries were measured on responses with 4 to 6 characters per token; a float32 has up to 20
characters. Only the parts that multiply are counted: log-probabilities, token ids and texts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.requests.request_fields import ChatRequest, Generation

MAX_ANSWER = 64 << 20  # default limit on the bytes of one response
SCORE_WEIGHT = 2  # a scored prompt token needs a row of logits, as a generated token does
_SCORED = 80  # bytes per candidate in prompt_logprobs
_COMPLETION = 40  # bytes per candidate in the logprobs of a completion
_CHAT = 105  # bytes per candidate in the logprobs of a chat
_TOKEN = 8  # bytes per token as text
_ID = 8  # bytes per token as an id


@dataclass(frozen=True)
class Size:
    """The estimated size of a response.

    `fixed` are the bytes for the prompts, `per_token` the bytes per generated token, and `tokens` the maximum number of
    generated tokens of all outputs. `reserved` is true if the response contains more than text, so that memory is
    reserved for it until it is sent.
    """

    fixed: int
    per_token: int
    tokens: int
    reserved: bool

    @property
    def total(self) -> int:
        """The total in bytes."""
        return self.fixed + self.per_token * self.tokens


def size_of(request: Generation, params: SamplingParams, lengths: list[int], tokens: int, repeats: int = 1) -> Size:
    """Estimate the response to prompts of `lengths` tokens with up to `tokens` generated tokens in total.

    The log-probabilities of generated tokens are sent `repeats` times.
    """
    chat = isinstance(request, ChatRequest)
    per_token, prompt = _TOKEN, 0
    if params.logprobs is not None:
        per_token += (params.logprobs + 2) * (_CHAT if chat else _COMPLETION) * repeats
    if request.prompt_logprobs is not None:
        prompt += (request.prompt_logprobs + 1) * _SCORED
    if getattr(request, "echo", None):
        prompt += _TOKEN
        if params.logprobs is not None:
            prompt += (params.logprobs + 2) * _COMPLETION
    if request.return_token_ids:
        per_token, prompt = per_token + _ID, prompt + _ID
    copies = 1 if chat else params.n  # completions repeat the prompt's data in each choice
    return Size(sum(lengths) * prompt * copies, per_token, tokens, per_token > _TOKEN or prompt > 0)


def check_size(request: Generation, size: Size, limit: int) -> None:
    """Raise ApiError 400 if the response may have more than `limit` bytes."""
    if size.total <= limit:
        return
    param = "prompt_logprobs" if request.prompt_logprobs is not None and size.fixed > limit // 2 else "logprobs"
    if not size.reserved:
        param = "max_tokens"
    cause = f"the response may have {size.total:,} bytes; the limit is {limit:,} (--max-answer-bytes)"
    remedy = "send fewer prompts or outputs in one request, or request fewer alternatives or tokens"
    raise ApiError(f"{cause}. Try: {remedy}", param=param, code="answer_too_large")


def cut(params: SamplingParams, size: Size, limit: int, outputs: int) -> SamplingParams:
    """Lower `max_tokens`, which the client left open, so that the response fits into `limit` bytes.

    Returns `params` unchanged if not even one token fits.
    """
    affordable = (limit - size.fixed) // (size.per_token * outputs)
    if affordable <= 0 or (params.max_tokens is not None and params.max_tokens <= affordable):
        return params
    return replace(params, max_tokens=affordable, min_tokens=min(params.min_tokens, affordable))
