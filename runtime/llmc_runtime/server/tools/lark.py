"""Pieces of Lark as llguidance reads it, for the grammars of calls and reasoning; it knows no form of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Marker = Callable[[str], str]  # how Lark has a text that is made of special tokens, or is not
AS_TEMPLATES_DO = MappingProxyType({"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "})
ANY = "(?s:.*)"
_LINE = "((?s:.*)\\n)?[ \\t\\r]*"  # up to what stands first on a line


def lark(text: str) -> str:
    """A text as Lark has it."""
    return json.dumps(text, ensure_ascii=False)


def regex(text: str) -> str:
    """A regular expression of llguidance for this text alone."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def slashed(pattern: str) -> str:
    """A regular expression between slashes, on one line."""
    out, escaped = [], False
    for char in pattern:
        out.append({"/": "/" if escaped else "\\/", "\n": "n" if escaped else "\\n"}.get(char, char))
        escaped = char == "\\" and not escaped
    return "".join(out)


def json_rule(schema: Mapping[str, Any], options: Mapping[str, Any] = AS_TEMPLATES_DO) -> str:
    """JSON of a schema within Lark, by default with the white space of Python's json, as templates write it. Nothing
    in it looks like GBNF."""
    text = json.dumps({**schema, "x-guidance": dict(options)}, ensure_ascii=False)
    return f"%json {text.replace('::=', ':' + chr(92) + 'u003a=')}"


def choice_of(tools: Mapping[str, str], before: str, between: str, after: str) -> str:
    """The alternatives of one call for each tool: `before` NAME `between` arguments `after`."""
    return " | ".join(
        f"{lark(before + name + between)} {rule}{after and ' ' + lark(after)}" for name, rule in tools.items()
    )


def repeated(one: str, between: str, most: int) -> str:
    """1 to `most` times the rule `one`."""
    joined = f"{between} {one}" if between != '""' else one
    return one if most == 1 else f"{one} ({joined}){{0,{most - 1}}}"


def without(texts: Sequence[str]) -> str:
    """An expression for any text in which none of `texts` is."""
    return " & ".join([f"/{ANY}/", *(f"~/{ANY}{regex(one)}{ANY}/" for one in texts)])


def text_until(
    rule: str, end: str, marker: Marker, patterns: Sequence[str] = (ANY,), before: str = "", never: Sequence[str] = ()
) -> str:
    """Rules of which `rule` is a text like all `patterns`, `before`, and `end`, which occurs at its end alone; the
    texts `never` do not occur."""
    mark, name = marker(end), rule.upper()
    others = [one for one in never if one != end]
    if mark.startswith('"'):
        parts = [f"/{one}{regex(before + end)}/" for one in patterns]
        parts.append(f"~/{ANY}{regex(end)}(?s:.+)/")
        return f"{rule}[lazy]: {name}\n{name}: {' & '.join(parts)} & {without(others)}"
    parts = [f"/{one}{regex(before)}/" for one in patterns]
    return f"{rule}: {name}{'' if before else '?'} {mark}\n{name}: {' & '.join(parts)} & {without([end, *others])}"


def after_text(begin: str, marker: Marker, never: Sequence[str]) -> tuple[str, list[str]]:
    """What is any text up to the mark `begin`, with it, in which none of `never` is, and the rules that it needs."""
    mark = marker(begin)
    if not mark.startswith('"'):
        return f"FREE? {mark}", []
    return "lead", [text_until("lead", begin, marker, never=never)]


def led(
    tools: Mapping[str, str],
    opening: Callable[[str], str],
    closing: str,
    never: str,
    begin: str,
    marker: Marker,
    end: str,
) -> str:
    """Rules of which `calls` is a text with a call in it, where no mark says so: the expression `opening` of its name
    at the beginning of a line, the arguments, `closing`; or, where a mark does, `begin`, the rule `behind` and `end`.
    `never`: how a call could begin otherwise."""
    leads = [f"lead_{i}[lazy]: /{_LINE}{opening(regex(name))}/" for i, name in enumerate(tools)]
    ones = [f"lead_{i} {rule} {closing}" for i, rule in enumerate(tools.values())]
    free = f"FREE: {without([begin])} & ~/{_LINE}{never}{ANY}/"
    tagged, rules = after_text(begin, marker, [])
    return "\n".join([f"calls: ({' | '.join([*ones, f'{tagged} behind {end}'])})? FREE?", free, *leads, *rules])
