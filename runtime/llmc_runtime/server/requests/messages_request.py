"""The bodies of /v1/messages and /v1/messages/count_tokens as msgspec types, and their conversion to chat requests.

Names are those of Anthropic's Messages API. Unsupported fields and values that would change the response are refused
with an error that names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import msgspec

from llmc_runtime.sched.sampling_params import MAX_STOP_STRINGS
from llmc_runtime.server.http.errors import ApiError, unsupported
from llmc_runtime.server.requests.conversation import Content, Conversation, checked_text, function_tool, plain_text
from llmc_runtime.server.requests.request_fields import (
    GUIDED,
    MAX_PARTS,
    MAX_TOOLS,
    NOT_OF_ONE_OUTPUT,
    ChatRequest,
    JsonSchema,
    MaxCompletionTokens,
    Messages,
    Name,
    OneOutputFields,
    Priority,
    ResponseFormat,
    Salt,
    TemplateKwargs,
    function_properties,
    sampling_fields,
    schema_of,
    tools_of,
)

_TEXTS: Mapping[str, str] = MappingProxyType({"text": "text"})
_CHOICES: Mapping[str, str] = MappingProxyType({"auto": "auto", "any": "required", "none": "none"})
# Fields of a tool that would change the prompt or who calls it, and what to do instead.
_TOOL_FIELDS: Mapping[str, str] = MappingProxyType(
    {"defer_loading": "leave tools out until they are needed", "input_examples": "show examples in the description"}
)

ClientTools: Any = tools_of(
    schema_of(
        properties={"type": {"enum": ["custom", None]}, **function_properties("input_schema", optional=False)},
        required=["name", "input_schema"],
    )
)
Blocks = Annotated[list[dict[str, Any]], schema_of(maxItems=MAX_PARTS)]
StopSequences = Annotated[list[str], schema_of(maxItems=MAX_STOP_STRINGS)]


class ToolChoiceOptions(msgspec.Struct, kw_only=True):
    """`type`: auto, any, none, or tool with a `name`."""

    type: Name
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """`type`: enabled, adaptive or disabled. The model decides how long it thinks; `budget_tokens` has no effect.

    `display`: omitted leaves the text out of the response.
    """

    type: Name
    budget_tokens: MaxCompletionTokens | None = None
    display: Name | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """`type`: json_schema."""

    type: Name
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """`effort` is the reasoning effort of chats. Requests with `task_budget` are rejected, as models do not see it."""

    effort: Name | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class ContextManagement(msgspec.Struct, kw_only=True):
    """Only edits that change nothing are supported: those that keep all thinking."""

    edits: Annotated[list[dict[str, Any]], schema_of(maxItems=MAX_TOOLS)] | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    refused: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "container": "code is not executed", "mcp_servers": "the server calls no tools",
            "n": "send several requests",
            **dict.fromkeys(("response_format", "structured_outputs", *GUIDED.values()), "use output_config.format"),
            **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), "use /v1/chat/completions"),
            "prompt": "use messages", "max_completion_tokens": "use max_tokens",
            "stop": "use stop_sequences", "reasoning_effort": "use output_config.effort",
            "logprobs": "use /v1/chat/completions", "prompt_logprobs": "use /v1/completions", "best_of": "use n",
        }
    )  # fmt: skip
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id"}
    )

    messages: Messages
    model: Name | None = None
    system: str | Blocks | None = None
    tools: ClientTools | None = None
    tool_choice: ToolChoiceOptions | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: TemplateKwargs | None = None


_Sampled: Any = sampling_fields("_Sampled", NOT_OF_ONE_OUTPUT, CountRequest)


class MessagesRequest(_Sampled, msgspec.Struct, kw_only=True):
    """POST /v1/messages."""

    max_tokens: MaxCompletionTokens
    stop_sequences: StopSequences | None = None
    stream: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


# The names of fields in errors of chats, as regular expressions, and those of this API.
NAMES = (
    (r"messages\[\d+\](?:\.tool_calls|(?=: the chat template))", "messages"), ("max_completion_tokens", "max_tokens"),
    (r"response_format\.json_schema", "output_config.format"),
    ("response_format|structured_outputs", "output_config.format"), ("stop", "stop_sequences"),
    ("reasoning_effort", "output_config.effort"), (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
)  # fmt: skip


def to_chat(request: CountRequest) -> ChatRequest:
    """Return the chat that the request stands for, without `max_tokens`. Raises ApiError 400.

    A text of the model at the end of the messages is the start of its answer.
    """
    conversation = Conversation()
    if request.system:
        conversation.add("system", plain_text(request.system, "system", _TEXTS, "system"))
    for i, message in enumerate(request.messages):
        _add(conversation, message, f"messages[{i}]")
    last = conversation.messages[-1] if conversation.messages else {}
    continues = last.get("role") == "assistant" and bool(last.get("content")) and "tool_calls" not in last
    fields: dict[str, Any] = {}
    if isinstance(request, MessagesRequest):
        fields = {name: getattr(request, name) for name in OneOutputFields.__struct_fields__}
        fields |= {"stream": request.stream, "priority": request.priority, "cache_salt": request.cache_salt}
        fields["stop"] = request.stop_sequences
    choice = request.tool_choice
    if choice is not None and choice.type == "any" and not request.tools:
        raise ApiError("tool_choice: any needs tools", param="tool_choice")
    return ChatRequest(
        **fields, **_thinking(request), messages=conversation.messages, model=request.model,
        response_format=_format_of(request), continue_final_message=continues or None,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())] or None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
    )  # fmt: skip


def _add(conversation: Conversation, message: dict[str, Any], where: str) -> None:
    """Add a message to the conversation."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"{where}.role: user, assistant or system", param="messages")
    if not isinstance(content, list):
        conversation.add(role, plain_text(content, f"{where}.content", _TEXTS, "messages"))
    elif role == "assistant":
        _add_turn(conversation, content, f"{where}.content")
    elif role == "user":
        _add_user_blocks(conversation, content, f"{where}.content")
    else:
        _add_texts(conversation, role, content, f"{where}.content")


def _add_user_blocks(conversation: Conversation, blocks: list[Any], where: str) -> None:
    """Add texts and results of calls in their order; adjacent texts are one message."""
    texts: list[Any] = []
    for i, block in enumerate(blocks):
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            texts.append(block)
            continue
        _add_texts(conversation, "user", texts, where)
        texts = []
        call_id = checked_text(block.get("tool_use_id"), f"{where}[{i}].tool_use_id", "messages")
        content = block.get("content")
        result = "" if content is None else plain_text(content, f"{where}[{i}].content", _TEXTS, "messages")
        conversation.result(call_id, result)
    _add_texts(conversation, "user", texts, where)


def _add_texts(conversation: Conversation, role: str, blocks: list[Any], where: str) -> None:
    if blocks:
        conversation.add(role, plain_text(blocks, where, _TEXTS, "messages"))


def _add_turn(conversation: Conversation, blocks: list[Any], where: str) -> None:
    """Add a turn that a model has generated: its thinking, its texts (joined), and its calls."""
    thoughts, texts, calls = [], [], []
    for i, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(checked_text(block.get("thinking"), f"{where}[{i}].thinking", "messages"))
        elif kind == "text":
            texts.append(checked_text(block.get("text"), f"{where}[{i}].text", "messages"))
        elif kind == "tool_use":
            calls.append((block.get("id"), block.get("name"), block.get("input"), f"{where}[{i}]"))
        else:
            cause = f"{where}[{i}].type: {str(kind)[:64]!r} is not supported, only text, thinking and tool_use"
            raise ApiError(cause, param="messages")
    if thoughts:
        conversation.think("".join(thoughts))
    content: Content = "".join(texts)
    if content or not (calls or thoughts):
        conversation.add("assistant", content)
    for call_id, name, arguments, place in calls:
        conversation.call(call_id, name, arguments, place)


def _thinking(request: CountRequest) -> dict[str, Any]:
    """Return the fields of a chat that control its reasoning."""
    thinking, effort = request.thinking, request.output_config and request.output_config.effort
    fields: dict[str, Any] = {"reasoning_effort": effort, "chat_template_kwargs": request.chat_template_kwargs}
    if thinking is None:
        return fields
    if thinking.type not in ("enabled", "adaptive", "disabled"):
        raise _refused("thinking.type", f"{thinking.type[:64]!r}, only enabled, adaptive and disabled", "thinking")
    if thinking.type == "disabled":
        return fields | {"reasoning_effort": "none"}
    on = {"enable_thinking": True, "thinking": True}  # the names that templates read
    fields["chat_template_kwargs"] = on | (request.chat_template_kwargs or {})
    if thinking.display not in (None, "summarized", "omitted"):
        raise _refused("thinking.display", f"{thinking.display[:64]!r}, only summarized and omitted", "thinking")
    if thinking.display == "omitted":
        fields["include_reasoning"] = False
    return fields


def _format_of(request: CountRequest) -> ResponseFormat | None:
    """Check the options of the output and the context, and return the output's format."""
    for edit in (request.context_management and request.context_management.edits) or ():
        if not str(edit.get("type")).startswith("clear_thinking_") or edit.get("keep") not in ("all", {"type": "all"}):
            raise _refused("context_management", "edits; leave messages out instead", "context_management")
    if request.output_config and request.output_config.task_budget:
        raise _refused("output_config.task_budget", "use max_tokens", "output_config")
    form = (request.output_config and request.output_config.format) or request.output_format
    if form is None:
        return None
    if form.type != "json_schema":
        raise _refused("output_config.format.type", f"{form.type[:64]!r}, only json_schema", "output_config.format")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema, strict=True))


def _refused(where: str, cause: str, param: str) -> ApiError:
    return unsupported(f"{where}: not supported: {cause}", param)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        cause = f"{str(tool['type'])[:64]!r}; describe the tool by name and input_schema, without a type"
        raise _refused(f"{where}.type", cause, f"{where}.type")
    for name, remedy in _TOOL_FIELDS.items():
        if tool.get(name):
            raise _refused(f"{where}.{name}", remedy, f"{where}.{name}")
    callers = tool.get("allowed_callers")
    if callers and (not isinstance(callers, list) or "direct" not in callers):
        raise _refused(f"{where}.allowed_callers", "code is not executed; include direct", f"{where}.allowed_callers")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), tool.get("strict"))


def _choice(choice: ToolChoiceOptions) -> str | dict[str, Any]:
    """Return the choice in the form of chats."""
    if choice.type == "tool":
        if not choice.name:
            raise ApiError("tool_choice.name: the name of one of the tools", param="tool_choice")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        raise _refused("tool_choice.type", f"{choice.type[:64]!r}, only auto, any, tool and none", "tool_choice")
    return _CHOICES[choice.type]
