"""The bodies of POST /v1/responses and /v1/responses/input_tokens as msgspec types, and the chats that they stand for.

Unsupported fields and values that would change the response are refused with an error that names them.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import msgspec

from llmc_runtime.server.http.errors import ApiError, not_found, unsupported
from llmc_runtime.server.requests.conversation import Conversation, checked_text, function_tool, plain_text
from llmc_runtime.server.requests.request_fields import (
    GUIDED,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_TOOLS,
    NOT_OF_ONE_OUTPUT,
    TEXT_PARTS,
    ChatRequest,
    JsonSchema,
    MaxCompletionTokens,
    Name,
    OneOutputFields,
    Priority,
    ResponseFormat,
    Salt,
    Scores,
    TemplateKwargs,
    ToolChoice,
    function_properties,
    sampling_fields,
    schema_of,
    tools_of,
)

MAX_METADATA = 16  # entries of `metadata`
MAX_METADATA_TEXT = 512  # characters of one of its values
MAX_INCLUDE = 16
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"  # values of `include`
# Prefixes of the ids of items, by the item's type.
_PREFIXES: Mapping[str, str] = MappingProxyType(
    {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
)
_ROLES = ("user", "assistant", "system", "developer")

InputItems = Annotated[list[dict[str, Any]], schema_of(maxItems=MAX_MESSAGES)]
FunctionTools: Any = tools_of(
    schema_of(
        properties={"type": {"const": "function"}, **function_properties("parameters", optional=True)},
        required=["type", "name"],
    )
)
AllowedTools = Annotated[dict[str, Any], schema_of(properties={"tools": {"maxItems": MAX_TOOLS}})]
Metadata = Annotated[dict[str, str], schema_of(maxProperties=MAX_METADATA)]
Include = Annotated[list[Name], schema_of(maxItems=MAX_INCLUDE)]


class TextFormat(msgspec.Struct, kw_only=True):
    """`type`: text, json_object or json_schema, which has the other fields."""

    type: Name
    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """The format of the text. `verbosity` has no effect."""

    format: TextFormat | None = None
    verbosity: Name | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """`effort` is that of chats. Of `summary`, the value auto is accepted: there are no summaries."""

    effort: Name | None = None
    summary: Name | None = None
    generate_summary: Name | None = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    """`include_obfuscation` is refused unless it is false."""

    include_obfuscation: bool | None = None


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses/input_tokens. `input`: a text, or items."""

    refused: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "background": "wait for the response, or stream it", "conversation": "use previous_response_id",
            "context_management": "leave items out of input", "n": "send several requests",
            "messages": "use input", "max_tokens": "use max_output_tokens",
            "max_completion_tokens": "use max_output_tokens", "response_format": "use text.format",
            "reasoning_effort": "use reasoning.effort", "stop": "use /v1/chat/completions",
            **dict.fromkeys(("structured_outputs", *GUIDED.values()), "use text.format, or /v1/chat/completions"),
            **dict.fromkeys(
                ("return_token_ids", "return_tokens_as_token_ids", "continue_final_message"), "use /v1/chat/completions"
            ),
            "logprobs": "use include and top_logprobs", "best_of": "use n", "moderation": "text is not classified",
            "prompt_logprobs": "use /v1/completions",
            "prompt": "send the text of the prompt in instructions and input",
            "previous_input_messages": "send them as items of input",
            "enable_response_messages": "/tokenize shows the prompt",
        }
    )  # fmt: skip
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"max_tool_calls", "prompt_cache_retention", "prompt_cache_options", "background", "background_options"}
    )

    model: Name | None = None
    input: str | InputItems | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    tools: FunctionTools | None = None
    tool_choice: ToolChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Name | None = None
    chat_template_kwargs: TemplateKwargs | None = None


_Sampled: Any = sampling_fields("_Sampled", NOT_OF_ONE_OUTPUT, InputTokensRequest)


class ResponsesRequest(_Sampled, msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    store: bool | None = None
    include: Include | None = None
    top_logprobs: Scores | None = None
    metadata: Metadata | None = None
    max_output_tokens: MaxCompletionTokens | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class Earlier(msgspec.Struct):
    """The stored items that a request refers to: those before its own, and the items of its item_references by id."""

    previous: list[dict[str, Any]] = []
    referenced: dict[str, dict[str, Any]] = {}


def to_responses_request(request: InputTokensRequest) -> ResponsesRequest:
    """Return the request for a response with the same input, which is not stored."""
    return ResponsesRequest(store=False, **{name: getattr(request, name) for name in request.__struct_fields__})


def _check_include(request: ResponsesRequest) -> None:
    """Raise ApiError 400 for an unknown name in `include`, and for `top_logprobs` without log-probabilities."""
    for i, name in enumerate(request.include or ()):
        if name not in (ENCRYPTED, LOGPROBS):
            cause = f"{name[:64]!r} is not supported, only {ENCRYPTED} and {LOGPROBS}"
            raise unsupported(f"include[{i}]: {cause}", "include")
    if request.top_logprobs and not _has_logprobs(request):
        raise ApiError(f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs")


def check(request: ResponsesRequest) -> None:
    """Raise ApiError 400 for values that are not supported."""
    _check_include(request)
    for name, value in (request.metadata or {}).items():
        if len(value) > MAX_METADATA_TEXT or len(name) > MAX_METADATA_TEXT:
            raise ApiError(f"metadata: keys and values of up to {MAX_METADATA_TEXT} characters", param="metadata")
    if request.truncation not in (None, "disabled"):
        raise unsupported("truncation: only disabled is supported; send fewer items of input", "truncation")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation: only false is supported", "stream_options")
    reasoning = request.reasoning or ReasoningOptions()
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) not in (None, "auto"):
            raise unsupported(f"reasoning.{name}: only auto is supported: reasoning is not summarized", "reasoning")
    if request.input is None and request.previous_response_id is None:
        raise ApiError("input is missing", param="input")


def _has_logprobs(request: ResponsesRequest) -> bool:
    return LOGPROBS in (request.include or ())


def items_of(request: InputTokensRequest) -> list[dict[str, Any]]:
    """Return the request's own input as a list of items."""
    if not isinstance(request.input, str):
        return request.input or []
    return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": request.input}]}]


def references_of(request: InputTokensRequest) -> list[str]:
    """Return the ids of the items that the request's input refers to."""
    ids = (item.get("id") for item in items_of(request) if item.get("type") == "item_reference")
    return [item_id for item_id in ids if isinstance(item_id, str)]


def own_items(request: ResponsesRequest, earlier: Earlier) -> list[dict[str, Any]]:
    """Return the items of the request's own input. Items without an id get one; references are replaced by their items.

    Raises ApiError 404 for a reference to an item that is not stored.
    """
    items = []
    for i, item in enumerate(items_of(request)):
        name = item.get("id")
        if isinstance(name, str) and len(name) > MAX_NAME:
            raise ApiError(f"input[{i}].id: at most {MAX_NAME} characters", param="input")
        if item.get("type") == "item_reference":
            referenced = earlier.referenced.get(name) if isinstance(name, str) else None
            if referenced is None:
                cause = f"input[{i}]: the item {str(name)[:80]!r} is not stored"
                raise not_found(f"{cause}; send the item itself, or store: false", "input", "item_not_found")
            items.append(referenced)
        else:
            own_item = {"type": "message", **item}
            if not isinstance(name, str):
                prefix = _PREFIXES.get(str(own_item["type"]), "item")
                own_item["id"] = f"{prefix}_{secrets.token_hex(16)}"
            items.append(own_item)
    return items


def to_chat(
    request: ResponsesRequest, previous: Sequence[dict[str, Any]], new_items: Sequence[dict[str, Any]]
) -> ChatRequest:
    """Return the chat that the request stands for, after the items of earlier responses. Raises ApiError 400."""
    check(request)
    if len(previous) + len(new_items) > MAX_MESSAGES:
        cause = f"input: up to {MAX_MESSAGES} items with those of earlier responses"
        raise ApiError(f"{cause}, not {len(previous) + len(new_items)}", param="input")
    conversation = Conversation()
    if request.instructions:
        conversation.add("system", request.instructions)
    for name, items in (("the input of an earlier response", previous), ("input", new_items)):
        for i, item in enumerate(items):
            _add(conversation, item, f"{name}[{i}]")
    fields = {name: getattr(request, name) for name in OneOutputFields.__struct_fields__}
    return ChatRequest(
        **fields, messages=conversation.messages, model=request.model, max_completion_tokens=request.max_output_tokens,
        stream=request.stream, priority=request.priority, cache_salt=request.cache_salt,
        chat_template_kwargs=request.chat_template_kwargs, response_format=_format_of(request.text),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())] or None,
        logprobs=_has_logprobs(request), top_logprobs=request.top_logprobs,
        tool_choice=_choice(request.tool_choice), parallel_tool_calls=request.parallel_tool_calls,
    )  # fmt: skip


def _add(conversation: Conversation, item: dict[str, Any], where: str) -> None:
    """Add an item to the conversation."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise ApiError(f"{where}.role: one of {', '.join(_ROLES)}", param="input")
        conversation.add(role, plain_text(item.get("content"), f"{where}.content", TEXT_PARTS, "input"))
    elif kind == "function_call":
        call_id = item.get("call_id")
        conversation.call(
            call_id if call_id is not None else item.get("id"), item.get("name"), item.get("arguments"), where
        )
    elif kind == "function_call_output":
        call_id = checked_text(item.get("call_id"), f"{where}.call_id", "input")
        conversation.result(call_id, plain_text(item.get("output"), f"{where}.output", TEXT_PARTS, "input"))
    elif kind == "reasoning":
        conversation.think(_reasoning(item, where))
    else:
        cause = f"{where}.type: {str(kind)[:64]!r} is not supported"
        raise ApiError(f"{cause}; use message, function_call, function_call_output or reasoning", param="input")


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Return the text of a reasoning item: its content, else what this server encoded, else its summary."""
    if item.get("content"):
        return _joined(item["content"], f"{where}.content", "reasoning_text")
    encoded = item.get("encrypted_content")
    if encoded is not None:
        encoded = checked_text(encoded, f"{where}.encrypted_content", "input")
        try:
            return base64.b64decode(encoded, validate=True).decode()
        except (binascii.Error, ValueError):
            cause = f"{where}.encrypted_content: it is not of this server; send the item without it"
            raise ApiError(cause, param="input") from None
    return _joined(item.get("summary") or [], f"{where}.summary", "summary_text")


def _joined(parts: Any, where: str, kind: str) -> str:
    content = plain_text(parts, where, {kind: "text"}, "input")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def encoded_reasoning(text: str) -> str:
    """Return the value of `encrypted_content`: the text in base64, which clients return unread."""
    return base64.b64encode(text.encode(errors="replace")).decode()


def _format_of(text: TextOptions | None) -> ResponseFormat | None:
    form = None if text is None else text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_schema":
        schema = JsonSchema(name=form.name, description=form.description, schema=form.schema, strict=form.strict)
        return ResponseFormat(type=form.type, json_schema=schema)
    return ResponseFormat(type=form.type)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        cause = f"{where}.type: {str(tool.get('type'))[:64]!r} is not supported, only function"
        raise unsupported(cause, f"{where}.type")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), tool.get("strict"))


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return the choice in the form of chats."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools: Any = choice.get("tools")
        listed = [_choice(x) for x in tools] if isinstance(tools, Sequence) and not isinstance(tools, str) else None
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": listed}}
    cause = f"tool_choice.type: {str(choice.get('type'))[:64]!r} is not supported, only function and allowed_tools"
    raise unsupported(cause, "tool_choice")


# The names of fields in errors of chats, as regular expressions, and those of this API.
NAMES = (
    (r"messages[\w.\[\]]*", "input"), ("max_completion_tokens|max_tokens", "max_output_tokens"),
    (r"response_format\.json_schema", "text.format"), ("response_format|structured_outputs", "text.format"),
    ("reasoning_effort", "reasoning.effort"), (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.allowed_tools", "tool_choice"),
)  # fmt: skip
