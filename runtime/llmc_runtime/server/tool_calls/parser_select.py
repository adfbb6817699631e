"""Selects the formats in which a model writes calls and reasoning, by option or by its chat template and vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar.lark_text import lark, with_special
from llmc_runtime.server.tool_calls import reasoning
from llmc_runtime.server.tool_calls.call_format import CallFormat
from llmc_runtime.server.tool_calls.reasoning import ReasoningFormat
from llmc_runtime.server.tool_calls.registry import FORMATS, call_format
from llmc_runtime.text.chat_template import choose_template
from llmc_runtime.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
# Reasoning formats, and the texts in a template that indicate them; the first match is used.
_SHOWN = (
    (reasoning.ANALYSIS, reasoning.ANALYSIS.begins), (reasoning.GRANITE, ("my thought process:",)),
    (reasoning.GRANITE, ("</think>", "<response></response>")), (reasoning.ANSWER, ("</think>", "<answer>")),
    (reasoning.SEED, ("</seed:think>",)), (reasoning.FORMATS["kimi_k2"], ("</think>", "<|tool_calls_section_begin|>")),
    (reasoning.THINK, ("</think>",)), (reasoning.BRACKETS, ("[/THINK]",)),
)  # fmt: skip
_MARKS = (reasoning.THINK, reasoning.BRACKETS, reasoning.SEED)
T = TypeVar("T")


@dataclass(frozen=True)
class Dialect:
    """The formats of calls and reasoning, each None if there is none; `lines` explain the choice in the log."""

    calls: type[CallFormat] | None
    thoughts: ReasoningFormat | None
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


def dialect_of(tokenizer: Tokenizer | None, template: str | None, calls: str = AUTO, thoughts: str = AUTO) -> Dialect:
    """Select the formats of a model.

    `template` is a chat template's text or name, to use instead of the default. `calls` and `thoughts` are names of
    formats, "auto" or "none". Raises LlmcError E601 for unknown names.
    """
    text = _text(tokenizer, template)
    named = _call_format(tokenizer, text, calls)
    marked = [form for form, words in _SHOWN if all(word in text for word in words)]
    marked += [one for one in _MARKS if _has(tokenizer, one.end)]
    thought = _named("reasoning_parser", thoughts, reasoning.FORMATS, next(iter(marked), None))
    lines = list(_lines(named, thought, calls, thoughts))
    if named is None and calls == AUTO and "tools" in text:
        lines.append("tool calls: unknown format; set it with --tool-call-parser NAME")
    return Dialect(named, thought, tuple(lines), tokenizer)


def _call_format(tokenizer: Tokenizer | None, text: str, calls: str) -> type[CallFormat] | None:
    """Return the format of calls of the option's name or, for "auto", of the template's text or the vocabulary.

    Several formats may have a name; the one that fits the template takes precedence. Raises LlmcError E601.
    """
    fitting = next((one for one in FORMATS if one.fits(text) and calls in (AUTO, one.name, *one.aliases)), None)
    if fitting is not None or calls == NONE:
        return fitting
    if calls != AUTO:
        return call_format(calls) or _named("tool_call_parser", calls, {one.name: one for one in FORMATS}, None)
    if "tools" in text and "tool_calls" not in text:  # the template shows no calls
        return next((one for one in FORMATS if one.token and _has(tokenizer, one.token)), None)
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
        raise LlmcError("E601", f"{field} = {name[:60]!r} is not allowed", f"{field}: one of {allowed}")
    return known[name]


def _has(tokenizer: Tokenizer | None, text: str) -> bool:
    return tokenizer is not None and tokenizer.token_id(text) is not None


def _lines(
    calls: type[CallFormat] | None, thought: ReasoningFormat | None, calls_option: str, thoughts_option: str
) -> Iterable[str]:
    seen = "seen in the chat template or vocabulary"
    if calls is not None:
        yield f"tool calls: {calls.name} ({seen if calls_option == AUTO else '--tool-call-parser'})"
    if thought is not None:
        how = seen if thoughts_option == AUTO else "--reasoning-parser"
        yield f"reasoning: from {thought.begin} to {thought.end} ({how})"
