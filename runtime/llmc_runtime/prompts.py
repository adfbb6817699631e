"""Converts the prompts, parameters and priorities of API calls to one form, and checks their types.

Lengths are checked by the scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.text.tokenizer import Tokenizer

_FORMS = 'pass a string, a list of token ids, {"prompt": TEXT} or {"prompt_token_ids": IDS}, or a list of these'


_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt", "type"})  # keys of a prompt given as a dict


class TextPrompt(TypedDict):
    """A prompt of text. `cache_salt` has no effect on results: one LLM is one user."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids, and the text that they stand for, if it is known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text that they were made from, if any."""

    ids: Sequence[int]
    text: str | None = None

    def packed(self) -> Prompt:
        """Return the prompt with its ids in an array of 4 bytes each; as objects in a list they take 40."""
        return self if isinstance(self.ids, array) else Prompt(array("I", self.ids), self.text)


def require_tokenizer(tokenizer: Tokenizer | None, consequence: str = "") -> Tokenizer:
    """Return the tokenizer. Raises LlmcError E620, whose cause ends with `consequence`, if the artifact has none."""
    if tokenizer is None:
        remedy = "pass token ids, or put a tokenizer.json into the model folder and compile again"
        raise LlmcError("E620", f"the artifact has no tokenizer.json{consequence}", remedy)
    return tokenizer


def as_prompts(prompts: Any, tokenizer: Tokenizer | None) -> list[Prompt]:
    """Return one or several prompts as a list. An array is treated as its lists.

    Raises LlmcError E620 (text without a tokenizer), E621 (text that cannot be tokenized), E625 (another type).
    """
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if _is_single(prompts):
        return [as_prompt(prompts, tokenizer)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | range):
        raise LlmcError("E625", f"prompts has the type {type(prompts).__name__}", _FORMS)
    out: list[Prompt] = []
    try:
        if tokenizer is not None and all(isinstance(prompt, str) for prompt in prompts):
            for text, ids in zip(prompts, tokenizer.encode_all(prompts)):
                out.append(Prompt(ids, text))
        else:
            for prompt in prompts:
                out.append(as_prompt(prompt, tokenizer))
    except LlmcError as e:
        raise numbered(e, len(out), len(prompts)) from e
    return out


def as_prompt(prompt: Any, tokenizer: Tokenizer | None) -> Prompt:
    """Return one prompt. Text is encoded with the tokenizer's special tokens. Raises LlmcError E620, E621, E625."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, Mapping):
        _check_keys(prompt)
        ids = prompt.get("prompt_token_ids")
        if _is_array(ids):
            return Prompt(_ids(ids), prompt.get("prompt"))
        prompt = prompt.get("prompt")
    if isinstance(prompt, str):
        tokenizer = require_tokenizer(tokenizer, ", so prompts must be token ids")
        return Prompt(tokenizer.encode(prompt), prompt)
    if _is_array(prompt):
        return Prompt(_ids(prompt))
    raise LlmcError("E625", f"a prompt has the type {type(prompt).__name__}", _FORMS)


def _check_keys(prompt: Mapping[str, Any]) -> None:
    """Raise LlmcError E625 if a prompt has other keys than text, ids and a cache_salt, and a value for one of them."""
    for name, value in prompt.items():
        if name not in _KEYS and value is not None and not (isinstance(value, Mapping) and not value):
            raise LlmcError("E625", f"a prompt has {str(name)[:60]!r}: prompts are text or token ids", _FORMS)


def _is_array(value: Any) -> bool:
    return isinstance(value, list | tuple) or hasattr(value, "tolist")


def _ids(array: Any) -> list[int]:
    values = array.tolist() if hasattr(array, "tolist") else list(array)
    if not isinstance(values, list):
        values = [values]
    if set(map(type, values)) <= {int}:
        return values
    bad = [v for v in values if not isinstance(v, Integral) or isinstance(v, bool)]
    if bad:
        raise LlmcError("E625", f"a prompt has the token id {bad[0]!r:.60}", "pass whole numbers only")
    return [int(v) for v in values]


def _is_single(prompts: Any) -> bool:
    """Whether this is a text, a dict, or a list of ids. An empty list is an empty list of prompts."""
    if isinstance(prompts, str | Mapping | Prompt):
        return True
    return (
        isinstance(prompts, list | tuple)
        and bool(prompts)
        and all(issubclass(t, Integral) for t in {*map(type, prompts)})
    )


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """Return the parameters of `count` prompts; `params` is one for all, or one for each. Raises LlmcError E625."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise LlmcError("E625", "sampling_params is neither SamplingParams nor a list of them", "pass SamplingParams")
    if len(params) != count:
        raise LlmcError("E625", f"{count} prompts, but {len(params)} sampling_params", "pass one for all, or one each")
    return list(params)


def as_priorities(priorities: Any, count: int) -> list[int]:
    """Return the priorities of `count` prompts; None means 0 for all. Raises LlmcError E625."""
    if priorities is None:
        return [0] * count
    if not isinstance(priorities, Iterable) or isinstance(priorities, str | Mapping):
        cause = f"priority is a {type(priorities).__name__}"
        raise LlmcError("E625", cause, "pass a list of whole numbers, one for each prompt")
    values = [int(v) if isinstance(v, Integral) and not isinstance(v, bool) else v for v in priorities]
    if len(values) != count:
        raise LlmcError("E625", f"{count} prompts, but {len(values)} priorities", "pass one each")
    return values


def fitted(params: SamplingParams, max_output: int) -> SamplingParams:
    """Reduce a default max_tokens to `max_output` tokens. If that is not positive, the parameters stay as they are,
    and the scheduler raises the error."""
    if params.max_tokens is None or not 0 < max_output < params.max_tokens:
        return params
    return params.changed(max_tokens=max_output, min_tokens=min(params.min_tokens, max_output))


def numbered(error: LlmcError, index: int, count: int) -> LlmcError:
    """Return the error with the number of the prompt that it is about."""
    if count == 1:
        return error
    return LlmcError(error.code, f"prompt {index} of {count}: {error.cause}", error.remedy, error.param)


def refuse_tokenization(tokenization_kwargs: Any) -> None:
    """Raise LlmcError E648 unless `tokenization_kwargs` is None or empty."""
    if tokenization_kwargs:
        cause = f"tokenization_kwargs={tokenization_kwargs!r:.60} is not supported"
        raise LlmcError("E648", cause, 'pass token ids: {"prompt_token_ids": IDS}')


def template_variables(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a chat template among vLLM's keywords of LLM.chat, those in chat_template_kwargs
    included. Raises LlmcError E648 for keywords with an effect that is not supported.
    """
    variables = {**template}
    refuse_tokenization(variables.pop("tokenization_kwargs", None))
    form = variables.pop("chat_template_content_format", "auto")
    if form not in ("auto", "string"):
        cause = f"chat_template_content_format={form!r:.60} is not supported"
        raise LlmcError("E648", cause, "leave it out: content is text")
    if value := variables.pop("mm_processor_kwargs", None):
        raise LlmcError("E648", f"mm_processor_kwargs={value!r:.60} is not supported", "leave it out: prompts are text")
    return variables | dict(variables.pop("chat_template_kwargs", None) or {})


def refuse_adapter(lora_request: Any) -> None:
    """Raise LlmcError E648 unless `lora_request` is None."""
    if lora_request is not None:
        cause = "lora_request: adapters are not supported"
        raise LlmcError("E648", cause, "merge the adapter into the weights, and compile")
