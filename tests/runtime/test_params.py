"""SamplingParams accepts what vLLM's users write and refuses nonsense, naming field, value and range."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.step import RowParams
from llmc_runtime.sched.structured_outputs import StructuredOutputsParams

HUGE = 10**5000  # too long for Python to print; its test names it by field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 65), ("n", True),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
        ("temperature", None), ("temperature", True), ("temperature", 101),
        ("top_p", 0), ("top_p", 1.01), ("top_p", -1), ("top_p", math.nan),
        ("top_k", -2), ("top_k", 1.5), ("top_k", 2**31), ("top_k", None),
        ("min_p", -0.01), ("min_p", 1.01),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", 1e-9),
        ("repetition_penalty", 1e9), ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3),
        ("frequency_penalty", math.nan),
        ("seed", 2**64), ("seed", 1.0), ("seed", "7"),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.0),
        ("min_tokens", -1), ("min_tokens", 17), ("min_tokens", None),
        ("stop", ["a"] * 17), ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 3), ("stop", "x" * 1025),
        ("stop", b"x"), ("stop", {"a": 1}), ("stop", "é" * 600),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["1"]), ("stop_token_ids", range(33)), ("stop_token_ids", 5),
        ("stop_token_ids", [True]), ("stop_token_ids", [2**31]),
        ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("prompt_logprobs", -1), ("prompt_logprobs", 21),
        ("logit_bias", [1]), ("logit_bias", {-1: 1}), ("logit_bias", {"a": 1}), ("logit_bias", {1: "1"}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {1: True}), ("logit_bias", {2**31: 1}), ("logit_bias", {1.5: 1}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)), ("logit_bias", {"\u00b2": 1}),
        ("logit_bias", {"\u0661\u0662": 1}),
        ("allowed_token_ids", []), ("allowed_token_ids", 5), ("allowed_token_ids", [-1]), ("allowed_token_ids", [1.0]),
        ("allowed_token_ids", range(65537)), ("allowed_token_ids", "12"),
        ("bad_words", "word"), ("bad_words", [""]), ("bad_words", [" "]), ("bad_words", [1]),
        ("bad_words", ["x"] * 129),
        ("bad_words", ["x" * 1025]), ("bad_words", 3), ("structured_outputs", {"regex": "a"}),
        ("ignore_eos", 1), ("include_stop_str_in_output", None), ("skip_special_tokens", "yes"), ("detokenize", 0),
    ],
)  # fmt: skip
def test_nonsense_is_refused(field: str, value: object) -> None:
    with pytest.raises(LlmcError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    error = caught.value
    assert (error.code, error.param) == ("E601", field)
    assert error.cause.startswith(f"{field} = ") and error.remedy.startswith(f"{field}: ")
    assert len(str(error).splitlines()) <= 5 and len(str(error)) < 400


@pytest.mark.parametrize("field", ["temperature", "seed", "max_tokens", "top_k", "n"])
def test_a_number_too_long_to_print_is_refused(field: str) -> None:
    with pytest.raises(LlmcError, match=f"{field} = <int: ValueError>"):
        SamplingParams(**{field: HUGE})  # type: ignore[arg-type]


def test_the_message_names_field_value_and_range() -> None:
    with pytest.raises(LlmcError) as caught:
        SamplingParams(top_p=1.5)
    assert str(caught.value) == "LLMC-E601: top_p = 1.5 is not allowed\n  Try: top_p: a number above 0, up to 1"
    with pytest.raises(LlmcError, match=r"min_tokens = 9 .*\n.*0 to max_tokens, 8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    with pytest.raises(LlmcError, match=r"n = 2 .*\n.*1 if temperature is 0"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(LlmcError, match="detokenize = False"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"regex": "a", "json": "{}"}, {"json_object": False}, {"choice": "yes"}, {"choice": []}, {"choice": [""]},
        {"choice": ["x"] * 1025}, {"choice": [1]}, {"regex": 3}, {"regex": "x" * 65537}, {"grammar": b"x"},
        {"json": {"a": {1}}}, {"json": {"a": math.nan}}, {"json_object": 1},
        {"regex": "a", "disable_any_whitespace": 1},
        {"choice": ["x" * 1000] * 70}, {"json_object": True, "whitespace_pattern": 5},
    ],
)  # fmt: skip
def test_structured_outputs_are_one_form_within_limits(fields: dict[str, Any]) -> None:
    with pytest.raises(LlmcError) as caught:
        StructuredOutputsParams(**fields)
    error = caught.value
    assert (error.code, error.param) == ("E601", "structured_outputs")
    assert error.cause.startswith("structured_outputs = ") and len(str(error)) < 400


def test_structured_outputs_in_one_form() -> None:
    assert StructuredOutputsParams(choice=(c for c in "ab")).choice == ("a", "b")
    assert (StructuredOutputsParams(json={"a": "\u00e9"}).text, StructuredOutputsParams(json_object=True).text) == (
        '{"a": "\u00e9"}',
        "{}",
    )
    form = StructuredOutputsParams(regex="a+")
    assert form.kind == "regex" and SamplingParams(structured_outputs=form).structured_outputs is form
    with pytest.raises(LlmcError, match="min_tokens = 2"):
        SamplingParams(structured_outputs=form, min_tokens=2)


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (1.0, 1.0, 0, 0.0, 16)
    assert (params.stop, params.stop_token_ids, params.logprobs, params.seed) == ((), (), None, None)
    assert params.detokenize and params.skip_special_tokens and not params.ignore_eos and not params.greedy


def test_values_are_brought_into_one_form() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=9, min_p=0.1)
    assert params.greedy and (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert SamplingParams(temperature=1e-6).greedy
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert SamplingParams(top_k=-1).top_k == 0 and SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop="end").stop == ("end",) and SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop_token_ids == (3,)
    assert isinstance(SamplingParams(temperature=1).temperature, float)
    assert SamplingParams(logit_bias={"7": 250, 8: -1e9, np.int64(9): 1}).logit_bias == {7: 100.0, 8: -100.0, 9: 1.0}
    assert SamplingParams(logit_bias={}).logit_bias is None and SamplingParams().allowed_token_ids is None
    assert SamplingParams(allowed_token_ids=[9, 3, 9]).allowed_token_ids == (3, 9)
    assert (
        SamplingParams(bad_words=["a", "b c"]).bad_words == ("a", "b c")
        and SamplingParams(bad_words=None).bad_words == ()
    )
    assert SamplingParams(max_tokens=None, min_tokens=50).max_tokens is None
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop="a"))
    with pytest.raises(FrozenInstanceError):
        params.top_p = 0.1  # type: ignore[misc]


def test_numpy_scalars_are_numbers() -> None:
    plain = SamplingParams(temperature=0.5, top_k=3, seed=7, max_tokens=9, min_tokens=2, logprobs=1, stop_token_ids=[4])
    theirs = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(7), max_tokens=np.int32(9),
        min_tokens=np.int8(2), logprobs=np.uint8(1), stop_token_ids=np.array([4]),
    )  # fmt: skip
    assert repr(theirs) == repr(plain)
    for field in ("temperature", "max_tokens", "ignore_eos", "stop", "stop_token_ids"):
        for value in (np.bool_(True), np.array(1)):
            with pytest.raises(LlmcError, match=f"{field} = "):
                SamplingParams(**{field: value})


def test_the_rows_of_the_device() -> None:
    row = RowParams(0.5, 0.9, 0.1, 1.1, 0.2, -0.2, 40, 0xFFFFFFFF_80000001, 3, True, (7, 9))
    assert row.floats() == [0.5, 0.9, 0.1, 1.1, 0.2, -0.2, 0.0, 0.0]
    assert row.ints(10) == [40, 0x80000001 - 2**32, -1, 10, 13, 1, 0, 0]
    assert row.stop_row() == [7, 9, *[-1] * 30]
