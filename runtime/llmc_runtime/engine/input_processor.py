"""Checks a request and prepares it for an engine. LLM and AsyncLLM call it in the process of the caller.

In: a tokenized prompt, sampling parameters and the token ids of bad words. Out: an EngineRequest, which goes to an
engine in the same process (LLM), or as a message to the engine process (AsyncLLM).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.parameter_type import refused
from llmc_runtime.sched.request_init import check_token_ids
from llmc_runtime.sched.sampling_params import MAX_ALLOWED, SamplingParams
from llmc_runtime.sched.token_guide import TokenMask, mask_size
from llmc_runtime.text.tokenizer import Tokenizer

_MAX_SEED = (1 << 64) - 1


@dataclass(slots=True)
class EngineRequest:
    """A request as engines take it.

    first:       number of its first output; the others follow. OutputProcessor assigns it
    params:      allowed_token_ids is a TokenMask or None
    priority:    smaller runs first under the scheduling policy "priority"
    cache_salt:  prefixes are shared among requests with the same salt only
    bad_words:   token ids of `params.bad_words`
    tenant:      tenants get equal service when capacity is short
    uncached:    prompt tokens that its engine is expected to compute, if there are several engines (see Instances)
    """

    first: int
    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    bad_words: list[list[int]] = field(default_factory=list)
    tenant: str = ""
    uncached: int = 0

    @property
    def numbers(self) -> range:
        """The numbers of its outputs."""
        return range(self.first, self.first + self.params.n)


def prepare(
    prompt: Prompt,
    params: SamplingParams,
    bad_words: list[list[int]],
    vocab_size: int,
    *,
    priority: int = 0,
    cache_salt: str = "",
    tenant: str = "",
) -> EngineRequest:
    """Make the request for an engine. `bad_words` are the result of `bad_word_tokens`.

    Raises LlmcError E601 for a field that is not allowed, E605 for an empty prompt, E606 for a token id that the
    vocabulary lacks. The scheduler checks everything that depends on the model's limits (see init_request).
    """
    if not are_ids(prompt.ids, vocab_size):
        check_token_ids(prompt.ids, vocab_size)  # raises the error
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise refused("priority", priority, "an integer; smaller runs first")
    for name, value in (("cache_salt", cache_salt), ("tenant", tenant)):
        if not isinstance(value, str):
            raise refused(name, value, "a string; the empty string for none")
    return EngineRequest(-1, prompt, with_mask(params, vocab_size), priority, cache_salt, bad_words, tenant)


def are_ids(prompt: Sequence[int], vocab_size: int) -> bool:
    """Whether a prompt, integers only, has token ids, all in the vocabulary.

    It takes 0.7 ms for 100,000 ids; `check_token_ids` takes 3 ms.
    """
    import numpy as np  # see open_model: a module of LLM does not import it

    try:
        ids = np.frombuffer(array("I", prompt), np.uint32)
    except (OverflowError, TypeError, ValueError):
        return False
    return len(ids) > 0 and int(ids.max()) < vocab_size


def token_mask(ids: Sequence[int], vocab_size: int) -> TokenMask:
    """Return the mask of 1 to MAX_ALLOWED token ids. Raises LlmcError E601 for others.

    It is made here with numpy, since the engine's thread would need 15 ms for 65,536 ids.
    """
    import numpy as np

    try:
        allowed = np.frombuffer(array("I", ids if len(ids) <= MAX_ALLOWED else ()), np.uint32)
    except (OverflowError, TypeError):
        allowed = np.empty(0, np.uint32)
    if not len(allowed) or allowed.max() >= vocab_size:
        cause = f"allowed_token_ids has {len(ids)} ids, or one that is not in the vocabulary"
        remedy = f"allowed_token_ids: 1 to {MAX_ALLOWED} ids of the vocabulary, 0 to {vocab_size - 1}"
        raise LlmcError("E601", cause, remedy, "allowed_token_ids")
    flags = np.zeros(8 * mask_size(vocab_size), np.bool_)
    flags[allowed] = True
    return TokenMask(np.packbits(flags, bitorder="little").tobytes())


def with_mask(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return the parameters with allowed_token_ids as a mask, or `params` itself. Raises LlmcError E601."""
    ids = params.allowed_token_ids
    if not isinstance(ids, tuple):
        return params
    return params.changed(allowed_token_ids=token_mask(ids, vocab_size))


def bad_word_tokens(params: SamplingParams, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the token ids of bad_words. Raises LlmcError E620 if the request needs a tokenizer and there is none."""
    for name, value in (("stop strings", params.stop), ("bad_words", params.bad_words)):
        if value and tokenizer is None:
            remedy = "use stop_token_ids, allowed_token_ids or logit_bias"
            raise LlmcError("E620", f"{name} need the tokenizer, which the artifact lacks", remedy)
    return bad_word_ids(tokenizer, params.bad_words or ()) if tokenizer else []


def params_of_output(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of one of n outputs: its seed is seed + index, as in vLLM; the first scores the prompt."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else params.seed + index & _MAX_SEED
    return params.changed(n=1, seed=seed, prompt_logprobs=None if index else params.prompt_logprobs)


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Return the token sequences of bad words; the last id of a sequence must not be generated after the ids before it.

    Each word yields its ids, and its ids after a space if they are equally many and differ in the first one.
    """
    out: list[list[int]] = []
    texts = [lead + word.lstrip() for word in words for lead in ("", " ")]
    encoded = tokenizer.encode_all(texts, add_special_tokens=False)  # one call: each of many would take the GIL
    for bare, spaced in zip(encoded, encoded):
        out.append(bare)
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            out.append(spaced)
    return out
