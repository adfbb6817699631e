"""What a program may hand over as prompts and parameters, brought into one form; it checks types, never lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.text.tokenizer import Tokenizer

TOKENIZE = "pass token ids, or put a tokenizer.json into the model folder and compile again"
_FORMS = 'pass a string, a list of token ids, {"prompt": TEXT} or {"prompt_token_ids": IDS}, or a list of these'


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text they came from where there was one."""

    ids: list[int]
    text: str | None = None


def as_prompts(given: Any, tokenizer: Tokenizer | None) -> list[Prompt]:
    """One or several prompts as a list; an array means what its lists mean. LlmcError E620 (text without a tokenizer),
    E621, E625 (none of the forms)."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    if _is_one(given):
        return [as_prompt(given, tokenizer)]
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray | range):
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
    if isinstance(given, Prompt):
        return given
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
    if not isinstance(values, list):
        values = [values]
    if all(type(v) is int for v in values):
        return values
    bad = [v for v in values if not isinstance(v, Integral) or isinstance(v, bool)]
    if bad:
        raise LlmcError("E625", f"a prompt has {bad[0]!r:.60} among its token ids", "pass whole numbers only")
    return [int(v) for v in values]


def _is_one(given: Any) -> bool:
    """A text, a dict, or a list of ids (an empty list is no prompts)."""
    if isinstance(given, str | Mapping | Prompt):
        return True
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(v, Integral) for v in given)


def as_params(given: Any, count: int) -> list[SamplingParams]:
    """Sampling parameters for `count` prompts: one for all, or one each."""
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(p, SamplingParams) for p in given):
        raise LlmcError("E625", "sampling_params is neither SamplingParams nor a list of them", "pass SamplingParams")
    if len(given) != count:
        raise LlmcError("E625", f"{count} prompts, but {len(given)} sampling_params", "pass one for all, or one each")
    return list(given)


def as_priorities(given: Any, count: int) -> list[int]:
    """Priorities of `count` prompts: None (all the same), or one each."""
    if given is None:
        return [0] * count
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        raise LlmcError("E625", f"priority is a {type(given).__name__}", "pass a list of whole numbers, one a prompt")
    values = [int(v) if isinstance(v, Integral) and not isinstance(v, bool) else v for v in given]
    if len(values) != count:
        raise LlmcError("E625", f"{count} prompts, but {len(values)} priorities", "pass one each")
    return values


def fitted(params: SamplingParams, room: int) -> SamplingParams:
    """Reduce a default max_tokens to the `room` for output, in tokens. Without room the parameters stay as they are,
    and the scheduler's error says what does not fit."""
    if params.max_tokens is None or not 0 < room < params.max_tokens:
        return params
    return params.changed(max_tokens=room, min_tokens=min(params.min_tokens, room))


def numbered(error: LlmcError, index: int, count: int) -> LlmcError:
    """The same error, saying which of several prompts it is about."""
    if count == 1:
        return error
    return LlmcError(error.code, f"prompt {index} of {count}: {error.cause}", error.remedy)
