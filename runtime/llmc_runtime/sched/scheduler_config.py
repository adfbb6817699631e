"""SchedulerConfig: the limits of model and KV cache, and `admit`, which refuses requests that exceed them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.format.row_abi import STOPS
from llmc_runtime.sched.packed_logprobs import PackedLogprobs
from llmc_runtime.sched.parameter_type import refused
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.sched.step import RowParams
from llmc_runtime.sched.token_guide import Banned, Bans, TokenMask, both, empty, mask_of, mask_size, without_ids

# A policy returns a request's order in queues: smaller runs first, then earlier arrival.
POLICIES: Mapping[str, Callable[[Request], int]] = MappingProxyType(
    {"fcfs": lambda request: 0, "priority": lambda request: request.priority}
)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a scheduler. Raises LlmcError E201 for values that are not allowed.

    num_pages, page_size:    pages of the KV cache, and tokens in a page
    max_model_len:           maximum length of a sequence, in tokens
    max_num_seqs:            number of device rows
    max_num_batched_tokens:  maximum number of tokens in a step
    target_itl:              seconds that a step should take in which some requests decode and others compute their
                             prompts, see StepBudget; 0: such steps are as long as max_num_batched_tokens allows
    watermark:               share of the pages that admission leaves free while other requests run
    long_prefill_threshold:  maximum number of tokens of one request in a step; 0 for no limit
    context:                 the artifact's digest, part of the prefix cache's keys
    speculation:             how tokens are drafted; None: they are not
    max_num_logits:          maximum number of rows of logits in a step; 0: max_num_seqs
    max_masks:               number of masks that a device row has room for
    snapshots:               number of snapshots of the states of recurrent layers; None: the model has no such layers
    pooling:                 of a model that pools: requests end with their prompts, which may be as long as
                             max_model_len; None: it generates
    """

    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    policy: str = "fcfs"
    watermark: float = 0.01
    prefix_caching: bool = True
    long_prefill_threshold: int = 0
    context: str = ""
    speculation: SpeculationConfig | None = None
    max_num_logits: int = 0
    max_masks: int = 1
    pooling: Pooling | None = None
    target_itl: float = 0.0
    snapshots: int | None = None

    def __post_init__(self) -> None:
        sizes = "num_pages", "page_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "vocab_size"
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise LlmcError("E201", f"{name} = {value!r} is not allowed", f"set {name} to at least 1")
        if self.policy not in POLICIES:
            raise LlmcError("E201", f"unknown scheduling policy {self.policy!r}", f"use one of {', '.join(POLICIES)}")
        if not 0 <= self.watermark < 1 or self.long_prefill_threshold < 0:
            cause = f"watermark = {self.watermark}, long_prefill_threshold = {self.long_prefill_threshold}"
            raise LlmcError("E201", cause, "watermark is from 0 to below 1, long_prefill_threshold 0 or more")
        if self.whole_prompts and self.max_num_batched_tokens < self.max_model_len:
            cause = f"a prompt runs in one step, and max_num_batched_tokens = {self.max_num_batched_tokens}"
            raise LlmcError("E204", cause, f"set it to at least max_model_len = {self.max_model_len}, or lower that")

    @property
    def pool_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        return self.num_pages * self.page_size

    @property
    def reuses_prefixes(self) -> bool:
        """Whether the KV cache of common prefixes is reused."""
        return self.prefix_caching and self.snapshots != 0

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt runs in a single step, without cached prefixes."""
        return self.pooling is not None and self.pooling.whole

    @property
    def logits(self) -> int:
        """Maximum number of rows of logits in a step."""
        return max(self.max_num_seqs, self.max_num_logits)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages for this many tokens."""
        return -(-tokens // self.page_size)


def admit(request: Request, config: SchedulerConfig, seed: int) -> None:
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
        _check_prompt(prompt, config)
    _check_stops(request, config)
    limit = _limit(len(prompt), params.max_tokens, config)
    stops = frozenset(params.stop_token_ids or ())
    masked = stops.union(config.eos_token_ids) if params.min_tokens else frozenset()
    allowed = _restrict(request, masked, config)
    request.tokens = list(prompt)
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
        stops=tuple(sorted(masked)),
        biases=_biases(request),
        allowed=allowed,
        guided=0 if request.guide is None else config.max_masks,
    )
    speculation = config.speculation
    if speculation is not None and request.may_draft:
        request.row_params = replace(request.row_params, drafting=speculation.drafting)


def _restrict(request: Request, masked: frozenset[int], config: SchedulerConfig) -> bytes:
    """Return the mask for all tokens of the request, empty for none. If it depends on them, set a guide instead."""
    params, top = request.params, config.vocab_size - 1
    if params.logit_bias and not _same_biases(request) and max(params.logit_bias) > top:
        raise refused("logit_bias", params.logit_bias, f"ids of the vocabulary, 0 to {top}")
    if params.allowed_token_ids is None and not request.bad_words:
        return b""
    bans = request.bans = _shared(request) or _bans(request, masked, config)
    if request.guide is None and bans.fixed:
        return bans.mask
    guide = Banned(bans, request.guide)
    guide.mask()  # raises LlmcError if the bans leave no first token
    request.guide = guide
    return b""


def _same_biases(request: Request) -> bool:
    """Whether the leader has the same logit_bias, so that it is checked and sorted once for all outputs."""
    return request.leader is not None and request.leader.params.logit_bias is request.params.logit_bias


def _biases(request: Request) -> tuple[tuple[int, float], ...]:
    if request.leader is not None and _same_biases(request):
        return request.leader.row_params.biases
    return tuple(sorted(request.params.logit_bias.items())) if request.params.logit_bias else ()


def _shared(request: Request) -> Bans | None:
    """Return the leader's bans if they are the same as the request's."""
    leader, params = request.leader, request.params
    if leader is None or leader.bad_words is not request.bad_words:
        return None
    names = ("allowed_token_ids", "stop_token_ids", "min_tokens")
    same = all(getattr(leader.params, name) is getattr(params, name) for name in names)
    return leader.bans if same else None


def _bans(request: Request, masked: frozenset[int], config: SchedulerConfig) -> Bans:
    ids, top = request.params.allowed_token_ids, config.vocab_size - 1
    known = len(ids.mask) == mask_size(config.vocab_size) if isinstance(ids, TokenMask) else not ids or max(ids) <= top
    if not known:
        raise refused("allowed_token_ids", ids, f"ids of the vocabulary, 0 to {top}")
    if any(not word or min(word) < 0 or max(word) > top for word in request.bad_words):
        raise refused("bad_words", request.params.bad_words, f"words that are tokens of the vocabulary, 0 to {top}")
    needed = without_ids(mask_of(None, config.vocab_size), masked)
    allowed = ids.mask if isinstance(ids, TokenMask) else mask_of(ids, config.vocab_size)
    bans = Bans(allowed, request.bad_words, needed)
    if empty(both(bans.mask, needed)):
        raise refused("allowed_token_ids", ids, "at least one id that neither bad_words nor min_tokens excludes")
    return bans


def _check_prompt(prompt: object, config: SchedulerConfig) -> None:
    if not isinstance(prompt, list | tuple) or not set(map(type, prompt)) <= {int}:
        raise refused("prompt_token_ids", prompt, "a list of token ids, each an int")
    check_token_ids(prompt, config.vocab_size)
    longest = config.max_model_len - (config.pooling is None)
    if len(prompt) > longest:
        raise LlmcError(
            "E602",
            f"the prompt is {len(prompt)} tokens, the model was compiled for {config.max_model_len}"
            f"{' with output' if config.pooling is None else ''}",
            f"shorten the prompt to {longest} tokens, or compile with a larger --max-model-len",
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
    params, top = request.params, config.vocab_size - 1
    ids = tuple(params.stop_token_ids or ())
    if ids and max(ids) > top:
        raise refused("stop_token_ids", list(ids), f"ids of the vocabulary, 0 to {top}")
    if params.min_tokens and len({*ids, *config.eos_token_ids}) > STOPS:
        room = STOPS - len(set(config.eos_token_ids))
        raise refused("stop_token_ids", list(ids), f"with min_tokens, up to {room} ids besides the model's own")


def _limit(prompt: int, max_tokens: int | None, config: SchedulerConfig) -> int:
    """Return the maximum number of tokens of the request, including the prompt. The last token needs no KV."""
    model, pool = config.max_model_len + (config.pooling is not None), config.pool_tokens + 1
    limit = min(model, pool) if max_tokens is None else prompt + max_tokens
    if limit > model:
        raise LlmcError(
            "E603",
            f"prompt ({prompt} tokens) and max_tokens ({max_tokens}) make {limit}, the model was compiled for {model}",
            f"use max_tokens of at most {model - prompt}, or none for all that fits",
        )
    if max(limit, prompt + 1) > pool:
        tokens = max(limit, prompt + 1) - 1
        raise LlmcError(
            "E604",
            f"the request needs {config.pages_for(tokens)} KV pages ({tokens} tokens), "
            f"the pool has {config.num_pages} ({config.pool_tokens} tokens)",
            "use a shorter prompt, a smaller max_tokens, or a larger KV cache",
        )
    return limit
