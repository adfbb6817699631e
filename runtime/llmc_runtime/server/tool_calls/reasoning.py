"""Separates reasoning, which a model marks at the start of its output, from the answer, as the text arrives.

The result does not depend on how the text is split into pieces. It lacks the marks, and up to MAX_SPACE of white space
next to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from llmc_runtime.grammar.lark_text import ANY, Marker, regex
from llmc_runtime.server.tool_calls.call_format import MAX_SPACE
from llmc_runtime.server.tool_calls.marks import begun_mark, first_mark
from llmc_runtime.text.detokenizer import detokenizer
from llmc_runtime.text.tokenizer import Tokenizer

_BEFORE, _OPENING, _INSIDE, _CLOSED, _AFTER, _FRAMED = range(6)


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning at the start of an output, between one of `begins` and one of `ends`.

    If the prompt opens the reasoning, or with `always`, the output starts inside of it, with or without a begin mark.
    Otherwise there is reasoning only after a begin mark. `until` are marks that also end the reasoning, and belong to
    the answer. `frame` are marks that may enclose the answer after reasoning.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    always: bool = False
    until: tuple[str, ...] = ()
    frame: tuple[str, str] | None = None

    @property
    def begin(self) -> str:
        """The usual begin mark."""
        return self.begins[0]

    @property
    def end(self) -> str:
        """The usual end mark."""
        return self.ends[0]

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks around reasoning and answers."""
        return (*self.begins, *self.ends, *(self.frame or ()))

    def opened(self, prompt: str, final: str | None) -> bool:
        """Return whether the output after this prompt starts inside the reasoning.

        `final` is the message that the output continues, if any.
        """
        if final is not None:
            last, closed = (max(map(final.rfind, marks)) for marks in (self.begins, self.ends))
            return last > closed or (self.always and closed < 0)
        prompt = prompt.rstrip()
        return prompt.endswith(self.begins) or (self.always and not prompt.endswith(self.ends))

    def closed(self, prompt: str) -> bool:
        """Return whether the prompt has ended the reasoning."""
        return prompt.rstrip().endswith(self.ends)


THINK = ReasoningFormat(("<think>",), ("</think>",))
BRACKETS = ReasoningFormat(("[THINK]",), ("[/THINK]",))
SEED = ReasoningFormat(("<seed:think>",), ("</seed:think>",))
ANSWER = replace(THINK, frame=("<answer>", "</answer>"))
GRANITE = ReasoningFormat(
    ("Here is my thought process:", "Here's my thought process:", "<think>"),
    ("Here is my response:", "Here's my response:", "</think>"), frame=("<response>", "</response>"),
)  # fmt: skip
ANALYSIS = ReasoningFormat(("<|channel|>analysis<|message|>",), ("<|end|>",))
_WITHIN = replace(THINK, always=True)
_PLAIN = ("qwen3", "deepseek_v3", "glm45", "glm47", "holo2", "mimo", "nemotron_v3", "olmo3", "step3p5")
# By the names of vLLM's parsers.
FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        **dict.fromkeys(_PLAIN, THINK),
        **dict.fromkeys(("deepseek_r1", "minimax_m2", "step3"), _WITHIN),
        "kimi_k2": replace(THINK, until=("<|tool_calls_section_begin|>",)),
        "ernie45": replace(_WITHIN, frame=GRANITE.frame),
        "granite": GRANITE,
        "hunyuan_a13b": ANSWER,
        "mistral": BRACKETS,
        "seed_oss": SEED,
        "openai_gptoss": ANALYSIS,
    }
)


class ReasoningParser:
    """The parser of one output. With `opened`, it starts inside the reasoning."""

    def __init__(self, form: ReasoningFormat, opened: bool) -> None:
        self._form, self._state, self._text = form, _OPENING if opened else _BEFORE, ""
        self._thought = opened

    @property
    def inside(self) -> bool:
        """Whether further text may be reasoning."""
        return self._state < _CLOSED

    @property
    def thinking(self) -> bool:
        """Whether there is or was reasoning."""
        return self._thought

    def push(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Append text, and return the reasoning and answer that are now certain. `final`: the text ends here."""
        self._text += text
        reasoning = ""
        if self._state == _BEFORE and not self._begin(final):
            return "", ""
        if self._state == _OPENING and not self._open(final):
            return "", ""
        if self._state == _INSIDE:
            reasoning = self._reasoning(final)
        if self._state == _CLOSED:
            self._skip_to_answer(final)
        if self._state == _FRAMED:
            return reasoning, self._framed(final)
        if self._state != _AFTER:
            return reasoning, ""
        answer, self._text = self._text, ""
        return reasoning, answer

    def _begin(self, final: bool) -> bool:
        """Determine if there is reasoning. Returns False if more text is needed."""
        bare, begins = self._text.lstrip(), self._form.begins
        near = len(self._text) - len(bare) <= MAX_SPACE
        self._thought = near and bare.startswith(begins)
        if not final and near and not self._thought and any(begin.startswith(bare) for begin in begins):
            return False
        self._state = _OPENING if self._thought else _AFTER
        return True

    def _open(self, final: bool) -> bool:
        """Skip the optional begin mark and white space. Returns False if more text is needed."""
        bare, begins = self._text.lstrip(), self._form.begins
        mark = next((begin for begin in begins if bare.startswith(begin)), "")
        rest = bare.removeprefix(mark).lstrip()
        if not final and (not rest or (not mark and any(begin.startswith(bare) for begin in begins))):
            self._text = mark or bare
            return False
        self._text, self._state = rest, _INSIDE
        return True

    def _reasoning(self, final: bool) -> str:
        """Return the text that is certainly reasoning, without trailing white space."""
        text, form = self._text, self._form
        end = first_mark(text, (*form.ends, *form.until))
        if end is not None:
            at, mark = end
            self._text, self._state = text[at + (len(mark) if mark in form.ends else 0) :], _CLOSED
            return _trimmed(text[:at])
        sure = _trimmed(text if final else text[: len(text) - begun_mark(text, (*form.ends, *form.until))])
        self._text = "" if final else text[len(sure) :]
        return sure

    def _skip_to_answer(self, final: bool) -> None:
        """Skip the white space before the answer, and its optional mark."""
        frame, self._text = self._form.frame, self._text.lstrip()
        if frame is not None and self._text.startswith(frame[0]):
            rest = self._text.removeprefix(frame[0]).lstrip()
            self._text, self._state = rest or frame[0], _FRAMED if rest else _CLOSED
        elif self._text and (final or frame is None or not frame[0].startswith(self._text)):
            self._state = _AFTER

    def _framed(self, final: bool) -> str:
        """Return the text that certainly belongs to a framed answer. Text after the end mark also belongs to it."""
        text, mark = self._text, (self._form.frame or ("", ""))[1]
        at = text.find(mark)
        if at >= 0:
            self._text, self._state = "", _AFTER
            return _trimmed(text[:at]) + text[at + len(mark) :]
        bare = text[: len(text) - (0 if final else begun_mark(text, (mark,)))]
        sure = text if final else _trimmed(bare)
        self._text = text[len(sure) :]
        return sure


def _trimmed(text: str) -> str:
    """Remove up to MAX_SPACE of trailing white space."""
    return text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]


class ReasoningTokens:
    """Counts the tokens of an output that belong to its reasoning, marks included.

    They are searched for the end as they arrive: searching a long output at its end would hold the event loop for long.
    """

    def __init__(self, form: ReasoningFormat, tokenizer: Tokenizer) -> None:
        marks = *form.ends, *form.until
        self._ends = form.ends
        self._special = {tokenizer.token_id(mark): int(mark in form.ends) for mark in marks}
        self._longest = max(map(len, marks))
        self._stream, self._text = detokenizer(tokenizer, skip_special_tokens=False), ""
        self._count = 0  # number of all tokens
        self._end: int | None = None  # number of tokens up to the end of the reasoning

    def take(self, ids: Sequence[int]) -> None:
        """Append tokens of the output, which starts with reasoning."""
        for at, token in enumerate(ids, self._count) if self._end is None else ():
            if token in self._special:
                self._end = at + self._special[token]
                break
            self._text = self._text[-self._longest :] + self._stream.push(token)
            if any(mark in self._text for mark in self._ends):
                self._end = at + 1
                break
        self._count += len(ids)

    def count(self, ended: bool) -> int:
        """Return how many of the tokens belong to the reasoning: all of them until it has `ended`."""
        return self._count if self._end is None or not ended else self._end


def lark_of(form: ReasoningFormat, opened: bool, marker: Marker) -> str:
    """Return Lark rules in which `thought` matches reasoning with its marks; `marker` converts marks to Lark."""
    begin = f"({' | '.join(map(marker, form.begins))})"
    plain = [end for end in form.ends if marker(end).startswith('"')]
    tokens = [marker(end) for end in form.ends if end not in plain]
    endings, rules = [], []
    if plain:
        endings.append("closed WS?")
        rules.append(f"closed[lazy]: /{ANY}({'|'.join(map(regex, plain))})/")
    if tokens:
        endings.append(f"ANYTHING? ({' | '.join(tokens)}) WS?")
        rules.append(f"ANYTHING: /{ANY}/")
    first = f"{begin}? inside" if opened else f"({begin} inside)?"
    return "\n".join([f"thought: {first}", f"inside: {' | '.join(endings)}", *rules, "WS: /[ \\n]{1,4}/"])
