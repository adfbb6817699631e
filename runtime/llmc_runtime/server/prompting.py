"""What a request continues, brought into token ids off the event loop: texts, ids, conversations. It runs nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.prompts import TOKENIZE, Prompt
from llmc_runtime.server.errors import ApiError, told
from llmc_runtime.server.fields import ChatRequest, CompletionRequest, TokenizeRequest
from llmc_runtime.server.lengths import MAX_MESSAGES, MAX_PARTS
from llmc_runtime.server.tools.history import for_template
from llmc_runtime.text.chat import ChatTemplate, choose_template
from llmc_runtime.text.stream import token_bytes
from llmc_runtime.text.tokenizer import Tokenizer

MAX_PROMPTS = 128  # of one request
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # and those that the chat template names
_RESERVED = frozenset({"self", "messages", "tools", "documents", "chat_template", "add_generation_prompt"})
# Types of parts that are text, and where it is.
_TEXTS = MappingProxyType({"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"})
_FORMS = "prompt: a text, a list of texts, a list of token ids, or a list of lists of token ids, none of them empty"


class Prompting:
    """Tokenizes for one model, in threads of `pool`; `template`: another than the model's own, or one's name."""

    def __init__(self, given: Tokenizer | None, vocab_size: int, template: str | None, pool: Executor) -> None:
        self._given, self._vocab_size, self._pool = given, vocab_size, pool
        self._wanted, self._templates = template, dict[bool, ChatTemplate]()  # for chats with tools and without
        if template is not None:
            self._template(False)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. LlmcError E620 where the artifact has none."""
        if self._given is None:
            raise LlmcError("E620", "the artifact has no tokenizer.json", TOKENIZE)
        return self._given

    def spelled(self, token: int) -> str:
        """The text of one id; the id where the model has no text."""
        return f"token_id:{token}" if self._given is None else self._given.spelled(token)

    def raw(self, token: int, text: str) -> bytes:
        """The bytes of an id whose own text is `text`: parts of characters, which that cannot hold, as they are."""
        found = token_bytes(self._given, token) if self._given is not None and "\ufffd" in text else None
        return text.encode(errors="replace") if found is None else found

    def is_special(self, token: int) -> bool:
        """Whether texts leave it out unless asked."""
        return self._given is not None and token in self._given.special_ids

    def unseen(self, prompt: Prompt) -> int:
        """How many ids the tokenizer has put in front of the prompt's text."""
        text, count = prompt.text or "", 0
        for token in prompt.ids:
            if not self.is_special(token) or text.startswith(self.spelled(token)):
                break
            count += 1
        return count

    async def of_completion(self, asked: CompletionRequest) -> list[Prompt]:
        """The prompts of a completion, each with its text where texts can be had. ApiError 400."""
        given = _listed(asked.prompt)
        special = asked.add_special_tokens is not False
        return await self._off(lambda: [self._prompt(one, special, bool(asked.echo)) for one in given], "prompt")

    async def of_chat(
        self, asked: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]] | None = None, short_ids: bool = False
    ) -> Prompt:
        """The prompt that the model's template makes of a conversation and of `tools`; `short_ids`: see tools.history.
        ApiError 400."""
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
        return await self._off(lambda: self._rendered(messages, tools, variables, short_ids), "messages")

    async def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of a text."""
        return await self._off(lambda: self.tokenizer.encode(text, add_special_tokens=special), "prompt")

    async def decode(self, ids: list[int]) -> str:
        """The text of token ids. ApiError 400 where one is none of the vocabulary."""
        check_ids(ids, self._vocab_size, "tokens")
        return await self._off(lambda: self.tokenizer.decode(ids, skip_special_tokens=False), "tokens")

    def _prompt(self, given: Any, special: bool, echo: bool) -> Prompt:
        if isinstance(given, str):
            return Prompt(self.tokenizer.encode(given, add_special_tokens=special), given)
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
    ) -> Prompt:
        template = self._template(tools is not None)
        if tools is not None and not template.reads.tools:
            cause = "tools: the model's chat template has no place for them"
            raise ApiError(f"{cause}. Try: serve with --chat-template FILE, one that shows tools", param="tools")
        _check_roles(messages, template.reads.roles)
        text = template.render(for_template(messages, template.reads, short), tools=tools, **variables)
        return Prompt(self.tokenizer.encode(text, add_special_tokens=False), text)

    async def _off(self, work: Any, param: str) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except LlmcError as e:
            raise told(e, param) from None


def _listed(given: str | list[Any]) -> list[Any]:
    """The prompts as a list of texts and lists of ids."""
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
    """ApiError 400 where one of `ids` is none of a vocabulary of `size`."""
    if ids and (min(ids) < 0 or max(ids) >= size):
        raise ApiError(f"{param}: token ids of the vocabulary, 0 to {size - 1}", param=param)


def _checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation, if its size is allowed and it is text alone."""
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise ApiError(f"messages: 1 to {MAX_MESSAGES} of them, not {len(messages)}", param="messages")
    parts = sum(len(content) for one in messages if isinstance(content := one.get("content"), list))
    if parts > MAX_PARTS:
        raise ApiError(f"messages: up to {MAX_PARTS} parts of contents together, not {parts}", param="messages")
    return [_with_text(message, i) for i, message in enumerate(messages)]


def _check_roles(messages: list[dict[str, Any]], more: frozenset[str]) -> None:
    """ApiError 400 for a role that is neither one of OpenAI's nor named by the chat template: templates write a role
    into the prompt as it is."""
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not (role in ROLES or role in more):
            allowed = ", ".join((*ROLES, *sorted(more - {*ROLES})))
            raise ApiError(f"messages[{i}].role: one of {allowed}", param=f"messages[{i}].role")


def _with_text(message: dict[str, Any], i: int) -> dict[str, Any]:
    """The message; content that is not there is empty, unless there are calls in its place, and its parts are texts."""
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
    """A part that is text under one of its names; None for any other."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
    return {**part, "type": "text", "text": text} if isinstance(text, str) else None


def _variables(given: dict[str, Any]) -> dict[str, Any]:
    bad = next((n for n in given if n in _RESERVED or n == "continue_final_message" or not n.isidentifier()), None)
    if bad is not None:
        raise ApiError(f"chat_template_kwargs: {bad[:40]!r} cannot be set there", param="chat_template_kwargs")
    return dict(given)
