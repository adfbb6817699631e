"""Selects the formats in which a model writes calls and reasoning, by option or by its chat template and vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar.lark_text import lark, with_special
from llmc_runtime.sched.parameter_type import refused
from llmc_runtime.server.tool_calls.call_format import CallFormat
from llmc_runtime.server.tool_calls.reasoning import ANALYSIS, ANSWER, BRACKETS, GRANITE, SEED, THINK, ReasoningFormat
from llmc_runtime.server.tool_calls.reasoning import FORMATS as REASONING_FORMATS
from llmc_runtime.server.tool_calls.registry import FORMATS
from llmc_runtime.server.tool_calls.registry import call_format as registered
from llmc_runtime.text.chat_template import choose_template
from llmc_runtime.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
# Reasoning formats, and the texts in a template that indicate them; the first match is used.
_SHOWN = (
    (ANALYSIS, ANALYSIS.begins), (GRANITE, ("my thought process:",)),
    (GRANITE, ("</think>", "<response></response>")), (ANSWER, ("</think>", "<answer>")),
    (SEED, ("</seed:think>",)), (REASONING_FORMATS["kimi_k2"], ("</think>", "<|tool_calls_section_begin|>")),
    (THINK, ("</think>",)), (BRACKETS, ("[/THINK]",)),
)  # fmt: skip
_MARKS = (THINK, BRACKETS, SEED)
T = TypeVar("T")


@dataclass(frozen=True)
class OutputFormats:
    """The formats of calls and reasoning, each None if there is none; `lines` explain the choice in the log."""

    calls: type[CallFormat] | None
    reasoning: ReasoningFormat | None
    lines: tuple[str, ...]
    tokenizer: Tokenizer | None

    @property
    def short_ids(self) -> bool:
        """Whether ids of calls consist of nine letters and digits."""
        return self.calls is not None and self.calls.short_ids

    def marker(self, text: str) -> str:
        """Return the Lark expression of a text: special tokens by id, and everything else as a string."""
        tokenizer = self.tokenizer
        whole = None if tokenizer is None else tokenizer.token_id(text)
        if tokenizer is None or whole is not None:
            return lark(text) if whole is None else f"<[{whole}]>"
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.special_ids.isdisjoint(ids):
            return lark(text)
        return with_special(ids, tokenizer.special_ids.__contains__, tokenizer.decode)

    def special(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those texts that are special tokens."""
        if self.tokenizer is None:
            return frozenset()
        ids = {token for text in texts if (token := self.tokenizer.token_id(text)) is not None}
        return self.tokenizer.special_ids & ids


def select_formats(
    tokenizer: Tokenizer | None, template: str | None, calls: str = AUTO, reasoning: str = AUTO
) -> OutputFormats:
    """Select the formats of a model.

    `template` is a chat template's text or name, to use instead of the default. `calls` and `reasoning` are names of
    formats, "auto" or "none". Raises LlmcError E601 for unknown names.
    """
    text = _text(tokenizer, template)
    call_format = _call_format(tokenizer, text, calls)
    fitting = [form for form, shown in _SHOWN if all(words in text for words in shown)]
    fitting += [form for form in _MARKS if _has(tokenizer, form.end)]
    reasoning_format = _named("reasoning_parser", reasoning, REASONING_FORMATS, next(iter(fitting), None))
    lines = list(_lines(call_format, reasoning_format, calls, reasoning))
    if call_format is None and calls == AUTO and "tools" in text:
        lines.append("tool calls: unknown format; set it with --tool-call-parser NAME")
    return OutputFormats(call_format, reasoning_format, tuple(lines), tokenizer)


def _call_format(tokenizer: Tokenizer | None, text: str, calls: str) -> type[CallFormat] | None:
    """Return the format of calls of the option's name or, for "auto", of the template's text or the vocabulary.

    Several formats may have a name; the one that fits the template takes precedence. Raises LlmcError E601.
    """
    fitting = next((form for form in FORMATS if form.fits(text) and calls in (AUTO, form.name, *form.aliases)), None)
    if fitting is not None or calls == NONE:
        return fitting
    if calls != AUTO:
        return registered(calls) or _named("tool_call_parser", calls, {form.name: form for form in FORMATS}, None)
    if "tools" in text and "tool_calls" not in text:  # the template shows no calls
        return next((form for form in FORMATS if form.token and _has(tokenizer, form.token)), None)
    return None


def _text(tokenizer: Tokenizer | None, template: str | None) -> str:
    """Return the text of the template that is used with tools; "" if there is none."""
    if tokenizer is None:
        return ""
    try:
        return choose_template(tokenizer.chat_templates, template, ())
    except LlmcError:  # reported when a chat is requested
        return ""


def _named(field: str, name: str, known: Mapping[str, T], fitting: T | None) -> T | None:
    if name in (AUTO, NONE):
        return fitting if name == AUTO else None
    if name not in known:
        allowed = ", ".join([AUTO, *known, NONE])
        raise refused(field, name[:60], f"one of {allowed}")
    return known[name]


def _has(tokenizer: Tokenizer | None, text: str) -> bool:
    return tokenizer is not None and tokenizer.token_id(text) is not None


def _lines(
    calls: type[CallFormat] | None, reasoning: ReasoningFormat | None, calls_option: str, reasoning_option: str
) -> Iterable[str]:
    seen = "seen in the chat template or vocabulary"
    if calls is not None:
        yield f"tool calls: {calls.name} ({seen if calls_option == AUTO else '--tool-call-parser'})"
    if reasoning is not None:
        reason = seen if reasoning_option == AUTO else "--reasoning-parser"
        yield f"reasoning: from {reasoning.begin} to {reasoning.end} ({reason})"
