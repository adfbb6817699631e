"""Reads the sampling defaults of a generation_config.json, and names the keys of it that are not applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic

MAX_INTEGER = 1 << 53  # largest integer that every JSON parser represents exactly
# Sampling defaults that a request may override.
DEFAULTS = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens",
)  # fmt: skip
# Keys with which transformers generates other tokens, and their values without effect besides None. Others concern only
# transformers' own loop.
NOT_APPLIED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "num_beams": (1,), "num_beam_groups": (1,), "penalty_alpha": (0,), "guidance_scale": (1,), "typical_p": (1,),
        "top_h": (), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "no_repeat_ngram_size": (0,),
        "encoder_repetition_penalty": (1,), "exponential_decay_length_penalty": (), "bad_words_ids": ([],),
        "force_words_ids": ([],), "sequence_bias": ({}, []), "suppress_tokens": ([],), "begin_suppress_tokens": ([],),
        "forced_bos_token_id": (), "forced_eos_token_id": (), "stop_strings": ([], ""), "watermarking_config": ({},),
    }
)  # fmt: skip


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults by their names in generation_config.json; raises Diagnostic E302 if one is not a number."""
    defaults = {k: v for k in DEFAULTS if (v := generation.get(k)) is not None}
    for key, value in defaults.items():
        if not isinstance(value, int | float) or not -MAX_INTEGER < value < MAX_INTEGER:  # also rejects NaN
            shown = repr(value)[:40]
            raise Diagnostic("E302", f"generation_config.json: {key} is {shown}, not a number", "correct the file")
    return defaults


def generation_notes(generation: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note about the sampling defaults, and one about keys that are not applied, if there are some."""
    defaults = ", ".join(f"{k} {v}" for k, v in sampling_defaults(generation).items())
    if defaults:
        yield f"sampling defaults from generation_config.json: {defaults}; requests may override them"
    set_ = (k for k, neutral in NOT_APPLIED.items() if generation.get(k) not in (None, *neutral))
    if others := ", ".join(set_):
        yield f"generation_config.json has {others}: not applied, so transformers may generate other tokens"
