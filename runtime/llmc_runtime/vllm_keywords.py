"""Keywords of vLLM's classes that the classes of the same names lack: ignored if they change nothing, else refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.nearest import did_you_mean


class KeywordChecks(type):
    """A metaclass of dataclasses that pass keywords without a field to their class method `without_unknown`.

    It returns the other keywords, or raises an error.
    """

    if not TYPE_CHECKING:  # type checkers still report unknown keywords

        def __call__(cls, *args: Any, **values: Any) -> Any:
            if not values.keys() <= cls.__dataclass_fields__.keys():
                values = cls.without_unknown(values)
            return super().__call__(*args, **values)


# Keyword -> what to do instead, and the values without an effect besides None and False.
_BEAMS = "use n with temperature=1; beam search is not supported"
Elsewhere = Mapping[str, tuple[str, tuple[Any, ...]]]
OF_SAMPLING: Elsewhere = MappingProxyType({
    "best_of": ("use n", (1,)),
    "use_beam_search": (_BEAMS, ()), "early_stopping": (_BEAMS, ()), "length_penalty": (_BEAMS, (1.0,)),
    "logits_processors": ("use logit_bias, allowed_token_ids or bad_words", ([],)),
    "guided_decoding": ("use structured_outputs=StructuredOutputsParams(...)", ()),
    "truncate_prompt_tokens": ("shorten the prompt", ()),
    "spaces_between_special_tokens": ("the tokenizer decides", (True,)),
    "output_kind": ("pass output_kind to AsyncLLM.generate", (0,)),
    "extra_args": ("the engine has no extensions", ({},)),
    "flat_logprobs": ("log-probabilities are dicts", ()),
    "skip_reading_prefix_cache": ("use enable_prefix_caching=False, or reset_prefix_cache", ()),
    "thinking_token_budget": ("use max_tokens", ()), "repetition_detection": ("use repetition_penalty", ()),
    "logprob_token_ids": ("use logprobs", ()),
})  # fmt: skip
OF_STRUCTURED_OUTPUTS: Elsewhere = MappingProxyType({
    "disable_fallback": ("llguidance compiles all grammars", (True,)),
    "backend": ("llguidance compiles all grammars", ("auto", "guidance", "xgrammar")),
})  # fmt: skip


def known_keywords(cls: type, values: Mapping[str, Any], elsewhere: Elsewhere) -> dict[str, Any]:
    """Return the keywords that are fields of the class.

    Raises LlmcError E648 for one of `elsewhere` whose value has an effect, and TypeError for one of neither.
    """
    fields: Mapping[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    for name in values.keys() - fields.keys():
        if name not in elsewhere:
            near = did_you_mean(name, [*fields, *elsewhere], "")
            raise TypeError(f"{cls.__name__} has no parameter {name!r}" + (f"; {near}" if near else ""))
        value, (remedy, harmless) = values[name], elsewhere[name]
        if not any(
            type(value) is type(harmless_value) and value == harmless_value
            for harmless_value in (None, False, *harmless)
        ):
            raise LlmcError("E648", f"{cls.__name__}: {name}={value!r:.60} is not supported", remedy)
    return {name: value for name, value in values.items() if name in fields}
