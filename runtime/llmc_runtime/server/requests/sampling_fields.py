"""The fields of a request that say how to sample become SamplingParams; it checks no prompt and reads no body.

What a request leaves open is what the model's generation_config.json asks for where it samples (do_sample), or what the
operator put in its place, else OpenAI's default: temperature 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from llmc_runtime.defaults import of_model
from llmc_runtime.engine.allowed_tokens import token_mask
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.row_abi import TOP_LOGPROBS
from llmc_runtime.sched.sampling_params import PARAMETERS, SamplingParams
from llmc_runtime.sched.structured_outputs import StructuredOutputsParams
from llmc_runtime.server.http.errors import ApiError, to_api_error
from llmc_runtime.server.requests.request_fields import ChatRequest, CompletionRequest, Generation, ResponseFormat

_SAME = tuple(one.name for one in PARAMETERS.values() if one.request and one.name != "max_tokens")
COMPLETION_TOKENS = 16  # of a completion that names no number, as OpenAI has it
# Between the parts of a response_format's JSON: one space at most, since white space costs tokens and says nothing.
WHITESPACE = " ?"


class Defaults(Protocol):
    """A model's sampling defaults, as AsyncLLM has them."""

    @property
    def generation(self) -> Mapping[str, Any]:
        """The contents of generation_config.json."""

    @property
    def vocab_size(self) -> int:
        """The token ids that the model has."""

    def get_default_sampling_params(self, *, max_tokens: int | None = 16) -> SamplingParams:
        """The parameters that they make."""


def check_silent(asked: CompletionRequest) -> None:
    """ApiError 400 where nothing is generated, and the prompt not shown either."""
    if asked.max_tokens == 0 and not asked.echo:
        raise ApiError("max_tokens: 0 needs echo: true", param="max_tokens")


def of_completion(asked: CompletionRequest, llm: Defaults) -> SamplingParams:
    """Parameters of a completion. ApiError 400 names the field."""
    more: dict[str, Any] = {"max_tokens": asked.max_tokens}
    if asked.max_tokens == 0 and asked.echo:
        more["max_tokens"] = 1  # the engine gives one at least; it is not told
    default = llm.get_default_sampling_params(max_tokens=COMPLETION_TOKENS)
    if asked.max_tokens is None:
        more["max_tokens"] = default.max_tokens
    if asked.logprobs is not None:
        more["logprobs"] = asked.logprobs
        if asked.echo and asked.prompt_logprobs is None:
            more["prompt_logprobs"] = asked.logprobs
    return _params(asked, llm, default, more)


def of_chat(asked: ChatRequest, llm: Defaults) -> SamplingParams:
    """Parameters of a chat completion, which without a number of tokens may fill the context. ApiError 400."""
    both = (asked.max_completion_tokens, asked.max_tokens)
    if None not in both and both[0] != both[1]:
        cause = f"max_completion_tokens ({both[0]}) and max_tokens ({both[1]}) differ"
        raise ApiError(f"{cause}; give one of them", param="max_completion_tokens")
    most = next((value for value in both if value is not None), None)
    default = llm.get_default_sampling_params(max_tokens=None)
    more: dict[str, Any] = {"max_tokens": default.max_tokens if most is None else most}
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    if asked.logprobs:
        more["logprobs"] = asked.top_logprobs or 0
        if more["logprobs"] < 0 or more["logprobs"] > TOP_LOGPROBS:
            raise ApiError(f"top_logprobs: 0 to {TOP_LOGPROBS}", param="top_logprobs")
    try:
        return _params(asked, llm, default, more)
    except ApiError as e:
        if e.param == "max_tokens" and asked.max_completion_tokens is not None:
            e.param = "max_completion_tokens"
        raise


def _params(asked: Generation, llm: Defaults, default: SamplingParams, more: dict[str, Any]) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(default, name) for name in of_model(llm.generation)}
    given |= {name: value for name in _SAME if (value := getattr(asked, name)) is not None}
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise ApiError("best_of: the same as n", param="best_of", code="unsupported_parameter")
    if asked.stream and asked.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs are not streamed: give stream false", param="prompt_logprobs")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError("stream_options needs stream: true", param="stream_options")
    try:
        given["structured_outputs"] = _form(asked)
        if asked.allowed_token_ids is not None:
            given["allowed_token_ids"] = token_mask(asked.allowed_token_ids, llm.vocab_size)
        return SamplingParams(**(given | more))
    except LlmcError as e:
        raise to_api_error(e, "prompt") from None


def _form(asked: Generation) -> StructuredOutputsParams | None:
    """What structured_outputs or response_format asks for."""
    form = None if asked.response_format is None else _of_format(asked.response_format)
    if asked.structured_outputs is None:
        return form
    if form is not None:
        raise ApiError("response_format and structured_outputs exclude each other", param="structured_outputs")
    wanted = asked.structured_outputs
    names = (name for name in wanted.__struct_fields__ if getattr(wanted, name) is not None)
    return StructuredOutputsParams(**{name: getattr(wanted, name) for name in names})


def _of_format(wanted: ResponseFormat) -> StructuredOutputsParams | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True, whitespace_pattern=WHITESPACE)
    if wanted.type != "json_schema":
        raise ApiError("response_format.type: text, json_object or json_schema", param="response_format.type")
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise ApiError("response_format.json_schema.schema is missing", param="response_format.json_schema")
    return StructuredOutputsParams(
        json=wanted.json_schema.schema,
        whitespace_pattern=WHITESPACE,
        disable_additional_properties=bool(wanted.json_schema.strict),
    )
