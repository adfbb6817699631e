"""Reasoning that a model marks in front of its answer, told apart from the answer as the text comes; it reads no calls.

A text gives the same two in pieces of any size; they lack the marks, and up to MAX_SPACE of white space beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from llmc_runtime.server.tools.calls import MAX_SPACE
from llmc_runtime.server.tools.lark import Marker, regex
from llmc_runtime.text.stream import Detokenizer
from llmc_runtime.text.tokenizer import Tokenizer

_BEFORE, _OPENING, _INSIDE, _BEHIND, _AFTER = range(5)


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning stands between `begin` and `end`, at the beginning of an output. Where the prompt opens it, or
    `always`, the output begins within, with or without `begin`; else without `begin` there is none."""

    begin: str
    end: str
    always: bool = False

    def opened(self, prompt: str, final: str | None) -> bool:
        """Whether the output behind this prompt begins within the reasoning; `final`: the message that it continues."""
        if final is not None:
            return final.rfind(self.begin) > final.rfind(self.end) or (self.always and self.end not in final)
        prompt = prompt.rstrip()
        return prompt.endswith(self.begin) or (self.always and not prompt.endswith(self.end))


THINK = ReasoningFormat("<think>", "</think>")
BRACKETS = ReasoningFormat("[THINK]", "[/THINK]")
ANALYSIS = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>")
FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "qwen3": THINK,
        "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
        "mistral": BRACKETS,
        "openai_gptoss": ANALYSIS,
    }
)


class Splitter:
    """One output; `opened`: it begins within the reasoning."""

    def __init__(self, form: ReasoningFormat, opened: bool) -> None:
        self._form, self._state, self._text = form, _OPENING if opened else _BEFORE, ""
        self._thought = opened

    @property
    def inside(self) -> bool:
        """Whether what comes next may be reasoning."""
        return self._state < _BEHIND

    @property
    def thinking(self) -> bool:
        """Whether there is, or was, reasoning."""
        return self._thought

    def push(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """(reasoning, answer) that is certain with this much more text; `final`: no more comes."""
        self._text += text
        reasoning = ""
        if self._state == _BEFORE and not self._begin(final):
            return "", ""
        if self._state == _OPENING and not self._open(final):
            return "", ""
        if self._state == _INSIDE:
            reasoning = self._reasoning(final)
        if self._state == _BEHIND:
            self._text = self._text.lstrip()
            self._state = _AFTER if self._text else _BEHIND
        if self._state != _AFTER:
            return reasoning, ""
        answer, self._text = self._text, ""
        return reasoning, answer

    def _begin(self, final: bool) -> bool:
        """Whether it is known if there is reasoning."""
        bare, begin = self._text.lstrip(), self._form.begin
        near = len(self._text) - len(bare) <= MAX_SPACE
        if not final and near and begin.startswith(bare) and bare != begin:
            return False
        self._thought = near and bare.startswith(begin)
        self._state = _OPENING if self._thought else _AFTER
        return True

    def _open(self, final: bool) -> bool:
        """Whether the first mark, which may be left out, and the white space behind it are read."""
        bare, begin = self._text.lstrip(), self._form.begin
        rest = bare.removeprefix(begin).lstrip()
        if not final and (not rest or begin.startswith(bare)):
            self._text = begin if bare.startswith(begin) else bare
            return False
        self._text, self._state = rest, _INSIDE
        return True

    def _reasoning(self, final: bool) -> str:
        """What is certainly reasoning; white space at its end is not told."""
        text, end = self._text, self._form.end
        at = text.find(end)
        if at >= 0:
            self._text, self._state = text[at + len(end) :], _BEHIND
            return _trimmed(text[:at])
        keep = next((n for n in range(min(len(end) - 1, len(text)), 0, -1) if end.startswith(text[-n:])), 0)
        sure = _trimmed(text if final else text[: len(text) - keep])
        self._text = "" if final else text[len(sure) :]
        return sure


def _trimmed(text: str) -> str:
    """Without white space at its end, of which up to MAX_SPACE is dropped."""
    return text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]


def reasoning_tokens(form: ReasoningFormat, tokenizer: Tokenizer, ids: Sequence[int], whole: bool) -> int:
    """How many of `ids`, which begin with the reasoning, belong to it with its marks; `whole`: it ends among them."""
    end = tokenizer.token_id(form.end)
    if not whole:
        return len(ids)
    if end is not None and end in ids:
        return list(ids).index(end) + 1
    stream, text = Detokenizer(tokenizer, skip_special_tokens=False), ""
    for count, token in enumerate(ids, 1):
        text = text[-len(form.end) :] + stream.push(token)
        if form.end in text:
            return count
    return len(ids)


def lark_of(form: ReasoningFormat, opened: bool, marker: Marker) -> str:
    """Lark rules of which `thought` is reasoning with its marks; `marker`: how Lark has them."""
    begin, end = marker(form.begin), marker(form.end)
    if end.startswith('"'):
        rules = f"inside: closed WS?\nclosed[lazy]: /(?s:.*){regex(form.end)}/"
    else:
        rules = f"inside: ANYTHING? {end} WS?\nANYTHING: /(?s:.*)/"
    first = f"{begin}? inside" if opened else f"({begin} inside)?"
    return f"thought: {first}\n{rules}\nWS: /[ \\n]{{1,4}}/"
