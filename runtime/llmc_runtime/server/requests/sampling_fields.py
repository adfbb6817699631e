"""Converts the sampling fields of a request to SamplingParams.

The default of a field is the operator's override, else the value in the model's generation_config.json if its
`do_sample` is true, else OpenAI's default (temperature 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from llmc_runtime.defaults import of_model
from llmc_runtime.engine.input_processor import token_mask
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.row_abi import TOP_LOGPROBS
from llmc_runtime.sched.parameter_type import MAX_INT
from llmc_runtime.sched.sampling_params import PARAMETERS, SamplingParams
from llmc_runtime.sched.structured_outputs import StructuredOutputsParams
from llmc_runtime.server.http.errors import ApiError, to_api_error, unsupported
from llmc_runtime.server.requests.request_fields import (
    GUIDED,
    LEFT,
    RIGHT,
    ChatRequest,
    CompletionRequest,
    Generation,
    ResponseFormat,
)

_COPIED = tuple(name for name, parameter in PARAMETERS.items() if parameter.request and name != "max_tokens")
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions
# At most one space between the parts of a response_format's JSON: white space costs tokens and carries no information.
WHITESPACE = " ?"
_TAG_PARTS = ("format", "structures", "triggers")  # keys of a response_format of type structural_tag


class Defaults(Protocol):
    """A model's sampling defaults."""

    @property
    def generation(self) -> Mapping[str, Any]:
        """The contents of generation_config.json."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""

    def get_default_sampling_params(self, *, max_tokens: int | None = 16) -> SamplingParams:
        """Return the default parameters."""


def kept_tokens(request: Generation, length: int) -> slice | None:
    """Return which of a prompt's tokens `truncate_prompt_tokens` keeps with a context of `length`: the last ones, or
    the first ones if `truncation_side` is right; None for all of them.
    """
    keep = request.truncate_prompt_tokens
    if keep is None:
        return None
    if keep == -1:
        default = COMPLETION_TOKENS if isinstance(request, CompletionRequest) else 1
        limits = (getattr(request, "max_completion_tokens", None), request.max_tokens, default)
        keep = max(1, length - max(1, next(limit for limit in limits if limit is not None)))
    return slice(keep) if request.truncation_side == RIGHT else slice(-keep, None)


def check_silent(request: CompletionRequest) -> None:
    """Raise ApiError 400 if nothing is generated and the prompt is not shown either."""
    if request.max_tokens == 0 and not request.echo:
        raise ApiError("max_tokens: 0 needs echo: true", param="max_tokens")


def of_completion(request: CompletionRequest, llm: Defaults) -> SamplingParams:
    """Return the parameters of a completion. Raises ApiError 400, naming the field."""
    default = llm.get_default_sampling_params(max_tokens=COMPLETION_TOKENS)
    mapped: dict[str, Any] = {"max_tokens": default.max_tokens if request.max_tokens is None else request.max_tokens}
    if request.max_tokens == 0 and request.echo:
        mapped["max_tokens"] = 1  # the engine generates at least one token, which is not shown
    if request.logprobs is not None:
        mapped["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            mapped["prompt_logprobs"] = request.logprobs
    return _params(request, llm, default, mapped)


def of_chat(request: ChatRequest, llm: Defaults) -> SamplingParams:
    """Return the parameters of a chat, which may fill the context by default. Raises ApiError 400."""
    both = (request.max_completion_tokens, request.max_tokens)
    if None not in both and both[0] != both[1]:
        cause = f"max_completion_tokens ({both[0]}) and max_tokens ({both[1]}) differ"
        raise ApiError(f"{cause}; send one of them", param="max_completion_tokens")
    max_tokens = next((value for value in both if value is not None), None)
    default = llm.get_default_sampling_params(max_tokens=None)
    mapped: dict[str, Any] = {"max_tokens": default.max_tokens if max_tokens is None else max_tokens}
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    if request.logprobs:
        mapped["logprobs"] = request.top_logprobs or 0
        if not 0 <= mapped["logprobs"] <= TOP_LOGPROBS:
            raise ApiError(f"top_logprobs: 0 to {TOP_LOGPROBS}", param="top_logprobs")
    return _params(request, llm, default, mapped)


def names_of_limit(request: object) -> Sequence[tuple[str, str]]:
    """Return how errors name the maximum number of tokens, for `renamed`: as the request does."""
    if isinstance(request, ChatRequest) and request.max_tokens is None and request.max_completion_tokens is not None:
        return (("max_tokens", "max_completion_tokens"),)
    return ()


def _params(request: Generation, llm: Defaults, default: SamplingParams, mapped: dict[str, Any]) -> SamplingParams:
    """Return the parameters of a request: the model's defaults, the request's fields, and `mapped`, the route's values.

    Raises ApiError 400, which names the field.
    """
    values: dict[str, Any] = {name: getattr(default, name) for name in of_model(llm.generation)}
    values |= _set_fields(request, _COPIED)
    if request.best_of is not None and request.best_of != (request.n or 1):
        cause = f"best_of: {request.best_of} is not supported: all outputs are returned. Leave it out, or set it to n"
        raise unsupported(cause, "best_of")
    keep = request.truncate_prompt_tokens
    if keep is not None and keep != -1 and not 1 <= keep <= MAX_INT:
        cause = "truncate_prompt_tokens: how many tokens of the prompt to keep, at least 1"
        raise ApiError(f"{cause}; -1 for as many as fit in addition to max_tokens", param="truncate_prompt_tokens")
    if request.truncation_side not in (None, LEFT, RIGHT):
        cause = f"truncation_side: {LEFT} (keeps the last tokens) or {RIGHT} (keeps the first)"
        raise ApiError(cause, param="truncation_side")
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs are not streamed: set stream to false", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options needs stream: true", param="stream_options")
    try:
        values["structured_outputs"] = _structured_outputs(request)
        if request.allowed_token_ids is not None:
            values["allowed_token_ids"] = token_mask(request.allowed_token_ids, llm.vocab_size)
        return SamplingParams(**(values | mapped))
    except LlmcError as e:
        raise to_api_error(e, "prompt") from None


def _set_fields(owner: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of these fields that are not None, by name."""
    return {name: value for name in names if (value := getattr(owner, name)) is not None}


def _structured_outputs(request: Generation) -> StructuredOutputsParams | None:
    """Return the output format that response_format, structured_outputs or the fields guided_... request."""
    form = None if request.response_format is None else _of_format(request.response_format)
    outputs = request.structured_outputs
    guided_fields = _set_fields(request, GUIDED.values())
    guided = {name: guided_fields[field] for name, field in GUIDED.items() if field in guided_fields}
    values = {"response_format": form, "structured_outputs": outputs, "guided_...": guided or None}
    used = [name for name, value in values.items() if value is not None]
    if len(used) > 1:
        raise ApiError(f"{used[0]} and {used[1]} exclude each other; send one of them", param="structured_outputs")
    if outputs is not None:
        return StructuredOutputsParams(**_set_fields(outputs, outputs.__struct_fields__))
    return StructuredOutputsParams(**guided) if guided else form


def _of_format(form: ResponseFormat) -> StructuredOutputsParams | None:
    """Return the structured outputs that a response_format requests, None for text. Raises ApiError 400."""
    if form.schema is not None and form.type != "json_object":
        raise ApiError("response_format.schema needs the type json_object", param="response_format.schema")
    if form.type == "text":
        return None
    if form.type == "json_object" and form.schema is not None:
        return StructuredOutputsParams(json=form.schema, whitespace_pattern=WHITESPACE)
    if form.type == "json_object":
        return StructuredOutputsParams(json_object=True, whitespace_pattern=WHITESPACE)
    if form.type == "structural_tag":
        return StructuredOutputsParams(structural_tag=_set_fields(form, _TAG_PARTS), whitespace_pattern=WHITESPACE)
    if form.type != "json_schema":
        cause = "response_format.type: text, json_object, json_schema or structural_tag"
        raise ApiError(cause, param="response_format.type")
    if form.json_schema is None or form.json_schema.schema is None:
        raise ApiError("response_format.json_schema.schema is missing", param="response_format.json_schema")
    return StructuredOutputsParams(
        json=form.json_schema.schema,
        whitespace_pattern=WHITESPACE,
        disable_additional_properties=bool(form.json_schema.strict),
    )
