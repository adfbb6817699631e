"""Converts the prompts of a request (texts, ids or conversations) to token ids, in threads or in a text process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.prompts import TOKENIZE, Prompt
from llmc_runtime.server.http.errors import ApiError, to_api_error
from llmc_runtime.server.requests.field_limits import MAX_MESSAGES, MAX_PARTS, MAX_PROMPTS
from llmc_runtime.server.requests.request_fields import ChatRequest, CompletionRequest, TokenizeRequest
from llmc_runtime.server.tool_calls.history import for_template
from llmc_runtime.text.bounded_encode import TooLong, encode_bounded
from llmc_runtime.text.chat_template import ChatTemplate, choose_template
from llmc_runtime.text.detokenizer import token_bytes
from llmc_runtime.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # plus those that the chat template names
LIST_TOKENS = 262_144  # maximum for /tokenize and /detokenize, unless the model's context is longer
_RESERVED = frozenset({"self", "messages", "tools", "documents", "chat_template", "add_generation_prompt"})
# Types of text parts -> the field that contains the text.
_TEXTS = MappingProxyType({"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"})
_FORMS = "prompt: a text, a list of texts, a list of token ids, or a list of lists of token ids, none of them empty"


T = TypeVar("T")


class Prompting:
    """Tokenizes for one model. The coroutine methods work in threads of `pool`.

    `template` is the text or name of a chat template to use instead of the model's default. `length` is the model's
    maximum context in tokens; longer prompts are rejected during tokenization. `longest` is described in
    `text.bounded.encode_bounded`.
    """

    def __init__(
        self,
        given: Tokenizer | None,
        vocab_size: int,
        template: str | None,
        pool: Executor | None,
        length: int,
        longest: int | None = None,
    ) -> None:
        self._given, self._vocab_size, self._pool = given, vocab_size, pool
        self._length, self._longest = length, longest
        self.list_tokens = max(LIST_TOKENS, length)
        self._wanted, self._templates = template, dict[bool, ChatTemplate]()  # for chats with and without tools
        if template is not None:
            self._template(False)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises LlmcError E620 if the artifact has none."""
        if self._given is None:
            raise LlmcError("E620", "the artifact has no tokenizer.json", TOKENIZE)
        return self._given

    def spelled(self, token: int) -> str:
        """Return the text of one id, or "token_id:N" without a tokenizer."""
        return f"token_id:{token}" if self._given is None else self._given.spelled(token)

    def raw(self, token: int, text: str) -> bytes:
        """Return the bytes of an id with the text `text`. They are exact even if the token contains only part of a
        character.
        """
        found = token_bytes(self._given, token) if self._given is not None and "\ufffd" in text else None
        return text.encode(errors="replace") if found is None else found

    def is_special(self, token: int) -> bool:
        """Return whether the token is special, and therefore left out of texts by default."""
        return self._given is not None and token in self._given.special_ids

    def unseen(self, prompt: Prompt) -> int:
        """Return how many special tokens the tokenizer has added before the prompt's text."""
        text, count = prompt.text or "", 0
        for token in prompt.ids:
            if not self.is_special(token) or text.startswith(self.spelled(token)):
                break
            count += 1
        return count

    async def of_completion(self, asked: CompletionRequest) -> list[Prompt]:
        """Return the prompts of a completion, with their texts if available. Raises ApiError 400."""
        listed(asked.prompt)
        return await self._off(lambda: list(self.completion(asked)))

    async def of_chat(
        self, asked: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]] | None = None, short_ids: bool = False
    ) -> Prompt:
        """Run `chat` in a thread."""
        return await self._off(lambda: self.chat(asked, tools, short_ids))

    async def encode(self, text: str, special: bool) -> list[int]:
        """Tokenize a text. Raises ApiError 400 if it has more than `list_tokens` tokens."""
        return await self._off(lambda: self.listed_ids(text, special))

    async def decode(self, ids: list[int]) -> str:
        """Return the text of token ids. Raises ApiError 400 if one is not in the vocabulary, or if there are too
        many.
        """
        return await self._off(lambda: self.text_of(ids))

    def completion(self, asked: CompletionRequest) -> Iterator[Prompt]:
        """Yield the prompts of a completion. Raises ApiError 400."""
        special = asked.add_special_tokens is not False
        for one in listed(asked.prompt):
            with _errors("prompt"):
                prompt = self._prompt(one, special, bool(asked.echo))
            yield prompt

    def chat(
        self, asked: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]] | None = None, short_ids: bool = False
    ) -> Prompt:
        """Render a conversation and `tools` with the model's chat template, and tokenize the result.

        `short_ids` is described in tools.history. Raises ApiError 400.
        """
        messages = _checked(asked.messages or [])
        variables = _variables(asked.chat_template_kwargs or {})
        continues = bool(asked.continue_final_message)
        begins = asked.add_generation_prompt if asked.add_generation_prompt is not None else not continues
        if isinstance(asked, ChatRequest):
            variables |= {} if asked.documents is None else {"documents": asked.documents}
            variables |= {} if asked.reasoning_effort is None else {"reasoning_effort": asked.reasoning_effort}
            if asked.reasoning_effort == "none":
                variables.setdefault("enable_thinking", False)
        variables |= {"add_generation_prompt": begins, "continue_final_message": continues}
        with _errors("messages"):
            text = self._rendered(messages, tools, variables, short_ids)
            if isinstance(asked, ChatRequest):
                return Prompt(self._ids(text, False, self._length), text)
            return Prompt(self._listed_ids(text, False, "messages"), text)

    def listed_ids(self, text: str, special: bool) -> list[int]:
        """Tokenize a text for /tokenize. Raises ApiError 400 if it has more than `list_tokens` tokens."""
        with _errors("prompt"):
            return self._listed_ids(text, special, "prompt")

    def text_of(self, ids: list[int]) -> str:
        """Return the text of token ids, for /detokenize. Raises ApiError 400."""
        if len(ids) > self.list_tokens:
            raise ApiError(f"tokens: {len(ids)} token ids, at most {self.list_tokens}", param="tokens")
        check_ids(ids, self._vocab_size, "tokens")
        with _errors("tokens"):
            return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _ids(self, text: str, special: bool, most: int) -> list[int]:
        return encode_bounded(self.tokenizer, text, most, add_special_tokens=special, longest=self._longest)

    def _listed_ids(self, text: str, special: bool, param: str) -> list[int]:
        try:
            ids = self._ids(text, special, self.list_tokens)
        except TooLong:
            ids = None
        if ids is None or len(ids) > self.list_tokens:
            cause = f"{param}: more than {self.list_tokens} tokens; send the text in parts"
            raise ApiError(cause, param=param, code="context_length_exceeded")
        return ids

    def _prompt(self, given: Any, special: bool, echo: bool) -> Prompt:
        if isinstance(given, str):
            return Prompt(self._ids(given, special, self._length), given)
        check_ids(given, self._vocab_size, "prompt")
        if not echo or self._given is None:
            return Prompt(given)
        return Prompt(given, self._given.decode(given, skip_special_tokens=False))

    def _template(self, tools: bool) -> ChatTemplate:
        found = self._templates.get(tools)
        if found is None:
            tokenizer = self.tokenizer
            text = choose_template(tokenizer.chat_templates, self._wanted, () if tools else None)
            found = self._templates[tools] = ChatTemplate(text, tokenizer.named_tokens)
        return found

    def _rendered(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any], short: bool
    ) -> str:
        template = self._template(tools is not None)
        if tools is not None and not template.reads.tools:
            cause = "tools: the model's chat template has no place for them"
            raise ApiError(f"{cause}. Try: serve with --chat-template FILE, one that shows tools", param="tools")
        _check_roles(messages, template.reads.roles)
        return template.render(for_template(messages, template.reads, short), tools=tools, **variables)

    async def _off(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


@contextmanager
def _errors(param: str) -> Iterator[None]:
    """Context manager that converts LlmcErrors to ApiErrors about the field `param`."""
    try:
        yield
    except LlmcError as e:
        raise to_api_error(e, param) from None


def prompts_in(given: str | list[Any]) -> tuple[int, int]:
    """Return how many prompts the field contains, and the number of token ids if it is a single list of ids.

    The value may still turn out to be malformed.
    """
    if isinstance(given, str) or not given:
        return 1, 0
    return (1, len(given)) if isinstance(given[0], int) else (len(given), 0)


def listed(given: str | list[Any]) -> list[Any]:
    """Return the prompts as a list of texts and lists of ids. Raises ApiError 400."""
    if isinstance(given, str):
        return [given]
    if given and _is_ids(given):
        return [given]
    if not given or not all(isinstance(one, str) or (one and _is_ids(one)) for one in given):
        raise ApiError(_FORMS, param="prompt")
    if len(given) > MAX_PROMPTS:
        raise ApiError(f"prompt: {len(given)} prompts, at most {MAX_PROMPTS} a request", param="prompt")
    return given


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and set(map(type, given)) <= {int}


def check_ids(ids: list[int], size: int, param: str) -> None:
    """Raise ApiError 400 if an id is outside a vocabulary of `size`."""
    if ids and (min(ids) < 0 or max(ids) >= size):
        raise ApiError(f"{param}: token ids of the vocabulary, 0 to {size - 1}", param=param)


def _checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check the number of messages and content parts, and convert the contents to text. Raises ApiError 400."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise ApiError(f"messages: 1 to {MAX_MESSAGES} of them, not {len(messages)}", param="messages")
    parts = sum(len(content) for one in messages if isinstance(content := one.get("content"), list))
    if parts > MAX_PARTS:
        raise ApiError(f"messages: up to {MAX_PARTS} parts of contents together, not {parts}", param="messages")
    return [_with_text(message, i) for i, message in enumerate(messages)]


def _check_roles(messages: list[dict[str, Any]], more: frozenset[str]) -> None:
    """Raise ApiError 400 for a role that is neither one of OpenAI's nor named by the chat template.

    Templates copy a role into the prompt as it is.
    """
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not (role in ROLES or role in more):
            allowed = ", ".join((*ROLES, *sorted(more - {*ROLES})))
            raise ApiError(f"messages[{i}].role: one of {allowed}", param=f"messages[{i}].role")


def _with_text(message: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the message with its content parts as text parts. Missing content becomes "", unless there are tool
    calls.
    """
    content = message.get("content")
    if content is None:
        return message if message.get("tool_calls") else {**message, "content": ""}
    if not isinstance(content, list):
        return message
    parts = [{"type": "text", "text": part} if isinstance(part, str) else _part(part) for part in content]
    if None in parts:
        cause = f'messages[{i}].content: parts of the form {{"type": "text", "text": TEXT}} alone'
        raise ApiError(cause, param=f"messages[{i}].content")
    return {**message, "content": parts}


def _part(part: Any) -> dict[str, Any] | None:
    """Return a text part under its canonical names; None for other parts."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
    return {**part, "type": "text", "text": text} if isinstance(text, str) else None


def _variables(given: dict[str, Any]) -> dict[str, Any]:
    bad = next((n for n in given if n in _RESERVED or n == "continue_final_message" or not n.isidentifier()), None)
    if bad is not None:
        raise ApiError(f"chat_template_kwargs: {bad[:40]!r} cannot be set there", param="chat_template_kwargs")
    return dict(given)
