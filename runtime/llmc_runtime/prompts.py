"""What a program may hand over as prompts and parameters, brought into one form; it checks types, never lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.params import SamplingParams
from llmc_runtime.text.tokenizer import Tokenizer

TOKENIZE = "pass token ids, or put a tokenizer.json into the model folder and compile again"
_FORMS = 'pass a string, a list of token ids, {"prompt": TEXT} or {"prompt_token_ids": IDS}, or a list of these'


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text they came from where there was one."""

    ids: list[int]
    text: str | None = None


def as_prompts(given: Any, tokenizer: Tokenizer | None) -> list[Prompt]:
    """One or several prompts as a list. LlmcError E620 (text without a tokenizer), E621, E625 (none of the forms)."""
    if _is_one(given):
        return [as_prompt(given, tokenizer)]
    if not isinstance(given, Sequence):
        raise LlmcError("E625", f"prompts is a {type(given).__name__}", _FORMS)
    out = []
    for i, one in enumerate(given):
        try:
            out.append(as_prompt(one, tokenizer))
        except LlmcError as e:
            raise numbered(e, i, len(given)) from e
    return out


def as_prompt(given: Any, tokenizer: Tokenizer | None) -> Prompt:
    """One prompt: text is encoded with the tokenizer's special tokens, ids are taken as they are."""
    if isinstance(given, Mapping):
        ids = given.get("prompt_token_ids")
        if _is_array(ids):
            return Prompt(_ids(ids), given.get("prompt"))
        given = given.get("prompt")
    if isinstance(given, str):
        if tokenizer is None:
            raise LlmcError("E620", "the artifact has no tokenizer.json, so it takes no text", TOKENIZE)
        return Prompt(tokenizer.encode(given), given)
    if _is_array(given):
        return Prompt(_ids(given))
    raise LlmcError("E625", f"a prompt is a {type(given).__name__}", _FORMS)


def _is_array(value: Any) -> bool:
    return isinstance(value, list | tuple) or hasattr(value, "tolist")


def _ids(given: Any) -> list[int]:
    values = given.tolist() if hasattr(given, "tolist") else list(given)
    if not isinstance(values, list) or not all(type(v) is int for v in values):
        bad = next((v for v in values if type(v) is not int), values) if isinstance(values, list) else values
        raise LlmcError("E625", f"a prompt has {bad!r:.60} among its token ids", "pass whole numbers only")
    return values


def _is_one(given: Any) -> bool:
    """A text, a dict, or a list of ids (an empty list is no prompts)."""
    if isinstance(given, str | Mapping) or hasattr(given, "tolist"):
        return True
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(v, int) for v in given)


def as_params(given: Any, count: int, default: Callable[[], SamplingParams]) -> list[SamplingParams]:
    """Sampling parameters for `count` prompts: None (the model's defaults), one for all, or one each."""
    if given is None:
        return [default()] * count
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(p, SamplingParams) for p in given):
        raise LlmcError("E625", "sampling_params is neither SamplingParams nor a list of them", "pass SamplingParams")
    if len(given) != count:
        raise LlmcError("E625", f"{count} prompts, but {len(given)} sampling_params", "pass one for all, or one each")
    return list(given)


def default_params(generation: Mapping[str, Any], *, max_tokens: int | None = 16) -> SamplingParams:
    """What a model's generation_config.json asks for, as transformers reads it: greedy unless it says do_sample.

    `max_tokens` stands where the file names no max_new_tokens. LlmcError E601 where a value makes no sense.
    """
    length = generation.get("max_new_tokens")
    params = SamplingParams(max_tokens=length if type(length) is int and length > 0 else max_tokens)
    if not generation.get("do_sample"):
        params = replace(params, temperature=0.0)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = generation.get(name)
        if value is None or (name != "repetition_penalty" and not generation.get("do_sample")):
            continue
        try:
            params = replace(params, **{name: value})
        except LlmcError as e:
            remedy = "pass sampling_params, or mend the file and compile again"
            raise LlmcError(e.code, f"generation_config.json: {e.cause}", remedy) from e
    return params


def numbered(error: LlmcError, index: int, count: int) -> LlmcError:
    """The same error, saying which of several prompts it is about."""
    if count == 1:
        return error
    return LlmcError(error.code, f"prompt {index} of {count}: {error.cause}", error.remedy)
