"""SamplingParams: how a request is sampled and when it ends. Fields have vLLM's names.

Each parameter is declared here once (see `parameter`). Checks that need the model (ids against the vocabulary, lengths
against the context and the KV cache) happen when a request is submitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmc_runtime.format.row_abi import BIASES, STOPS, TOP_LOGPROBS
from llmc_runtime.sched.parameter_type import (
    biases,
    flag,
    instance,
    integers,
    numbers,
    parameter,
    parameters_of,
    refused,
    strings,
    token_ids,
    token_set,
)
from llmc_runtime.sched.structured_outputs import StructuredOutputsParams
from llmc_runtime.sched.token_guide import TokenMask
from llmc_runtime.vllm_keywords import OF_SAMPLING, KeywordChecks, known_keywords

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024  # maximum bytes per stop string
MAX_BIAS = 100.0
MAX_ALLOWED = 65536
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 16 << 10  # maximum bytes of all bad words together
MAX_N = 64
_GREEDY_BELOW, _MIN_TEMPERATURE = 1e-5, 0.01
_PENALTY = numbers(-2, 2)
_TOP_K = "-1 or 0 (off), or the number of likeliest ids to keep, 1 to 2147483647"
_LOGPROBS = integers(0, TOP_LOGPROBS, optional=True, unit="tokens")
_MAX_TOKENS = integers(1, optional=True, unit="tokens", allowed="none (to the end of the context), or at least 1")
_SEED = integers(-(2**63), 2**64 - 1, optional=True, allowed="none, or an integer of 64 bits")


@dataclass(frozen=True, slots=True)
class SamplingParams(metaclass=KeywordChecks):
    """The sampling parameters of a request. Raises LlmcError E601, which names the field, its value and what is
    allowed, and E648 for a parameter of vLLM that is not supported.

    Values are normalised: a temperature below 1e-5 is 0 (greedy: top_p, top_k and min_p are then off), any other is at
    least 0.01; a top_k of -1 is 0; a seed of -1 is None; a string in `stop` and other iterables become tuples.
    """

    n: int = parameter(
        1, integers(1, MAX_N, unit="outputs"), "number of outputs; must be 1 if greedy. Output i uses the seed + i"
    )
    temperature: float = parameter(
        1.0, numbers(0, 100), "sampling temperature, at least 0.01; 0 is greedy (top_p, top_k and min_p are then off)",
        flag=True, short="-t", model_default="sampling", float_column=0,
    )  # fmt: skip
    top_p: float = parameter(
        1.0, numbers(0, 1, above=True), "total probability of the most likely tokens to sample from; 1 is off",
        flag=True, model_default="sampling", float_column=1,
    )  # fmt: skip
    top_k: int = parameter(
        0, integers(-1, allowed=_TOP_K, unit="tokens"), "number of most likely tokens to sample from; 0 is off",
        flag=True, model_default="sampling", int_column=0,
    )  # fmt: skip
    min_p: float = parameter(
        0.0, numbers(0, 1), "minimum probability of a token, relative to the most likely one; 0 is off", flag=True,
        model_default="sampling", float_column=2,
    )  # fmt: skip
    repetition_penalty: float = parameter(
        1.0, numbers(0.001, 1000), "factor that reduces the logits of tokens in prompt and output; 1 is off", flag=True,
        model_default="always", float_column=3,
    )  # fmt: skip
    presence_penalty: float = parameter(
        0.0, _PENALTY, "value subtracted from the logits of tokens in the output; 0 is off", flag=True, float_column=4
    )
    frequency_penalty: float = parameter(
        0.0, _PENALTY, "value subtracted from a token's logit for each occurrence in the output; 0 is off", flag=True,
        float_column=5,
    )  # fmt: skip
    seed: int | None = parameter(
        None, _SEED, "seed of the request, for reproducible outputs; none or -1: random", flag=True
    )
    max_tokens: int | None = parameter(16, _MAX_TOKENS, "maximum number of tokens to generate", flag=True, short="-n")
    min_tokens: int = parameter(
        0, integers(0, unit="tokens"), "minimum number of tokens to generate, up to max_tokens", flag=True
    )
    stop: str | Iterable[str] | None = parameter(
        (), strings(MAX_STOP_STRINGS, MAX_STOP_BYTES, single=True),
        "strings that end the output, which does not contain them", flag=True, engine=False,
    )  # fmt: skip
    stop_token_ids: Iterable[int] | None = parameter((), token_ids(STOPS), "token ids at which the output ends")
    ignore_eos: bool = parameter(False, flag(), "continue after the model's end-of-sequence token", flag=True)
    include_stop_str_in_output: bool = parameter(False, flag(), "include the stop string in the output", engine=False)
    logprobs: int | None = parameter(
        None, _LOGPROBS, "number of most likely tokens whose log-probabilities are returned, besides the output "
        "token's own", flag=True, request=False,
    )  # fmt: skip
    skip_special_tokens: bool = parameter(True, flag(), "omit special tokens from the text", engine=False)
    detokenize: bool = parameter(
        True, flag(), "convert tokens to text; must be true with stop strings", request=False, engine=False
    )
    logit_bias: Mapping[int, float] | None = parameter(
        None, biases(BIASES, MAX_BIAS),
        f"values added to the logits of token ids, clamped to -{MAX_BIAS:g} to {MAX_BIAS:g}",
    )  # fmt: skip
    allowed_token_ids: Iterable[int] | TokenMask | None = parameter(
        None, token_set(MAX_ALLOWED, TokenMask), "the only token ids that may be generated"
    )
    bad_words: Iterable[str] | None = parameter(
        (), strings(MAX_BAD_WORDS, MAX_STOP_BYTES, total=MAX_BAD_WORD_BYTES, visible=True),
        "strings that are never generated, with or without a space before them", engine=False,
    )  # fmt: skip
    prompt_logprobs: int | None = parameter(None, _LOGPROBS, "as logprobs, for each token of the prompt")
    structured_outputs: StructuredOutputsParams | None = parameter(
        None, instance(StructuredOutputsParams), "the required form of the text; min_tokens is then 0", request=False
    )

    def __post_init__(self) -> None:
        for name, check in _CHECKS:
            value = getattr(self, name)
            if (normal := check(value)) is not value:
                object.__setattr__(self, name, normal)
        if self.top_k < 0:
            self._set(top_k=0)
        if self.seed == -1:
            self._set(seed=None)
        if self.temperature < _GREEDY_BELOW:
            self._set(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        elif self.temperature < _MIN_TEMPERATURE:
            self._set(temperature=_MIN_TEMPERATURE)
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Raise LlmcError E601 for parameters that exclude each other."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refused("min_tokens", self.min_tokens, f"0 to max_tokens, {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise refused("detokenize", False, "true with stop strings, which are searched for in the text")
        if self.structured_outputs is not None and self.min_tokens:
            raise refused("min_tokens", self.min_tokens, "0 with structured_outputs: their grammar ends the text")
        if self.greedy and self.n > 1:
            raise refused("n", self.n, "1 if temperature is 0: the outputs would be equal")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0

    @classmethod
    def without_unknown(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords that are parameters. Raises LlmcError E648 or TypeError for others with an effect."""
        if "best_of" in values and values["best_of"] == values.get("n", 1):
            values = {name: value for name, value in values.items() if name != "best_of"}
        return known_keywords(cls, values, OF_SAMPLING)

    def clone(self) -> SamplingParams:
        """Return a copy."""
        return self.changed()

    def changed(self, **values: Any) -> SamplingParams:
        """Return a copy with other values for some fields, without checks: ten times as fast as dataclasses.replace."""
        out = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:
            object.__setattr__(out, name, values[name] if name in values else getattr(self, name))
        return out

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


PARAMETERS = parameters_of(SamplingParams)
_CHECKS = tuple((name, declared.check) for name, declared in PARAMETERS.items())
