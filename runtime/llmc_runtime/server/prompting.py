"""Converts the prompts of a request (texts, ids or conversations) to token ids, in threads or in a text process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.prompts import Prompt, require_tokenizer
from llmc_runtime.server.http.errors import ApiError, to_api_error
from llmc_runtime.server.requests.conversation import CONTENT
from llmc_runtime.server.requests.request_fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPTS,
    TEXT_PARTS,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from llmc_runtime.server.requests.sampling_fields import kept_tokens
from llmc_runtime.server.tool_calls.history import for_template
from llmc_runtime.text.bounded_encode import FIRST_CHARACTERS, TooLong, encode_bounded
from llmc_runtime.text.chat_template import ChatTemplate, choose_template, wrong_variable
from llmc_runtime.text.detokenizer import token_bytes
from llmc_runtime.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # plus those that the chat template names
CONTENT_ROLES = ("system", "developer", "user", "tool")  # whose messages have to have content
LIST_TOKENS = 262_144  # maximum for /tokenize and /detokenize, unless the model's context is longer
_FORMS = "a text, a list of texts, a list of token ids, or a list of lists of token ids, none of them empty"


T = TypeVar("T")


class Prompting:
    """Tokenizes for one model.

    `template` is the text or name of a chat template to use instead of the model's default. `length` is the model's
    maximum context in tokens; longer prompts are rejected during tokenization. `longest` is described in
    `text.bounded_encode.encode_bounded`. `variables` are those of the chat template that a request may replace.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        template: str | None,
        length: int,
        longest: int | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._tokenizer, self.vocab_size = tokenizer, vocab_size
        self.length, self._longest = length, longest
        self.list_tokens = max(LIST_TOKENS, length)
        self._template_option, self._default_variables = template, variables
        self._templates: dict[bool, ChatTemplate] = {}  # for chats with and without tools
        if template is not None:
            self._template(False)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises LlmcError E620 if the artifact has none."""
        return require_tokenizer(self._tokenizer)

    def check_length(self, text: str, keep: int | None = None) -> None:
        """Raise TooLong if a text has clearly more tokens than the context, or, if it is cut to `keep`, than lists of
        tokens may have. Only a long text is tokenized for that.
        """
        limit = self.length if keep is None else self.list_tokens
        if len(text) > limit * FIRST_CHARACTERS:
            self._ids(text, False, limit)

    def token_text(self, token: int) -> str:
        """Return the text of one id, or "token_id:N" without a tokenizer."""
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)

    def raw(self, token: int, text: str) -> bytes:
        """Return the bytes of an id with the text `text`. They are exact even if the token contains only part of a
        character.
        """
        raw = token_bytes(self._tokenizer, token) if self._tokenizer is not None and "\ufffd" in text else None
        return text.encode(errors="replace") if raw is None else raw

    def is_special(self, token: int) -> bool:
        """Return whether the token is special, and therefore left out of texts by default."""
        return self._tokenizer is not None and token in self._tokenizer.special_ids

    def unseen(self, prompt: Prompt) -> int:
        """Return how many special tokens the tokenizer has added before the prompt's text."""
        text, count = prompt.text or "", 0
        for token in prompt.ids:
            if not self.is_special(token) or text.startswith(self.token_text(token)):
                break
            count += 1
        return count

    def completion(self, request: CompletionRequest) -> Iterator[Prompt]:
        """Yield the prompts of a completion. Raises ApiError 400."""
        special = request.add_special_tokens is not False
        for text_or_ids in listed(request.prompt):
            with _errors("prompt"):
                prompt = self._prompt(text_or_ids, special, bool(request.echo), kept_tokens(request, self.length))
            yield prompt

    def chat(
        self, request: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]] | None = None, short_ids: bool = False
    ) -> Prompt:
        """Render a conversation and `tools` with the model's chat template, and tokenize the result.

        `short_ids` is described in tool_calls.history. Raises ApiError 400.
        """
        with _errors("messages"):
            text = self._chat_text(request, tools, short_ids)
            if isinstance(request, ChatRequest):
                keep = kept_tokens(request, self.length)
                ids = self._all_ids(text, False, keep, "messages")
                return Prompt(ids if keep is None else ids[keep], text)
            return Prompt(self._listed_ids(text, False, "messages"), text)

    def whole_ids(self, request: ChatRequest, tools: list[dict[str, Any]] | None, short_ids: bool) -> list[int]:
        """Return the tokens of a conversation, up to `list_tokens`, which may be more than the model takes. The
        arguments are those of `chat`."""
        with _errors("messages"):
            return self._listed_ids(self._chat_text(request, tools, short_ids), False, "messages")

    def _chat_text(
        self, request: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]] | None, short_ids: bool
    ) -> str:
        """Return a conversation rendered with the chat template. Raises ApiError 400, and LlmcError of the template."""
        messages = _checked(request.messages or [])
        variables = _variables(request.chat_template_kwargs or {})
        continues = bool(request.continue_final_message)
        generation_prompt = request.add_generation_prompt
        generation_prompt = not continues if generation_prompt is None else generation_prompt
        if isinstance(request, ChatRequest):
            variables |= {} if request.documents is None else {"documents": request.documents}
            variables |= {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
            if request.reasoning_effort == "none":
                variables.setdefault("enable_thinking", False)
        variables = {**self._default_variables, **variables}
        variables |= {"add_generation_prompt": generation_prompt, "continue_final_message": continues}
        return self._rendered(messages, tools, variables, short_ids)

    def encode(self, text: str, special: bool) -> list[int]:
        """Tokenize a text, for /tokenize. Raises ApiError 400 if it has more than `list_tokens` tokens."""
        with _errors("prompt"):
            return self._listed_ids(text, special, "prompt")

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, for /detokenize. Raises ApiError 400."""
        if len(ids) > self.list_tokens:
            raise ApiError(f"tokens: send at most {self.list_tokens} ids, not {len(ids)}", param="tokens")
        check_ids(ids, self.vocab_size, "tokens")
        with _errors("tokens"):
            return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _ids(self, text: str, special: bool, limit: int) -> list[int]:
        return encode_bounded(self.tokenizer, text, limit, add_special_tokens=special, longest=self._longest)

    def _listed_ids(self, text: str, special: bool, param: str) -> list[int]:
        try:
            ids = self._ids(text, special, self.list_tokens)
        except TooLong:
            ids = None
        if ids is None or len(ids) > self.list_tokens:
            cause = f"{param}: more than {self.list_tokens} tokens; send the text in parts"
            raise ApiError(cause, param=param, code="context_length_exceeded")
        return ids

    def _all_ids(self, text: str, special: bool, keep: slice | None, param: str) -> list[int]:
        """Tokenize a text, which must fit the context with a token of output unless it is cut to `keep`."""
        longest = max(1, self.length - 1)
        return self._ids(text, special, longest) if keep is None else self._listed_ids(text, special, param)

    def _prompt(self, text_or_ids: Any, special: bool, echo: bool, keep: slice | None) -> Prompt:
        text = text_or_ids if isinstance(text_or_ids, str) else None
        if text is None:
            check_ids(text_or_ids, self.vocab_size, "prompt")
        ids = text_or_ids if text is None else self._all_ids(text, special, keep, "prompt")
        truncated = ids if keep is None else ids[keep]
        if text is not None and len(truncated) == len(ids):
            return Prompt(ids, text)
        if not echo or self._tokenizer is None:
            return Prompt(truncated)
        return Prompt(truncated, self._tokenizer.decode(truncated, skip_special_tokens=False))

    def _template(self, tools: bool) -> ChatTemplate:
        template = self._templates.get(tools)
        if template is None:
            tokenizer = self.tokenizer
            text = choose_template(tokenizer.chat_templates, self._template_option, () if tools else None)
            template = self._templates[tools] = ChatTemplate(text, tokenizer.named_tokens)
        return template

    def _rendered(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any], short: bool
    ) -> str:
        template = self._template(tools is not None)
        if (name := template.unshown({**variables, "tools": tools})) is not None:
            cause = f"{name}: the model's chat template does not show {name}"
            raise ApiError(
                f"{cause}. Try: serve with --chat-template FILE, with a template that shows them", param=name
            )
        _check_roles(messages, template.features.roles)
        return template.render(for_template(messages, template.features, short), tools=tools, **variables)


@contextmanager
def _errors(param: str) -> Iterator[None]:
    """Context manager that converts LlmcErrors to ApiErrors about the field `param`."""
    try:
        yield
    except LlmcError as e:
        raise to_api_error(e, param) from None


def prompts_in(prompt: str | list[Any]) -> tuple[int, int]:
    """Return how many prompts the field contains, and the number of token ids if it is a single list of ids.

    The value may still turn out to be malformed.
    """
    if isinstance(prompt, str) or not prompt:
        return 1, 0
    return (1, len(prompt)) if isinstance(prompt[0], int) else (len(prompt), 0)


def limited(prompts: Iterator[Prompt], limit: int, param: str) -> Iterator[Prompt]:
    """Yield the prompts of the field `param`. Raises ApiError 400 if they have more than `limit` tokens together."""
    total = 0
    for prompt in prompts:
        total += len(prompt.ids)
        if total > limit:
            cause = f"the prompts have more than {limit} tokens together, which the server takes at a time"
            raise ApiError(f"{cause}; send several requests", param=param)
        yield prompt


def listed(prompt: str | list[Any], param: str = "prompt", maximum: int = MAX_PROMPTS) -> list[Any]:
    """Return the prompts of the field `param` as a list of texts and lists of ids, at most `maximum`.

    Raises ApiError 400.
    """
    if isinstance(prompt, str) or (prompt and _is_ids(prompt)):
        return [prompt]
    if not prompt or not all(isinstance(item, str) or (item and _is_ids(item)) for item in prompt):
        raise ApiError(f"{param}: {_FORMS}", param=param)
    if len(prompt) > maximum:
        raise ApiError(f"{param}: {len(prompt)} prompts, at most {maximum} a request", param=param)
    return prompt


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def check_ids(ids: list[int], size: int, param: str) -> None:
    """Raise ApiError 400 if an id is outside a vocabulary of `size`."""
    if ids and (min(ids) < 0 or max(ids) >= size):
        raise ApiError(f"{param}: token ids of the vocabulary, 0 to {size - 1}", param=param)


def _checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check the number of messages and content parts, and convert the contents to text. Raises ApiError 400."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise ApiError(f"messages: 1 to {MAX_MESSAGES} of them, not {len(messages)}", param="messages")
    parts = sum(len(content) for message in messages if isinstance(content := message.get("content"), list))
    if parts > MAX_PARTS:
        raise ApiError(f"messages: up to {MAX_PARTS} parts of contents together, not {parts}", param="messages")
    return [_with_text(message, i) for i, message in enumerate(messages)]


def _check_roles(messages: list[dict[str, Any]], template_roles: frozenset[str]) -> None:
    """Raise ApiError 400 for a role that is neither one of OpenAI's nor named by the chat template.

    Templates copy a role into the prompt unchanged.
    """
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not (role in ROLES or role in template_roles):
            allowed = ", ".join((*ROLES, *sorted(template_roles - {*ROLES})))
            raise ApiError(f"messages[{i}].role: one of {allowed}", param=f"messages[{i}].role")


def _with_text(message: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the message with its content parts as text parts; raises ApiError 400 for content that is neither.

    Missing content of the model's messages becomes "", unless there are tool calls.
    """
    content = message.get("content")
    if content is None and message.get("role") not in CONTENT_ROLES:
        return message if message.get("tool_calls") else {**message, "content": ""}
    if isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise ApiError(f"messages[{i}].content: {CONTENT}", param=f"messages[{i}].content")
    parts = [{"type": "text", "text": part} if isinstance(part, str) else _part(part) for part in content]
    if None in parts:
        other = content[parts.index(None)]
        kind = other.get("type") if isinstance(other, dict) else None
        named = ""
        if isinstance(kind, str) and kind not in TEXT_PARTS:
            named = f"parts of type {kind[:64]!r} are not supported, "
        cause = f'messages[{i}].content: {named}only parts of the form {{"type": "text", "text": TEXT}}'
        raise ApiError(cause, param=f"messages[{i}].content")
    return {**message, "content": parts}


def _part(part: Any) -> dict[str, Any] | None:
    """Return a text part under its canonical names; None for other parts."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    return {**part, "type": "text", "text": text} if isinstance(text, str) else None


def _variables(kwargs: dict[str, Any]) -> dict[str, Any]:
    if (bad := wrong_variable(kwargs)) is not None:
        raise ApiError(f"chat_template_kwargs: {bad[:40]!r} cannot be set there", param="chat_template_kwargs")
    return dict(kwargs)
