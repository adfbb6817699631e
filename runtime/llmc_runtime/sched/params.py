"""SamplingParams: how one request samples and when it ends, in vLLM's words, checked at construction. No model.

What only the engine can check (ids against the vocabulary, lengths against the model and the pool) is checked when a
request is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.step import BIASES, STOPS
from llmc_runtime.sched.structured import StructuredOutputsParams
from llmc_runtime.sched.token_mask import TokenMask

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024  # of one stop string
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_ALLOWED = 65536
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 16 << 10  # of all bad words together
MAX_N = 64
MAX_INT = 2**31 - 1
_GREEDY_BELOW, _MIN_TEMPERATURE = 1e-5, 0.01


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Fields and defaults as in vLLM. LlmcError E601 names the field, its value and what is allowed.

    temperature   0 to 100; below 1e-5 is greedy (top_p, top_k and min_p are then off), else at least 0.01
    top_p         above 0, to 1 (off);   top_k  -1 or 0 (off), else the number of ids kept;   min_p  0 (off) to 1
    repetition_penalty  0.001 to 1000, 1 is off;   presence_penalty, frequency_penalty  -2 to 2
    seed          an integer of 64 bits; None or -1: drawn per request
    max_tokens    at least 1; None: to the end of the context;   min_tokens  0 to max_tokens
    stop          up to 16 strings (or one string);   stop_token_ids  up to 32 ids
    logprobs      None: none; 0 to 20: those of the sampled token and of that many likeliest ones
    prompt_logprobs  None: none; 0 to 20: those of each prompt token and of that many likeliest ones
    n             1 to 64 outputs; 1 where sampling is greedy. Output i draws with the seed + i
    logit_bias    None, or up to 1024 ids and what is added to their logits, cut to -100 to 100
    allowed_token_ids  None, or the ids that may be generated, 1 to 65536; also as a TokenMask
    structured_outputs  None, or a StructuredOutputsParams: the form of the text; min_tokens is then 0
    bad_words     up to 128 strings of 1 to 1024 bytes, 16 KiB together, that are not generated, behind a space or not
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Iterable[str] | None = ()  # a tuple once constructed
    stop_token_ids: Iterable[int] | None = ()  # a tuple once constructed
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Iterable[int] | TokenMask | None = None  # a tuple or a TokenMask once constructed
    bad_words: Iterable[str] | None = ()  # a tuple once constructed
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_sampling()
        self._check_length()
        self._check_stops()
        self._check_bans()
        if self.temperature < _GREEDY_BELOW:
            self._set(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        elif self.temperature < _MIN_TEMPERATURE:
            self._set(temperature=_MIN_TEMPERATURE)
        if self.greedy and self.n > 1:
            raise refused("n", self.n, "1 where temperature is 0: the outputs would be equal")

    @property
    def greedy(self) -> bool:
        """The likeliest token is always taken."""
        return self.temperature == 0.0

    def changed(self, **values: Any) -> SamplingParams:
        """A copy with other values for some fields, which are not checked: for the many outputs and prompts of one
        request (dataclasses.replace and copy.copy take ten times as long)."""
        out = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:
            object.__setattr__(out, name, values[name] if name in values else getattr(self, name))
        return out

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_sampling(self) -> None:
        self._integer("n", 1, MAX_N, f"1 to {MAX_N}")
        self._number("temperature", 0, 100)
        self._number("top_p", 0, 1, above=True)
        self._integer("top_k", -1, MAX_INT, "-1 or 0 (off), or the number of likeliest ids to keep, 1 to 2147483647")
        self._number("min_p", 0, 1)
        self._number("repetition_penalty", 0.001, 1000)
        self._number("presence_penalty", -2, 2)
        self._number("frequency_penalty", -2, 2)
        if self.top_k < 0:
            self._set(top_k=0)
        if self.seed is not None:
            self._integer("seed", -(2**63), 2**64 - 1, "none, or an integer of 64 bits")
            if self.seed == -1:
                self._set(seed=None)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0, MAX_LOGPROBS, f"none, or 0 to {MAX_LOGPROBS}")

    def _check_length(self) -> None:
        most = MAX_INT
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, MAX_INT, "none (to the end of the context), or at least 1")
            most = self.max_tokens
        self._integer("min_tokens", 0, most, f"0 to max_tokens, {most}" if most < MAX_INT else f"0 to {MAX_INT}")

    def _check_stops(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise refused(name, value, "true or false")
        allowed = f"a string or up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_BYTES} bytes"
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop, allowed)
        if len(stop) > MAX_STOP_STRINGS or not all(_is_stop(text) for text in stop):
            raise refused("stop", self.stop, allowed)
        if stop and not self.detokenize:
            raise refused("detokenize", False, "true where stop strings are given: they are looked for in the text")
        allowed = f"up to {STOPS} token ids, each 0 or more"
        ids = _tuple("stop_token_ids", self.stop_token_ids, allowed)
        if len(ids) > STOPS or not _are_ids(ids):
            raise refused("stop_token_ids", self.stop_token_ids, allowed)
        self._set(stop=stop, stop_token_ids=tuple(map(int, ids)))

    def _check_bans(self) -> None:
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise refused("structured_outputs", self.structured_outputs, "none, or a StructuredOutputsParams")
        if self.structured_outputs is not None and self.min_tokens:
            raise refused("min_tokens", self.min_tokens, "0 with structured_outputs, which say where the text may end")
        if self.logit_bias is not None:
            self._set(logit_bias=_biases(self.logit_bias))
        if self.allowed_token_ids is not None and not isinstance(self.allowed_token_ids, TokenMask):
            allowed = f"1 to {MAX_ALLOWED} token ids, each 0 or more"
            ids = _tuple("allowed_token_ids", self.allowed_token_ids, allowed)
            if not 0 < len(ids) <= MAX_ALLOWED or not _are_ids(ids):
                raise refused("allowed_token_ids", self.allowed_token_ids, allowed)
            self._set(allowed_token_ids=tuple(sorted(set(map(int, ids)))))
        allowed = f"up to {MAX_BAD_WORDS} strings of 1 to {MAX_STOP_BYTES} bytes, {MAX_BAD_WORD_BYTES} together"
        words = () if isinstance(self.bad_words, str) else _tuple("bad_words", self.bad_words, allowed)
        if isinstance(self.bad_words, str) or len(words) > MAX_BAD_WORDS or not all(map(_is_word, words)):
            raise refused("bad_words", self.bad_words, allowed)
        if sum(len(word.encode(errors="replace")) for word in words) > MAX_BAD_WORD_BYTES:
            raise refused("bad_words", self.bad_words, allowed)
        self._set(bad_words=words)

    def _number(self, name: str, low: float, high: float, above: bool = False) -> None:
        value = getattr(self, name)
        if type(value) is float and low <= value <= high and not (above and value == low):
            return  # as mostly: what follows takes its time
        good = isinstance(value, Real) and not isinstance(value, bool)  # numpy's scalars are among them
        if not good or not low <= value <= high or (above and value == low):  # NaN is in no range
            raise refused(name, value, f"a number {f'above {low}, up to' if above else f'from {low} to'} {high}")
        self._set(**{name: float(value)})

    def _integer(self, name: str, low: int, high: int, allowed: str) -> None:
        value = getattr(self, name)
        if type(value) is int and low <= value <= high:
            return
        if not _is_int(value) or not low <= value <= high:
            raise refused(name, value, allowed)
        self._set(**{name: int(value)})


def refused(name: str, value: object, allowed: str) -> LlmcError:
    """E601: parameter `name` may not be `value`; `allowed` says in words what it may be."""
    try:
        shown = repr(value[:80] if isinstance(value, str | list | tuple) else value)
    except Exception as error:  # an integer of thousands of digits, a hostile __repr__
        shown = f"<{type(value).__name__}: {type(error).__name__}>"
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return LlmcError("E601", f"{name} = {shown} is not allowed", f"{name}: {allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _are_ids(values: Sequence[Any]) -> bool:
    if set(map(type, values)) <= {int}:  # as mostly: of many one by one takes its time
        return not values or (min(values) >= 0 and max(values) <= MAX_INT)
    return all(_is_int(value) and 0 <= value <= MAX_INT for value in values)


def _is_stop(text: object) -> bool:
    if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_BYTES:
        return False
    return len(text.encode(errors="replace")) <= MAX_STOP_BYTES


def _is_word(text: object) -> bool:
    return _is_stop(text) and bool(str(text).strip())


def _biases(given: object) -> dict[int, float] | None:
    """{id: bias} with biases cut to what is allowed; ids may be texts, as JSON has them. None where there are none."""
    allowed = f"up to {BIASES} token ids, each 0 or more, and a number for each"
    if not isinstance(given, Mapping) or len(given) > BIASES:
        raise refused("logit_bias", given, allowed)
    out = {}
    for key, value in given.items():
        if type(key) is int and type(value) is float and 0 <= key <= MAX_INT and value == value:
            out[key] = MAX_BIAS if value > MAX_BIAS else max(-MAX_BIAS, value)
            continue
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10 else key
        number = (type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))) and value == value
        if not (type(token) is int or _is_int(token)) or not 0 <= token <= MAX_INT or not number:
            raise refused("logit_bias", given, allowed)
        out[int(token)] = min(MAX_BIAS, max(-MAX_BIAS, float(value)))
    return out or None


def _tuple(name: str, value: object, allowed: str) -> tuple[Any, ...]:
    if value is None or (type(value) is tuple and not value):
        return ()
    try:
        if not isinstance(value, bytes | dict) and isinstance(value, Iterable):
            return tuple(value)
    except TypeError:  # an array without dimensions
        pass
    raise refused(name, value, allowed)
