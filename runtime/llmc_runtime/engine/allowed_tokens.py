"""allowed_token_ids as a mask, made with numpy in this process: the engine's thread would take 15 ms for 65,536 ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.sampling_params import MAX_ALLOWED, SamplingParams
from llmc_runtime.sched.token_guide import mask_size
from llmc_runtime.sched.token_mask import TokenMask


def token_mask(ids: Sequence[int], vocab_size: int) -> TokenMask:
    """The mask of 1 to MAX_ALLOWED ids of the vocabulary. LlmcError E601 for others."""
    try:
        found = np.frombuffer(array("I", ids if len(ids) <= MAX_ALLOWED else ()), np.uint32)
    except (OverflowError, TypeError):
        found = np.empty(0, np.uint32)
    if not len(found) or found.max() >= vocab_size:
        cause = f"allowed_token_ids has {len(ids)} ids, or one that is not in the vocabulary"
        remedy = f"allowed_token_ids: 1 to {MAX_ALLOWED} ids of the vocabulary, 0 to {vocab_size - 1}"
        raise LlmcError("E601", cause, remedy)
    flags = np.zeros(8 * mask_size(vocab_size), np.bool_)
    flags[found] = True
    return TokenMask(np.packbits(flags, bitorder="little").tobytes())


def masked(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """The parameters with their allowed_token_ids as a mask; the same where there are none. LlmcError E601."""
    ids = params.allowed_token_ids
    if not isinstance(ids, tuple):
        return params
    return params.changed(allowed_token_ids=token_mask(ids, vocab_size))
