"""Prepares a new request for the scheduler: checks it against the limits, and sets the fields that follow from them."""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import replace

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.row_abi import STOPS
from llmc_runtime.sched.packed_logprobs import PackedLogprobs
from llmc_runtime.sched.parameter_type import refused
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.step import RowParams
from llmc_runtime.sched.token_guide import Banned, Bans, TokenMask, mask_of, mask_size, without_ids


def init_request(request: Request, config: SchedulerConfig, seed: int) -> None:
    """Check a new request against the limits, and set the fields that follow from its parameters.

    `seed` is used if the request has none. Raises LlmcError, leaving the request unchanged: E601 for a parameter, E602
    if the prompt exceeds max_model_len, E603 if prompt and max_tokens do, E604 if they exceed the KV cache, E605 for an
    empty prompt, E606 for a token id that the vocabulary lacks.
    """
    prompt, params = request.prompt_token_ids, request.params
    if type(request.priority) is not int:
        raise refused("priority", request.priority, "an integer; smaller runs first")
    if not isinstance(request.cache_salt, str):
        raise refused("cache_salt", request.cache_salt, "a string")
    if request.leader is None or request.leader.prompt_token_ids is not prompt:
        _check_prompt(prompt, config, request.checked)
    _check_stops(request, config)
    limit = _max_length(len(prompt), params.max_tokens, config)
    stops = frozenset(params.stop_token_ids or ())
    early_stops = stops.union(config.eos_token_ids) if params.min_tokens else frozenset()
    allowed = _allowed_mask(request, early_stops, config)
    request.tokens = prompt if isinstance(prompt, MutableSequence) else list(prompt)
    request.num_prompt = len(prompt)
    request.limit = limit
    request.min_length = len(prompt) + params.min_tokens
    request.eos = frozenset() if params.ignore_eos else frozenset(config.eos_token_ids)
    request.stops = stops
    request.scores = None if params.prompt_logprobs is None else PackedLogprobs(params.prompt_logprobs)
    request.row_params = RowParams.of(
        params,
        seed=(seed if params.seed is None else params.seed) & (1 << 64) - 1,
        min_tokens=params.min_tokens,
        want_logprobs=params.logprobs is not None or params.prompt_logprobs is not None,
        stops=tuple(sorted(early_stops)),
        biases=_biases(request),
        allowed=allowed,
        guided=0 if request.guide is None else config.max_masks,
    )
    speculation = config.speculation
    if speculation is not None and request.may_draft:
        request.row_params = replace(request.row_params, drafting=speculation.drafting)


def _allowed_mask(request: Request, early_stops: frozenset[int], config: SchedulerConfig) -> bytes:
    """Return the token mask of `allowed_token_ids` and `bad_words`, empty if neither is set.

    If the mask depends on the output, the request gets a guide that computes it, and b"" is returned.
    `early_stops` are the token ids that min_tokens excludes at first.
    """
    params, max_id = request.params, config.vocab_size - 1
    if params.logit_bias and not _shares_biases(request) and max(params.logit_bias) > max_id:
        raise refused("logit_bias", params.logit_bias, f"ids of the vocabulary, 0 to {max_id}")
    if params.allowed_token_ids is None and not request.bad_words:
        return b""
    bans = request.bans = _shared_bans(request) or _bans(request, early_stops, config)
    if request.guide is None and bans.fixed:
        return bans.mask
    guide = Banned(bans, request.guide)
    guide.mask()  # raises LlmcError if the bans leave no first token
    request.guide = guide
    return b""


def _shares_biases(request: Request) -> bool:
    """Whether the leader has the same logit_bias object, which was checked and sorted with it."""
    return request.leader is not None and request.leader.params.logit_bias is request.params.logit_bias


def _biases(request: Request) -> tuple[tuple[int, float], ...]:
    if request.leader is not None and _shares_biases(request):
        return request.leader.row_params.biases
    return tuple(sorted(request.params.logit_bias.items())) if request.params.logit_bias else ()


def _shared_bans(request: Request) -> Bans | None:
    """Return the leader's bans if they are the same as the request's."""
    leader, params = request.leader, request.params
    if leader is None or leader.bad_words is not request.bad_words:
        return None
    names = ("allowed_token_ids", "stop_token_ids", "min_tokens")
    same = all(getattr(leader.params, name) is getattr(params, name) for name in names)
    return leader.bans if same else None


def _bans(request: Request, early_stops: frozenset[int], config: SchedulerConfig) -> Bans:
    """Return the request's excluded tokens. Raises LlmcError E601 if they leave none."""
    ids, max_id = request.params.allowed_token_ids, config.vocab_size - 1
    if isinstance(ids, TokenMask):
        fits = len(ids.mask) == mask_size(config.vocab_size)
    else:
        fits = not ids or max(ids) <= max_id
    if not fits:
        raise refused("allowed_token_ids", ids, f"ids of the vocabulary, 0 to {max_id}")
    if any(not word or min(word) < 0 or max(word) > max_id for word in request.bad_words):
        raise refused("bad_words", request.params.bad_words, f"words that are tokens of the vocabulary, 0 to {max_id}")
    needed = without_ids(mask_of(None, config.vocab_size), early_stops)
    allowed = ids.mask if isinstance(ids, TokenMask) else mask_of(ids, config.vocab_size)
    bans = Bans(allowed, request.bad_words, needed, allows_all=ids is None)
    if bans.leave_none:
        raise refused("allowed_token_ids", ids, "at least one id that neither bad_words nor min_tokens excludes")
    return bans


def _check_prompt(prompt: object, config: SchedulerConfig, checked: bool) -> None:
    """Raise LlmcError E601, E602 or E606 unless the prompt is token ids that fit. checked: the ids were."""
    if not isinstance(prompt, list | tuple | array) or not (checked or set(map(type, prompt)) <= {int}):
        raise refused("prompt_token_ids", prompt, "a list of token ids, each an int")
    if not checked:
        check_token_ids(prompt, config.vocab_size)
    max_prompt = config.max_model_len - (config.pooling is None)
    if len(prompt) > max_prompt:
        raise LlmcError(
            "E602",
            f"the prompt is {len(prompt)} tokens, the model was compiled for {config.max_model_len}"
            f"{' with output' if config.pooling is None else ''}",
            f"shorten the prompt to {max_prompt} tokens, or compile with a larger --max-model-len",
        )


def check_token_ids(prompt: Sequence[int], vocab_size: int) -> None:
    """Raise LlmcError E605 for an empty prompt, E606 for a token id that the vocabulary lacks."""
    if not prompt:
        raise LlmcError(
            "E605", "the prompt has no tokens", "pass at least one token, for example the model's BOS token"
        )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        raise LlmcError(
            "E606",
            f"the prompt contains token id {low if low < 0 else high}; valid ids are 0 to {vocab_size - 1}",
            "use the artifact's own tokenizer, and no special tokens that the model lacks",
        )


def _check_stops(request: Request, config: SchedulerConfig) -> None:
    """Raise LlmcError E601 if stop_token_ids are outside of the vocabulary, or too many for min_tokens."""
    params, max_id = request.params, config.vocab_size - 1
    ids = tuple(params.stop_token_ids or ())
    if ids and max(ids) > max_id:
        raise refused("stop_token_ids", list(ids), f"ids of the vocabulary, 0 to {max_id}")
    if params.min_tokens and len({*ids, *config.eos_token_ids}) > STOPS:
        room = STOPS - len(set(config.eos_token_ids))
        raise refused("stop_token_ids", list(ids), f"with min_tokens, up to {room} ids besides the model's own")


def _max_length(num_prompt: int, max_tokens: int | None, config: SchedulerConfig) -> int:
    """Return the maximum number of tokens of a request, including its prompt. Raises LlmcError E603 or E604."""
    model_limit = config.max_model_len + (config.pooling is not None)
    pool_limit = config.pool_tokens + 1  # the last token needs no KV
    limit = min(model_limit, pool_limit) if max_tokens is None else num_prompt + max_tokens
    if limit > model_limit:
        raise LlmcError(
            "E603",
            f"prompt ({num_prompt} tokens) and max_tokens ({max_tokens}) make {limit}, "
            f"the model was compiled for {model_limit}",
            f"use max_tokens of at most {model_limit - num_prompt}, or none for all that fits",
        )
    if max(limit, num_prompt + 1) > pool_limit:
        tokens = max(limit, num_prompt + 1) - 1
        raise LlmcError(
            "E604",
            f"the request needs {config.pages_for(tokens)} KV pages ({tokens} tokens), "
            f"the pool has {config.num_pages} ({config.pool_tokens} tokens)",
            "use a shorter prompt, a smaller max_tokens, or a larger KV cache",
        )
    return limit
