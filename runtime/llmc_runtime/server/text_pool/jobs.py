"""The jobs of a text process: converting a request body to checked fields, and those to prompts.

text_worker calls this module in the text process, one job at a time; endpoints use its checks of small requests, too.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from llmc_runtime.prompts import Prompt
from llmc_runtime.server import api_routes as api
from llmc_runtime.server.api_routes import PostRoute
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.pooled_prompts import PooledPrompts, require_pooled
from llmc_runtime.server.prompting import Prompting, limited, prompts_in
from llmc_runtime.server.requests.messages_request import CountRequest, MessagesRequest
from llmc_runtime.server.requests.messages_request import to_chat as of_messages
from llmc_runtime.server.requests.parse import check_model, parse
from llmc_runtime.server.requests.pooling_request import Pooled, check_pooled, without_texts
from llmc_runtime.server.requests.request_fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from llmc_runtime.server.requests.responses_request import (
    Earlier,
    InputTokensRequest,
    ResponsesRequest,
    own_items,
    references_of,
    to_chat,
    to_responses_request,
)
from llmc_runtime.server.requests.sampling_fields import check_silent, of_chat, of_completion
from llmc_runtime.server.text_pool import text_messages as m
from llmc_runtime.server.tool_calls.definitions import tools_of
from llmc_runtime.server.tool_calls.history import calls_in
from llmc_runtime.server.tool_calls.parser_select import OutputFormats, select_formats
from llmc_runtime.server.tool_calls.response_plan import plan_of
from llmc_runtime.text.bounded_encode import longest_token
from llmc_runtime.text.tokenizer import Tokenizer

T = TypeVar("T", bound=msgspec.Struct)


@dataclass
class Job:
    """A checked body whose prompts are still to be tokenized: `prompts` raises ApiError 400.

    Its argument is the JSON of the items of earlier responses. `done` is complete once the prompts have been taken.
    """

    parsed: m.Parsed
    prompts: Callable[[bytes | bytearray], Iterator[Prompt]]
    done: m.Done = field(default_factory=m.Done)


class TextJobs:
    """Runs the jobs for one served model. `unknown` is the number of unknown fields in the last body."""

    def __init__(self, spec: m.TextProcessConfig) -> None:
        self._spec, self.unknown = spec, 0
        self._tokenizer = None if spec.tokenizer is None else _tokenizer(spec, spec.tokenizer)
        self._formats = select_formats(self._tokenizer, spec.template, spec.tool_calls, spec.reasoning)
        longest = None if self._tokenizer is None else longest_token(self._tokenizer)
        self._prompting = Prompting(
            self._tokenizer, spec.vocab_size, spec.template, spec.max_model_len, longest, spec.variables
        )
        spec.tokenizer = None

    def completion(self, body: bytearray) -> Job:
        """Parse and check a completion, except for its prompts. Raises ApiError."""
        request = self._parse(body, CompletionRequest)
        check_silent(request)
        check_model(request.model, self._spec.names)
        of_completion(request, self._spec)
        count, known = prompts_in(request.prompt)
        parsed = _parsed(msgspec.structs.replace(request, prompt=""), prompts=count, known=known)
        limit = self._spec.max_prompt_tokens
        return Job(parsed, lambda earlier: limited(self._prompting.completion(request), limit, "prompt"))

    def chat(self, body: bytearray) -> Job:
        """Parse and check a chat, except for its messages. Raises ApiError."""
        request = self._parse(body, ChatRequest)
        rest = msgspec.structs.replace(
            request, messages=[], documents=None, chat_template_kwargs=None, reasoning_effort=None
        )
        return self._chat(request, rest, lambda earlier: (request, []))

    def response(self, body: bytearray) -> Job:
        """Parse and check a request for a response, except for its input. Raises ApiError."""
        request = self._parse(body, ResponsesRequest)
        rest = msgspec.structs.replace(request, input=[], chat_template_kwargs=None)

        def whole(earlier: bytes | bytearray) -> tuple[ChatRequest, list[bytes]]:
            chat, items = continued(request, earlier)
            stores = self._spec.stores and request.store is not False
            return chat, list(map(msgspec.json.encode, items)) if stores else []

        return self._chat(to_chat(rest, [], []), rest, whole, references_of(request))

    def input_tokens(self, body: bytearray) -> Job:
        """Parse and check a request to count the tokens of an input, except for the input. Raises ApiError."""
        request = to_responses_request(self._parse(body, InputTokensRequest))
        rest = msgspec.structs.replace(request, input=[], chat_template_kwargs=None)
        check_model(request.model, self._spec.names)
        counted(to_chat(rest, [], []), self._formats)

        def prompts(earlier: bytes | bytearray) -> Iterator[Prompt]:
            chat, _ = continued(request, earlier)
            yield Prompt(self._prompting.whole_ids(*counted(chat, self._formats)), None)

        return Job(_parsed(rest, references=references_of(request)), prompts)

    def message(self, body: bytearray) -> Job:
        """Parse and check a request for a message, except for its messages. Raises ApiError."""
        request = self._parse(body, MessagesRequest)
        chat = of_messages(request)
        rest = msgspec.structs.replace(request, messages=[], system=None, chat_template_kwargs=None)
        return self._chat(chat, rest, lambda earlier: (chat, []))

    def pooled(self, kind: type[Any], body: bytearray) -> Job:
        """Parse and check a request to a model that pools, except for its texts. Raises ApiError."""
        request: Pooled = self._parse(body, kind)
        check_pooled(request)
        check_model(request.model, self._spec.names)
        pooling = require_pooled(request, self._spec.pooling)
        prompts = PooledPrompts(self._prompting, pooling, self._spec.max_prompt_tokens)
        return Job(_parsed(without_texts(request)), lambda earlier: prompts.of(request))

    def _chat(
        self,
        request: ChatRequest,
        rest: msgspec.Struct,
        whole: Callable[[bytes | bytearray], tuple[ChatRequest, list[bytes]]],
        references: Sequence[str] = (),
    ) -> Job:
        """Check a chat. `rest` is the request without the fields of the prompt; `whole` returns the chat with all
        messages, those of earlier responses first, and Done.items.
        """
        check_model(request.model, self._spec.names)
        of_chat(request, self._spec)
        plan, done = plan_of(request, self._formats), m.Done()
        tools = None if plan.tools is None else plan.tools.shown

        def prompts(earlier: bytes | bytearray) -> Iterator[Prompt]:
            chat, done.items = whole(earlier)
            prompt = self._prompting.chat(chat, tools, self._formats.short_ids)
            after = plan.after(prompt, chat)
            done.reasons = after.reasoning is not None
            done.opened = after.opened
            done.earlier = calls_in(chat.messages)
            yield prompt

        return Job(_parsed(rest, references=list(references)), prompts, done)

    def answer(self, route: PostRoute, body: bytearray) -> bytes:
        """Return the JSON response of one of ANSWERS. Raises ApiError."""
        request: Any = self._parse(body, route.request)
        check_model(request.model, self._spec.names)
        return msgspec.json.encode(ANSWERS[route](self._prompting, self._formats, request))

    def _parse(self, body: bytearray, kind: type[T]) -> T:
        self.unknown = 0
        check_size(body)
        request = parse(body, kind, self._count)
        body.clear()
        return request

    def _count(self, unknown: int) -> None:
        self.unknown = unknown


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


def _counted_json(body: bytes | bytearray) -> tuple[int, int]:
    """Return how many objects and lists, and how many values, a JSON text has at most."""
    bare = _STRING.sub(b"", body)
    containers = bare.count(b"{") + bare.count(b"[")
    return containers, containers + bare.count(b",")


def check_size(body: bytes | bytearray) -> None:
    """Raise ApiError 400 if a body has more objects and lists than MAX_CONTAINERS, or more values than MAX_VALUES."""
    if body.count(b",") + body.count(b"{") + body.count(b"[") < m.MAX_CONTAINERS:
        return
    containers, values = _counted_json(body)
    if containers > m.MAX_CONTAINERS:
        cause = f"the body has {containers} objects and lists; at most {m.MAX_CONTAINERS} are allowed"
        raise ApiError(f"{cause}; send less in one request", code="body_too_complex")
    if values > m.MAX_VALUES:
        cause = f"the body has {values} values; at most {m.MAX_VALUES} are allowed"
        raise ApiError(f"{cause}; send less in one request", code="body_too_complex")


def counted(chat: ChatRequest, formats: OutputFormats) -> tuple[ChatRequest, list[dict[str, Any]] | None, bool]:
    """Check a chat whose tokens are counted and return the arguments of Prompting.whole_ids. Raises ApiError 400."""
    tools = plan_of(chat, formats).tools
    return chat, None if tools is None else tools.shown, formats.short_ids


def continued(request: ResponsesRequest, encoded: bytes | bytearray) -> tuple[ChatRequest, list[dict[str, Any]]]:
    """Return the chat after the earlier items, whose JSON is `encoded` (see Earlier), and the request's own items.

    Raises ApiError 400, and 404 for an item that is not stored.
    """
    check_size(encoded)
    earlier = msgspec.json.decode(encoded or b"{}", type=Earlier)
    items = own_items(request, earlier)
    return to_chat(request, earlier.previous, items), items


def _tokenize(prompting: Prompting, formats: OutputFormats, request: TokenizeRequest) -> dict[str, Any]:
    """Tokenize a text or a conversation. Tools next to a text are checked as well, although no template shows them."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("send either prompt or messages", param="prompt")
    tools = tools_of(request.tools, None, None)
    if request.prompt is not None:
        ids = prompting.encode(request.prompt, request.add_special_tokens is not False)
    else:
        ids = list(prompting.chat(request, None if tools is None else tools.shown, formats.short_ids).ids)
    names = prompting.tokenizer.tokens(ids) if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": prompting.length, "tokens": ids, "token_strs": names}


def _detokenize(prompting: Prompting, formats: OutputFormats, request: DetokenizeRequest) -> dict[str, Any]:
    return {"prompt": prompting.decode(request.tokens)}


def _count_tokens(prompting: Prompting, formats: OutputFormats, request: CountRequest) -> dict[str, Any]:
    return {"input_tokens": len(prompting.whole_ids(*counted(of_messages(request), formats)))}


# The routes for tokenization: what makes their responses, in a thread of the server or in a text process.
ANSWERS: Mapping[PostRoute, Callable[[Prompting, OutputFormats, Any], dict[str, Any]]] = MappingProxyType(
    {api.TOKENIZE: _tokenize, api.DETOKENIZE: _detokenize, api.COUNT_TOKENS: _count_tokens}
)


def _tokenizer(spec: m.TextProcessConfig, text: str) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    return Tokenizer(Backend.from_str(text), spec.named_tokens, spec.chat_templates)


def _parsed(rest: msgspec.Struct, **more: Any) -> m.Parsed:
    """Return a checked body; `rest` is the request without the fields of the prompt. Raises ApiError 400."""
    ids: list[int] | None = getattr(rest, "allowed_token_ids", None)
    if ids is None:
        return m.Parsed(_fields(rest), **more)
    rest = msgspec.structs.replace(rest, allowed_token_ids=None)
    return m.Parsed(_fields(rest), array("I", ids).tobytes(), **more)


def _fields(request: msgspec.Struct) -> bytes:
    """Encode the fields as JSON, which the server process decodes, and keeps while the request is open.

    Raises ApiError 400, naming the largest field, if they are too large for that.
    """
    encoded = msgspec.json.encode(request)
    containers, values = _counted_json(encoded)
    if len(encoded) > m.MAX_FIELD_BYTES or containers > m.MAX_FIELD_CONTAINERS or values > m.MAX_FIELD_VALUES:
        sizes = {name: len(msgspec.json.encode(getattr(request, name))) for name in request.__struct_fields__}
        name = max(sizes, key=lambda name: sizes[name])
        cause = f"{name}: {sizes[name]} bytes of JSON; all fields but the prompt have at most {m.MAX_FIELD_BYTES} bytes"
        limits = f"{m.MAX_FIELD_CONTAINERS} objects and lists, and {m.MAX_FIELD_VALUES} values"
        raise ApiError(f"{cause}, {limits}; shorten it", param=name)
    return encoded
