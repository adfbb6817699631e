"""The requests of the HTTP API as msgspec types, with the allowed values of each field in its JSON schema.

The OpenAPI description and the checks of lengths (`parse.check_lengths`) derive from these types. The sampling fields
derive from the declarations of SamplingParams. Ranges are checked when values are used. The description omits limits
that depend on the model or on other fields. Names are OpenAI's, or vLLM's if OpenAI has none. A null is the same as an
absent field.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from llmc_runtime.format.row_abi import TOP_LOGPROBS
from llmc_runtime.sched.parameter_type import MAX_INT, Parameter
from llmc_runtime.sched.sampling_params import PARAMETERS
from llmc_runtime.sched.structured_outputs import MAX_BYTES
from llmc_runtime.sched.structured_outputs import MAX_CHOICES as MAX_CHOICE_TEXTS
from llmc_runtime.server.http.errors import ApiError

MAX_SALT = 256
MAX_MESSAGES = 4096
MAX_PROMPTS = 128  # maximum prompts per request
MAX_PARTS = 4096  # content parts of all messages together
MAX_CALLS = 4096  # earlier tool calls in all messages together
MAX_TOOLS = 128
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_DOCUMENTS = 1024
MAX_TEMPLATE_KWARGS = 64
# Types of text parts -> the field that contains the text.
TEXT_PARTS: Mapping[str, str] = MappingProxyType(
    {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
)
LEFT, RIGHT = "left", "right"  # the side of a prompt whose tokens are dropped
# The earlier names in vLLM of fields of structured_outputs, by their names now.
GUIDED: Mapping[str, str] = MappingProxyType(
    {name: f"guided_{name}" for name in ("json", "regex", "choice", "grammar", "whitespace_pattern")}
)
_PRIORITIES = range(-(2**31), 2**31)
MAX_NAME = 256  # characters of names: of a model, a reasoning effort


def schema_of(**schema: Any) -> Meta:
    """Return additions to the JSON schema of a type."""
    return Meta(extra_json_schema=schema)


def function_properties(parameters: str, optional: bool) -> dict[str, Any]:
    """Return the JSON schemas of a function's fields; `parameters` is the name of the field for its arguments' schema,
    which may be null if it is `optional`.
    """
    return {
        "name": {"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"},
        "description": {"type": ["string", "null"]},
        parameters: {
            "type": ["object", "null"] if optional else "object", "properties": {"type": {"const": "object"}},
        },
        "strict": {"type": ["boolean", "null"]},
    }  # fmt: skip


def tools_of(tool: Meta) -> Any:
    """Return the type of a list of tools, each described by `tool`."""
    return Annotated[list[Annotated[dict[str, Any], tool]], schema_of(maxItems=MAX_TOOLS)]


def _tool() -> Meta:
    inner = {"type": "object", "properties": function_properties("parameters", optional=True), "required": ["name"]}
    return schema_of(properties={"type": {"const": "function"}, "function": inner}, required=["type", "function"])


def prompts_schema(maximum: int) -> Meta:
    """Describe a list of up to `maximum` texts or lists of token ids, or a list of token ids."""
    token = {"type": "integer", "minimum": 0}
    many = {"items": {"type": "array", "items": token, "minItems": 1}, "maxItems": maximum}
    return schema_of(minItems=1, anyOf=[{"items": {"type": "string"}, "maxItems": maximum}, {"items": token}, many])


Ids = list[Annotated[int, schema_of(minimum=0)]]
Prompts = Annotated[list[Any], prompts_schema(MAX_PROMPTS)]
Messages = Annotated[list[dict[str, Any]], schema_of(minItems=1, maxItems=MAX_MESSAGES)]
Documents = Annotated[list[dict[str, Any]], schema_of(maxItems=MAX_DOCUMENTS)]
Tools: Any = tools_of(_tool())
ToolChoice = Annotated[str, schema_of(enum=["none", "auto", "required"], maxLength=MAX_NAME)]
ToolChoiceObject = Annotated[
    dict[str, Any], schema_of(properties={"allowed_tools": {"properties": {"tools": {"maxItems": MAX_TOOLS}}}})
]
Name = Annotated[str, schema_of(maxLength=MAX_NAME)]
GrammarText = Annotated[str, schema_of(maxLength=MAX_BYTES)]
Choices = Annotated[list[str], schema_of(maxItems=MAX_CHOICE_TEXTS)]
Structures = Annotated[list[dict[str, Any]], schema_of(maxItems=MAX_CHOICE_TEXTS)]
TemplateKwargs = Annotated[dict[str, Any], schema_of(maxProperties=MAX_TEMPLATE_KWARGS)]
Scores = Annotated[int, schema_of(minimum=0, maximum=TOP_LOGPROBS)]
Priority = Annotated[int, schema_of(minimum=_PRIORITIES.start, maximum=_PRIORITIES.stop - 1)]
Salt = Annotated[str, schema_of(maxLength=MAX_SALT)]
TruncateTo = Annotated[int, schema_of(anyOf=[{"const": -1}, {"minimum": 1}], maximum=MAX_INT)]  # -1: what fits
TruncationSide = Annotated[str, schema_of(enum=[LEFT, RIGHT], maxLength=16)]
MaxTokens = Annotated[int, schema_of(minimum=0, maximum=MAX_INT)]  # 0 with echo
MaxCompletionTokens = Annotated[int, schema_of(minimum=1, maximum=MAX_INT)]


def _field(parameter: Parameter) -> tuple[str, Any, None]:
    json_type: Any = parameter.values.json_type and parameter.values.json_type()
    return parameter.name, Annotated[json_type | None, Meta(description=parameter.text)], None


def sampling_fields(name: str, without: Collection[str] = (), base: type[msgspec.Struct] | None = None) -> Any:
    """Return a type with a field for each sampling parameter that requests may set, None where a request does not."""
    used = [parameter for parameter in PARAMETERS.values() if parameter.request and parameter.name not in without]
    bases = None if base is None else (base,)
    return msgspec.defstruct(name, [_field(parameter) for parameter in used], bases=bases, kw_only=True)


# Parameters that APIs with one output per request do not have, or have under other names.
NOT_OF_ONE_OUTPUT = ("n", "max_tokens", "stop", "prompt_logprobs")
SamplingFields: Any = sampling_fields("SamplingFields")
OneOutputFields: Any = sampling_fields("OneOutputFields", NOT_OF_ONE_OUTPUT)


def check_priority(priority: int | None) -> int:
    """Return the priority of a request, 0 by default. Raises ApiError 400 if it is out of range."""
    if priority is not None and priority not in _PRIORITIES:
        raise ApiError("priority: an integer of 32 bits; smaller runs first", param="priority")
    return priority or 0


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    """The schema of a response_format, and its name."""

    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`type`: text, json_object (with a `schema`, if there is one), json_schema, or structural_tag with a `format`, or
    with `structures` and `triggers`.
    """

    type: Name
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    structures: Structures | None = None
    triggers: Choices | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's structured_outputs: exactly one of the first six."""

    json: GrammarText | dict[str, Any] | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: GrammarText | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: GrammarText | None = None


class Generation(SamplingFields, msgspec.Struct, kw_only=True):
    """The fields that completions and chats share. The fields guided_... are earlier names of structured_outputs."""

    model: Name | None = None
    max_tokens: MaxTokens | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: GrammarText | dict[str, Any] | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    guided_whitespace_pattern: GrammarText | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncateTo | None = None
    truncation_side: TruncationSide | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    service_tier: Name | None = None
    best_of: int | None = None


class CompletionRequest(Generation, kw_only=True):
    """POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    refused: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "messages": "use /v1/chat/completions", "max_completion_tokens": "use max_tokens",
            "top_logprobs": "use logprobs", "continue_final_message": "use /v1/chat/completions",
        }
    )  # fmt: skip

    prompt: str | Prompts
    echo: bool | None = None
    logprobs: Scores | None = None


class ChatRequest(Generation, kw_only=True):
    """POST /v1/chat/completions."""

    refused: ClassVar[Mapping[str, str]] = MappingProxyType({"prompt": "use messages, or /v1/completions"})

    messages: Messages
    max_completion_tokens: MaxCompletionTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Scores | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    documents: Documents | None = None
    reasoning_effort: Name | None = None
    include_reasoning: bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: one of `prompt` and `messages`."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: Ids
    model: Name | None = None
