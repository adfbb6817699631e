"""Renders chat messages to a prompt with the model's chat template, as transformers' apply_chat_template does.

Jinja2 is imported when the first template is compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmc_runtime.format import tokenizer_files
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.names import TEMPLATE_DIR
from llmc_runtime.text.json_file import read_json

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE = "chat_template.jinja"
LEGACY_FILE = "chat_template.json"
SECONDS = 1.0
SIZE = 4 << 20
_MAX_CHARACTERS, _MAX_TAGS = 128 << 10, 5000  # compiling takes time and memory for each character and tag
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
# Variables that requests and options do not set by name: the server sets them from other fields.
_RESERVED = frozenset(
    {"self", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
)
_OTHER_TEMPLATE = "use another template (chat_template=TEXT), or a prompt that is already formatted"

Message = Mapping[str, Any]


def wrong_variable(names: Iterable[str]) -> str | None:
    """Return the first name that cannot be a variable set by a request or an option; None if all can."""
    return next((name for name in names if name in _RESERVED or not name.isidentifier()), None)


def read_templates(folder: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Read a model folder's templates by name: from template files, else from tokenizer_config.json.

    The name of the usual template is "default". Raises LlmcError E151 if a file is unreadable.
    """
    paths = {"default": folder / TEMPLATE_FILE}
    paths.update({p.stem: p for p in sorted((folder / TEMPLATE_DIR).glob("*.jinja"))})
    from_files = {name: _read(path) for name, path in paths.items() if path.exists()}
    if from_files:
        return MappingProxyType(from_files)
    value = config.get("chat_template") or read_json(folder / LEGACY_FILE, {}).get("chat_template")
    try:
        return MappingProxyType(tokenizer_files.templates(value))
    except ValueError as e:
        cause = f"{folder / 'tokenizer_config.json'}: {e}"
        raise LlmcError("E151", cause, "copy the file again from the model's folder") from e


def _read(path: Path) -> str:
    try:
        return tokenizer_files.plain_bytes(path, _MAX_CHARACTERS * 4).decode("utf-8")
    except (OSError, ValueError) as e:
        raise LlmcError("E151", f"{path} cannot be read: {e}", "copy the file again from the model's folder") from e


def choose_template(templates: Mapping[str, str], option: str | None, tools: Sequence[Any] | None) -> str:
    """Return the template's text: `option` (a name or a text), else "tool_use" if there are tools, else "default".

    Raises LlmcError E630 if the model has no template, or several and no default.
    """
    if option is not None:
        return _named(templates, option)
    if tools is not None and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        cause = f"the model has {len(templates)} chat template{'s' * (len(templates) > 1)} and no default"
        raise LlmcError("E630", cause, f"choose one of {sorted(templates)}")
    remedy = "use a plain prompt, or pass a template (chat_template=TEXT)"
    raise LlmcError("E630", "the model has no chat template", remedy)


def _named(templates: Mapping[str, str], option: str) -> str:
    """Return the template with that name, or `option` itself if it is a template's text.

    Text without any tag is rejected: a mistyped name would otherwise become the prompt.
    """
    if not isinstance(option, str):
        cause = f"chat_template is a {type(option).__name__}"
        raise LlmcError("E630", cause, "pass a template's text, or the name of one of the model's")
    if option not in templates and "{{" not in option and "{%" not in option:
        cause = f"{option[:60]!r} is neither a template's text nor the name of one of the model's"
        raise LlmcError("E630", cause, f"the model's are: {', '.join(sorted(templates)) or 'none'}")
    return templates.get(option, option)


class ChatTemplate:
    """A compiled chat template. `named_tokens` (bos_token, eos_token, ...) are variables that it can use.

    Rendering takes at most `seconds` of CPU time and builds no string longer than `size` characters. Threads can render
    one template at the same time.
    """

    def __init__(
        self, text: str, named_tokens: Mapping[str, str], *, seconds: float = SECONDS, size: int = SIZE
    ) -> None:
        from llmc_runtime.text.sandbox import Budget, ChatEnvironment
        from llmc_runtime.text.template_analysis import analyze_template

        if len(text) > _MAX_CHARACTERS:
            cause = f"the chat template has {len(text)} characters (maximum: {_MAX_CHARACTERS})"
            raise LlmcError("E634", cause, _OTHER_TEMPLATE)
        tags = sum(text.count(opening) for opening in ("{%", "{{", "{#"))
        if tags > _MAX_TAGS:
            raise LlmcError("E634", f"the chat template has {tags} tags (maximum: {_MAX_TAGS})", _OTHER_TEMPLATE)
        self._text = text
        self._named = dict(named_tokens)
        self._budget = Budget(seconds, size)
        with _clear_errors():
            environment = ChatEnvironment(self._budget)
            self.features = analyze_template(environment.parse(text))
            self._template: jinja2.Template = environment.from_string(text)

    def unshown(self, variables: Mapping[str, Any]) -> str | None:
        """Return which of tools and documents are among the variables although the template does not show them."""
        shown = {"tools": self.features.tools, "documents": self.features.documents}
        return next((name for name, is_shown in shown.items() if variables.get(name) and not is_shown), None)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render the prompt for `messages` (dicts with "role" and "content").

        Raises LlmcError E631 (invalid messages), E632 (the template rejects them), E633 (the template fails) or E634
        (limits).
        """
        chat = [self._flat(m) for m in checked_messages(messages)]
        if continue_final_message:
            if add_generation_prompt:
                cause = "continue_final_message excludes add_generation_prompt"
                raise LlmcError("E631", cause, "pass add_generation_prompt=False")
            chat, final = _marked(chat)
        names = {
            **self._named, "messages": chat, "tools": tools, "documents": documents,
            "add_generation_prompt": add_generation_prompt, **variables,
        }  # fmt: skip
        with _clear_errors():
            text = self._run(names)
        return _cut_at_mark(text, final) if continue_final_message else text

    def _run(self, names: Mapping[str, Any]) -> str:
        """Render the template within its budget of time and size."""
        self._budget.start()
        parts: list[str] = []
        size = 0
        for part in self._template.generate(**names):
            size += len(part)
            self._budget.tick()
            if size > self._budget.size:
                self._budget.need(size)
            parts.append(part)
        return "".join(parts)

    def _flat(self, message: Message) -> dict[str, Any]:
        """Return the message. If the template cannot read content parts, text parts are joined with newlines."""
        content = message.get("content")
        if self.features.parts or not isinstance(content, list):
            return dict(message)
        texts = [p.get("text") if isinstance(p, Mapping) and p.get("type", "text") == "text" else None for p in content]
        if not all(isinstance(t, str) for t in texts):
            raise LlmcError("E631", "a message has a content part that is not text", "send text parts only")
        return {**message, "content": "\n".join(str(t) for t in texts)}


def checked_messages(messages: Any) -> Sequence[Message]:
    """Return `messages` if it is a non-empty list of dicts with a role; else raise LlmcError E631 for the first
    error.
    """
    remedy = 'pass a list like [{"role": "user", "content": "Hello"}]'
    if not isinstance(messages, (list, tuple)) or not messages:
        empty = isinstance(messages, (list, tuple))
        cause = "messages is an empty list" if empty else f"messages has the type {type(messages).__name__}"
        raise LlmcError("E631", cause, remedy)
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise LlmcError("E631", f'message {i} is not a dict with a "role"', remedy)
        if not isinstance(message.get("content"), (str, list, tuple, type(None))):
            raise LlmcError(
                "E631", f"the content of message {i} has the type {type(message['content']).__name__}", remedy
            )
    return messages


def _marked(chat: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return a copy whose last message ends in a marker, and the text before the marker."""
    chat = [*chat[:-1], copy.deepcopy(chat[-1])]
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE
        return chat, content
    for part in reversed(content or ()):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text = part["text"]
            part["text"] = text + _CONTINUE
            return chat, text
    raise LlmcError("E631", "the final message has no text to continue", "add content to it, or start a new message")


def _cut_at_mark(text: str, final: str) -> str:
    """Return the rendered text up to the end of the final message, so that the model continues it."""
    mark = _CONTINUE.strip()
    if final.strip() not in text or mark not in text:
        raise LlmcError("E632", "the chat template drops the final message, so it cannot be continued", _OTHER_TEMPLATE)
    at = text.rindex(mark)
    prefix = text[:at]
    return prefix if text[at : at + len(_CONTINUE)] == _CONTINUE else prefix.rstrip()


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Convert every exception of a template to an LlmcError."""
    try:
        yield
    except LlmcError:
        raise
    except Exception as e:
        raise _explained(e) from e


def _explained(error: Exception) -> LlmcError:
    """Return the error for an exception of a template: E632 (messages), E633 (template) or E634 (limits)."""
    import jinja2
    from jinja2.sandbox import SecurityError

    from llmc_runtime.text.sandbox import OverBudget

    text = (str(error).strip().splitlines() or [""])[0][:300]
    if isinstance(error, OverBudget):
        return LlmcError("E634", f"the chat template was stopped: {text}", _OTHER_TEMPLATE)
    if isinstance(error, jinja2.TemplateSyntaxError):
        cause = f"the chat template has a syntax error in line {error.lineno}: {text.removesuffix('.')}"
        return LlmcError("E633", cause, _OTHER_TEMPLATE)
    if isinstance(error, SecurityError):
        return LlmcError("E633", f"the chat template uses a forbidden operation: {text}", _OTHER_TEMPLATE)
    if type(error) is jinja2.TemplateError:
        return LlmcError("E632", f"the chat template refused the messages: {text}", "change the messages accordingly")
    return LlmcError("E633", f"the chat template failed: {type(error).__name__}: {text}", _OTHER_TEMPLATE)
