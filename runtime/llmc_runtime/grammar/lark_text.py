"""Building blocks of Lark grammars in llguidance's dialect."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from llmc_runtime.grammar.json_schema import supported

Marker = Callable[[str], str]  # returns the Lark expression of a text that may consist of special tokens
AS_TEMPLATES_DO = MappingProxyType({"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "})
ANY = "(?s:.*)"
_LINE = "((?s:.*)\\n)?[ \\t\\r]*"  # everything up to the first nonspace character of a line
_remaining: ContextVar[int | None] = ContextVar("_remaining", default=None)  # characters, see `limited`


class TooLong(ValueError):
    """A grammar has more characters than `limited` allows."""


@contextmanager
def limited(characters: int) -> Iterator[None]:
    """Limit the characters of all expressions that the functions of this module return in the block.

    A small schema may have a long grammar, as references repeat its definitions. Beyond the limit, the functions raise
    TooLong before they have made much more.
    """
    token = _remaining.set(characters)
    try:
        yield
    finally:
        _remaining.reset(token)


def charged(text: str) -> str:
    """Return an expression after counting it against the limit of `limited`. Raises TooLong beyond it."""
    remaining = _remaining.get()
    if remaining is not None:
        _remaining.set(remaining - len(text))
        if len(text) > remaining:
            raise TooLong("its grammar is too long; use fewer or smaller schemas, or fewer texts")
    return text


def lark(text: str) -> str:
    """Return a Lark string literal."""
    return charged(json.dumps(text, ensure_ascii=False))


def with_special(ids: Sequence[int], is_special: Callable[[int], bool], decode: Callable[[list[int]], str]) -> str:
    """Return the Lark expression of tokens: special ones by their ids, and the text of the others."""
    runs = itertools.groupby(ids, lambda token: token if is_special(token) else -1)
    return " ".join(lark(decode(list(run))) if key < 0 else f"<[{key}]>" for key, run in runs)


def regex(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def slashed(pattern: str) -> str:
    """Escape a regular expression for use between slashes on one line."""
    out, escaped = [], False
    for char in pattern:
        out.append({"/": "/" if escaped else "\\/", "\n": "n" if escaped else "\\n"}.get(char, char))
        escaped = char == "\\" and not escaped
    return "".join(out)


def json_rule(schema: Mapping[str, Any], options: Mapping[str, Any] = AS_TEMPLATES_DO) -> str:
    """Return a Lark expression for JSON of a schema.

    By default, it uses the white space of Python's json module, as templates do. The result contains no "::=", so that
    it is not mistaken for GBNF. Raises ValueError for a schema that `supported` refuses.
    """
    text = json.dumps({**supported(schema), "x-guidance": dict(options)}, ensure_ascii=False)
    return charged(f"%json {text.replace('::=', ':' + chr(92) + 'u003a=')}")


def repeated(rule: str, between: str, maximum: int) -> str:
    """Return an expression for 1 to `maximum` repetitions of the rule `rule`, separated by `between`."""
    joined = f"{between} {rule}" if between != '""' else rule
    return rule if maximum == 1 else f"{rule} ({joined}){{0,{maximum - 1}}}"


def text_without(texts: Sequence[str]) -> str:
    """Return an expression for any text that contains none of `texts`."""
    return charged(" & ".join([f"/{ANY}/", *(f"~/{ANY}{regex(text)}{ANY}/" for text in texts)]))


def text_until(
    rule: str, end: str, marker: Marker, patterns: Sequence[str] = (ANY,), before: str = "", never: Sequence[str] = ()
) -> str:
    """Return rules in which `rule` matches a text, `before` and `end`; `end` occurs only there.

    The text matches all `patterns` and contains none of `never`.
    """
    mark, name = marker(end), rule.upper()
    others = [pattern for pattern in never if pattern != end]
    if mark.startswith('"'):
        parts = [f"/{pattern}{regex(before + end)}/" for pattern in patterns]
        parts.append(f"~/{ANY}{regex(end)}(?s:.+)/")
        return f"{rule}[lazy]: {name}\n{name}: {' & '.join(parts)} & {text_without(others)}"
    parts = [f"/{pattern}{regex(before)}/" for pattern in patterns]
    return f"{rule}: {name}{'' if before else '?'} {mark}\n{name}: {' & '.join(parts)} & {text_without([end, *others])}"


def after_text(begin: str, marker: Marker, never: Sequence[str]) -> tuple[str, list[str]]:
    """Return an expression for any text up to and including the mark `begin`, without any of `never`, and its rules."""
    mark = marker(begin)
    if not mark.startswith('"'):
        return f"FREE? {mark}", []
    return "lead", [text_until("lead", begin, marker, never=never)]


def calls_without_marks(calls: Sequence[tuple[str, str]], never: str, begin: str, marker: Marker, end: str) -> str:
    """Return rules in which `calls` matches a text with calls of a format without required marks.

    A call starts a line with one of `calls`: a regular expression of what precedes the arguments, and a Lark expression
    of the rest. Or it consists of the mark `begin`, the rule `after_mark` and `end`. `never` matches other ways in
    which a call could start.
    """
    leads = [f"lead_{i}[lazy]: /{_LINE}{opening}/" for i, (opening, _) in enumerate(calls)]
    choices = [f"lead_{i} {rest}" for i, (_, rest) in enumerate(calls)]
    free = f"FREE: {text_without([begin])} & ~/{_LINE}{never}{ANY}/"
    tagged, rules = after_text(begin, marker, [])
    return "\n".join([f"calls: ({' | '.join([*choices, f'{tagged} after_mark {end}'])})? FREE?", free, *leads, *rules])
