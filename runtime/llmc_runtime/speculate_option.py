"""The option --speculate: how tokens are drafted, as METHOD[:K] or as the JSON of vLLM's --speculative-config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import DRAFT_MODEL, EAGLE, MTP, is_artifact
from llmc_runtime.format.row_abi import MAX_DRAFTS
from llmc_runtime.option_type import malformed, not_allowed
from llmc_runtime.sched import draft_methods

NGRAM, OFF = "ngram", "off"
SHORT: Mapping[str, str] = MappingProxyType({"draft": DRAFT_MODEL, "eagle": EAGLE})  # names of METHOD[:K] that differ
LOOKUPS = (NGRAM, f"[{NGRAM}]", "ngram_gpu")  # vLLM's names of prompt lookup, as a method or as a model
TOKENS, LOW, HIGH = "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"
MODEL, RANKS = "model", "draft_tensor_parallel_size"
SUFFIX = ".llmc"  # suffix of an artifact's folder
DEFAULTS: Mapping[str, int] = MappingProxyType({LOW: 3, HIGH: 5})  # lengths of suffixes in tokens
# The keys of vLLM's JSON by method; those that draft on the host have no options but the number of tokens.
KEYS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        NGRAM: ("method", TOKENS, LOW, HIGH),
        **dict.fromkeys((DRAFT_MODEL, EAGLE, MTP), ("method", MODEL, TOKENS, RANKS)),
    }
)
_COMPILED = "the draft model or head was compiled into the artifact by llmc compile --draft"
_SUFFIXES = "suffix matching has no options"
_SAMPLING = "drafts never change the distribution of the output, and there is no other way to accept them"
# What to know instead of the other keys of vLLM's JSON, none of which is supported.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "quantization", "revision", "code_revision", "max_model_len", "draft_load_config", "enforce_eager",
                "attention_backend", "moe_backend", "tensor_parallel_size", "kv_cache_dtype",
                "index_share_for_mtp_iteration", "use_local_argmax_reduction", "use_heterogeneous_vocab",
                "target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config",
            ),
            _COMPILED,
        ),
        **dict.fromkeys(
            (
                "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
                "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
            ),
            _SUFFIXES,
        ),
        **dict.fromkeys(
            (
                "rejection_sample_method", "draft_sample_method", "acceptance_method", "synthetic_acceptance_rate",
                "synthetic_acceptance_rates", "synthetic_acceptance_length", "posterior_threshold", "posterior_alpha",
                "typical_acceptance_sampler_posterior_threshold", "typical_acceptance_sampler_posterior_alpha",
            ),
            _SAMPLING,
        ),
        **dict.fromkeys(
            (
                "disable_by_batch_size", "speculative_disable_by_batch_size", "num_speculative_tokens_per_batch_size",
                "enable_adaptive_verification",
            ),
            "the number of drafts follows from measured step times, down to 0",
        ),
        **dict.fromkeys(
            ("disable_logprobs", "disable_mqa_scorer"),
            "verification uses the log-probabilities and kernels of ordinary steps",
        ),
        "disable_eagle_block_drop": "the last page of a cached prefix is never dropped",
        "dspark_draft_topk": "there is no DSpark",
        "disable_padded_drafter_batch": "drafts are not padded",
        "parallel_drafting": "tokens are drafted one after another",
        "speculative_token_tree": "drafts are a sequence, not a tree",
    }
)  # fmt: skip
_NO_TREES = "heads that draft several tokens at once are not supported; train or download an EAGLE-3 head"
# vLLM's other methods, and why they are not supported.
REFUSED_METHODS: Mapping[str, str] = MappingProxyType(
    {
        "eagle": "this is the first version of EAGLE; EAGLE-3 is eagle3",
        **dict.fromkeys(("medusa", "mlp_speculator", "dflash", "dspark"), _NO_TREES),
        "extract_hidden_states": "it drafts nothing",
        "custom_class": "a package registers its method under a name, which is used here (docs/howto-runtime.md)",
    }
)
DEFAULT_DRAFTS = 4  # tokens drafted if the number is not given and the model is compiled for it
_MAX_DIGITS = 32  # maximum digits of a number of drafts; int() refuses very long ones
_MAX_NGRAM = 64
_MAX_RANKS = 1 << 10
_REMEDY = (
    f"use {NGRAM}, {', '.join(draft_methods.OURS)}, draft, eagle or mtp, with :K for K drafted tokens, or JSON such as"
    f' {{"method": "{NGRAM}", "{TOKENS}": 4}}'
)


def parse_speculate(text: str) -> Any:
    """Parse a flag's text: METHOD[:K], or a JSON object. Raises argparse.ArgumentTypeError for malformed JSON."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise malformed(f"{text[:60]!r} is not a JSON object; {_REMEDY}") from None


def check_speculate(name: str, value: Any) -> dict[str, Any] | None:
    """Return the option as a dict of vLLM's keys; only the number of tokens and the draft model may be missing. None if
    it is off.

    Raises LlmcError E206 for a method or a key of vLLM's that is not supported, and E201 for other values that are not
    allowed.
    """
    if value is None or value == OFF:
        return None
    mapping = _of_text(name, value) if isinstance(value, str) else value
    if not isinstance(mapping, Mapping):
        raise not_allowed(name, value, _REMEDY)
    mapping = {k: v for k, v in mapping.items() if v is not None and not (v is False and k in REFUSED)}  # defaults
    _check_model(name, mapping)
    method = _method_of(mapping)
    if method == NGRAM and mapping.get(MODEL) in LOOKUPS:
        mapping = {key: value for key, value in mapping.items() if key != MODEL}
    if not isinstance(method, str) or (method not in KEYS and not drafts_on_host(method)):
        raise _unsupported_method(name, method)
    _check_keys(name, method, mapping)
    checked: dict[str, Any] = {"method": method, TOKENS: _count(name, mapping, TOKENS, None, MAX_DRAFTS)}
    if method == NGRAM:
        low = _count(name, mapping, LOW, None, _MAX_NGRAM)
        checked[HIGH] = _count(name, mapping, HIGH, low or DEFAULTS[HIGH], _MAX_NGRAM)
        checked[LOW] = _count(name, mapping, LOW, min(checked[HIGH], DEFAULTS[LOW]), checked[HIGH])
    elif MODEL in mapping:
        checked[MODEL] = mapping[MODEL]  # the number of ranks is the artifact's
    return checked


def with_draft_model(speculate: Any, draft: Any) -> tuple[Any, Any]:
    """Return the options `speculate` and `draft_model` with what each says about the other.

    A draft model implies its method, unless speculation is off. The JSON of this method may name the artifact of the
    draft model. Raises LlmcError E206 if both name different ones, or the method is another.
    """
    if speculate == OFF:
        return None, None
    if isinstance(speculate, Mapping) and (named := _artifact_of(speculate)):
        if draft and Path(named) != Path(draft):
            cause = f"draft_model is {draft}, and the {MODEL} of speculate is {named}"
            raise LlmcError("E206", cause, "leave one of them out")
        speculate, draft = {key: value for key, value in speculate.items() if key != MODEL}, named
        speculate |= {"method": DRAFT_MODEL}
    if not draft:
        return speculate, draft
    checked = check_speculate("speculate", speculate or "draft")
    if checked is not None and checked["method"] != DRAFT_MODEL:
        cause = f"draft_model is given, and speculate requests the method {checked['method']}"
        raise LlmcError("E206", cause, "use --speculate draft, or leave one of them out")
    return checked, draft


def _artifact_of(mapping: Mapping[str, Any]) -> str | None:
    """Return the path of the draft model's artifact, if the JSON names one."""
    model = mapping.get(MODEL)
    if not isinstance(model, str) or _method_of(mapping) != DRAFT_MODEL:
        return None
    return model if model.endswith(SUFFIX) or is_artifact(Path(model)) else None


def draft_option(speculate: Mapping[str, Any]) -> str | None:
    """Return the option --draft of `llmc compile` for a model that is compiled to be used with this normal form."""
    method, model = speculate["method"], speculate.get(MODEL)
    if method == MTP:
        return MTP  # the layer is part of the model's checkpoint
    if model is None or method not in (DRAFT_MODEL, EAGLE):
        return None
    return f"eagle:{model.removeprefix('eagle:')}" if method == EAGLE else str(model)


def _unsupported_method(name: str, method: Any) -> LlmcError:
    why = REFUSED_METHODS.get(method) if isinstance(method, str) else None
    cause = f"{name}: the method {method!r:.40} is not supported{f': {why}' if why else ''}"
    remedy = (
        f"use {NGRAM}, {', '.join(draft_methods.OURS)}, {DRAFT_MODEL} with an artifact compiled with --draft "
        f"MODEL, {EAGLE} or {MTP} with one compiled with --draft eagle:PATH or {MTP}, install the package that "
        f"offers the method, or start without {name}"
    )
    return LlmcError("E206", cause, remedy)


def _check_keys(name: str, method: str, mapping: Mapping[str, Any]) -> None:
    """Raise LlmcError E206 for a key of vLLM's that this method does not support, E201 for another unknown key."""
    keys = KEYS.get(method, ("method", TOKENS))
    unknown = min(map(str, mapping.keys() - set(keys)), default=None)
    if unknown is None:
        return
    if unknown in REFUSED:
        cause = f"{name}: {unknown} is not supported: {REFUSED[unknown]}"
        raise LlmcError("E206", cause, f"leave it out; {method} has the keys {', '.join(keys)}")
    raise LlmcError("E201", f"{name} has the unknown key {unknown!r:.40}", f"use {', '.join(keys)}")


def _check_model(name: str, mapping: Mapping[str, Any]) -> None:
    """Raise LlmcError E201 if the model is not a text, or its number of ranks is not a number."""
    model = mapping.get(MODEL)
    if model is not None and not isinstance(model, str):
        cause = f"{name}: {MODEL} = {model!r:.40} is not allowed"
        raise LlmcError("E201", cause, f"use a text, or leave it out: {_COMPILED}")
    _count(name, mapping, RANKS, None, _MAX_RANKS)


def _method_of(mapping: Mapping[str, Any]) -> Any:
    """Return the method; if there is none, the one that vLLM infers from the model's name."""
    method = mapping.get("method")
    if method is None:
        model = str(mapping.get(MODEL) or NGRAM)
        method = model if model in LOOKUPS else _kind_of(model.lower())
    if not isinstance(method, str) or drafts_on_host(method):
        return method
    if method in LOOKUPS:
        return NGRAM
    return MTP if method.endswith(f"_{MTP}") else method  # vLLM's deepseek_mtp, glm4_moe_mtp and others


def _kind_of(model: str) -> str:
    """Return the method that drafts with a model of this name, in lower case."""
    if EAGLE in model:
        return EAGLE
    return "eagle" if "eagle-" in model else DRAFT_MODEL  # "eagle": the first version of EAGLE, which is not supported


def drafts_on_host(method: str) -> bool:
    """Whether this is the name of a method that drafts on the host, ours or that of an installed package."""
    return method in draft_methods.OURS or draft_methods.is_offered(method)


def _of_text(name: str, text: str) -> dict[str, Any]:
    method, colon, number = text.partition(":")
    if colon and not (number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS):
        raise not_allowed(name, text, _REMEDY)
    return {"method": SHORT.get(method, method), **({TOKENS: int(number)} if colon else {})}


def _count(name: str, mapping: Mapping[str, Any], key: str, default: int | None, high: int) -> int | None:
    value = mapping.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise LlmcError("E201", f"{name}: {key} = {value!r:.40} is not allowed", f"use a whole number, 1 to {high}")
    return value
