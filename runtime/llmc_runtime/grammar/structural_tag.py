"""Structural tags: text of which some parts follow grammars, in XGrammar's format, as Lark rules for llguidance.

A document is `{"type": "structural_tag", "format": FORMAT}`, where FORMAT is an object of one of the types of
`_Rules.TYPES`, or the earlier `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`. Source:
https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from llmc_runtime.grammar.lark_text import ANY, Marker, json_rule, lark, slashed, text_until, text_without, with_special

_MAX_DEPTH = 16  # maximum nesting of formats
_EQUALS = "\\u003d"  # "=" in strings and regular expressions: with ::= llguidance would take the rules for GBNF


def structural_rules(document: Any, marker: Marker, name: str, json_options: Mapping[str, Any]) -> str:
    """Return rules in which `name` matches the texts of a structural tag.

    `json_options` are llguidance's options for JSON. Raises ValueError if the document is not a structural tag, or
    has a part that is not supported.
    """
    rules = _Rules(marker, json_options)
    start = rules.format(_format_of(document), "format", 0, last=True)
    return "\n".join([f"{name}: {start}", *rules.lines])


def vocabulary_marker(vocabulary: Any) -> Marker:
    """Return the marker of llguidance's LLTokenizer: it writes special tokens by their ids."""

    def marker(text: str) -> str:
        ids = vocabulary.tokenize_str(text)
        if not any(map(vocabulary.is_special_token, ids)):
            return lark(text)
        return with_special(ids, vocabulary.is_special_token, vocabulary.decode_str)

    return marker


def _format_of(document: Any) -> Mapping[str, Any]:
    """Return the document's format; of the earlier form, the triggered tags that it means."""
    if isinstance(document, Mapping) and "structures" in document:
        tags = [
            {
                "type": "tag",
                "begin": _field(structure, "begin", str, f"structures[{i}]"),
                "content": {
                    "type": "json_schema",
                    "json_schema": _field(structure, "schema", Mapping, f"structures[{i}]"),
                },
                "end": _field(structure, "end", str, f"structures[{i}]"),
            }
            for i, structure in enumerate(_field(document, "structures", list, "structural_tag"))
        ]
        triggers = _field(document, "triggers", list, "structural_tag")
        return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return _field(document, "format", Mapping, "structural_tag")


class _Rules:
    """Writes rules. Its methods return a Lark expression of a format, and add the rules that it needs to `lines`.

    `where` is the place of a format in the document, for errors. `last`: nothing follows the format's text.
    """

    def __init__(self, marker: Marker, json_options: Mapping[str, Any]) -> None:
        self.lines: list[str] = []
        self._marker, self._json_options, self._count = marker, json_options, 0

    def format(self, form: Any, where: str, depth: int, last: bool) -> str:
        """Return the expression of a format of any type."""
        kind = _field(form, "type", str, where)
        if kind not in self.TYPES:
            raise ValueError(f"{where}.type: {kind[:40]!r} is not supported; it is one of {', '.join(self.TYPES)}")
        if depth > _MAX_DEPTH:
            raise ValueError(f"formats are nested more than {_MAX_DEPTH} deep")
        return self.TYPES[kind](self, form, where, depth + 1, last)

    def _literal(self, text: str) -> str:
        return self._marker(text).replace("::=", f"::{_EQUALS}") if text else '""'

    def _name(self) -> str:
        self._count += 1
        return f"tag_{self._count}"

    def _rule(self, body: str) -> str:
        name = self._name()
        self.lines.append(f"{name}: {body}")
        return name

    def _const(self, form: Any, where: str, depth: int, last: bool) -> str:
        return self._literal(_field(form, "value", str, where))

    def _json(self, form: Any, where: str, depth: int, last: bool) -> str:
        if form.get("style", "json") != "json":
            raise ValueError(f"{where}.style: only json is supported")
        schema = _field(form, "json_schema", Mapping, where)
        return self._rule(json_rule(schema, self._json_options))

    def _regex(self, form: Any, where: str, depth: int, last: bool) -> str:
        pattern = slashed(_field(form, "pattern", str, where)).replace("::=", f"::{_EQUALS}")
        return self._rule(f"/{pattern}/")

    def _grammar(self, form: Any, where: str, depth: int, last: bool) -> str:
        text = _field(form, "grammar", str, where)
        if "::=" in text:
            raise ValueError(f"{where}.grammar: GBNF is not supported in a structural tag: write it in Lark's syntax")
        return self._rule(f"%lark {{\n{text}\n}}")

    def _any_text(self, form: Any, where: str, depth: int, last: bool) -> str:
        if not last:
            raise ValueError(f"{where}: any_text is supported at the end, or as the whole content of a tag")
        return self._free(_texts(form, "excludes", where))

    def _free(self, excluded: list[str]) -> str:
        name = self._name().upper()
        self.lines.append(f"{name}: {text_without(excluded) if excluded else f'/{ANY}/'}")
        return f"{name}?"

    def _sequence(self, form: Any, where: str, depth: int, last: bool) -> str:
        parts = _some(form, "elements", where)
        ends = [last and i == len(parts) - 1 for i in range(len(parts))]
        return self._rule(
            " ".join(self.format(part, f"{where}.elements[{i}]", depth, ends[i]) for i, part in enumerate(parts))
        )

    def _or(self, form: Any, where: str, depth: int, last: bool) -> str:
        parts = _some(form, "elements", where)
        each = (self.format(part, f"{where}.elements[{i}]", depth, last) for i, part in enumerate(parts))
        return self._rule(" | ".join(each))

    def _tag(self, form: Any, where: str, depth: int, last: bool) -> str:
        begin = self._literal(_field(form, "begin", str, where))
        return self._rule(f"{begin} {self._content_and_end(form, where, depth, last)}")

    def _content_and_end(self, tag: Any, where: str, depth: int, last: bool) -> str:
        """Return the expression of a tag's content and end."""
        ends = [tag["end"]] if isinstance(tag.get("end"), str) else _texts(tag, "end", where)
        content = _field(tag, "content", Mapping, where)
        if content.get("type") == "any_text" and any(ends):
            if len(ends) > 1:
                raise ValueError(f"{where}.end: any_text ends with a single text")
            name = self._name()
            never = _texts(content, "excludes", f"{where}.content")
            self.lines.append(text_until(name, ends[0], self._marker, never=never).replace("::=", f"::{_EQUALS}"))
            return name
        inner = self.format(content, f"{where}.content", depth, last and not any(ends))
        return f"{inner} ({' | '.join(map(self._literal, ends or ['']))})"

    def _triggered(self, form: Any, where: str, depth: int, last: bool) -> str:
        """Return the expression of free text in which each trigger begins a tag.

        Tags are grouped by trigger: after one, the rest of the begin of any of its tags may follow. Raises ValueError
        for a malformed form, or if further text follows it (`last` is false).
        """
        if not last:
            raise ValueError(f"{where}: triggered_tags are supported at the end")
        triggers, tags = _texts(form, "triggers", where), _some(form, "tags", where)
        if not triggers or not all(triggers):
            raise ValueError(f"{where}.triggers: at least one text, none of them empty")
        excludes = _texts(form, "excludes", where)
        by_trigger: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            place = f"{where}.tags[{i}]"
            trigger, rest = self._split(_field(tag, "begin", str, place), triggers, place)
            by_trigger.setdefault(trigger, []).append(f"{rest} {self._content_and_end(tag, place, depth, last=False)}")
        never = [*triggers, *excludes]  # texts that free text must not contain
        rest_rules = {trigger: self._rule(" | ".join(rests)) for trigger, rests in by_trigger.items()}
        tag = self._rule(" | ".join(f"{self._literal(trigger)} {rule}" for trigger, rule in rest_rules.items()))
        text_and_tag = self._rule(
            " | ".join(self._text_and_tag(trigger, rule, never) for trigger, rule in rest_rules.items())
        )
        text = self._free(never)
        begins_with_tag = bool(form.get("at_least_one"))
        if form.get("stop_after_first"):
            return tag if begins_with_tag else f"({text_and_tag} | {text})"
        return self._rule(f"{tag if begins_with_tag else ''} {text_and_tag}* {text}")

    def _text_and_tag(self, trigger: str, rest_rule: str, never: list[str]) -> str:
        """Return the expression of text up to and including a trigger, and of the rest of the tag."""
        name = self._name()
        self.lines.append(text_until(name, trigger, self._marker, never=never).replace("::=", f"::{_EQUALS}"))
        return f"{name} {rest_rule}"

    def _split(self, begin: str, triggers: list[str], where: str) -> tuple[str, str]:
        """Return the trigger with which a tag begins, and the expression of the rest."""
        matching = [trigger for trigger in triggers if begin.startswith(trigger)]
        if len(matching) != 1:
            raise ValueError(
                f"{where}.begin: {begin[:40]!r} starts with {len(matching)} of the triggers instead of one"
            )
        rest = begin[len(matching[0]) :]
        if self._marker(begin).startswith("<[") != self._marker(matching[0]).startswith("<["):
            raise ValueError(f"{where}.begin: the trigger {matching[0][:40]!r} ends within a special token")
        return matching[0], self._literal(rest)

    def _separated(self, form: Any, where: str, depth: int, last: bool) -> str:
        tags, separator = _some(form, "tags", where), self._literal(_field(form, "separator", str, where))
        tagged = self._rule(
            " | ".join(self._tag(tag, f"{where}.tags[{i}]", depth, last=False) for i, tag in enumerate(tags))
        )
        repeated_tags = tagged if form.get("stop_after_first") else self._rule(f"{tagged} ({separator} {tagged})*")
        return repeated_tags if form.get("at_least_one") else f"{repeated_tags}?"

    TYPES: Mapping[str, Callable[..., str]] = MappingProxyType({
        "const_string": _const, "json_schema": _json, "regex": _regex, "grammar": _grammar, "any_text": _any_text,
        "sequence": _sequence, "or": _or, "tag": _tag, "triggered_tags": _triggered, "tags_with_separator": _separated,
    })  # fmt: skip


def _field(value: Any, name: str, kind: Any, where: str) -> Any:
    """Return a field of an object. Raises ValueError if it is missing, or of another type."""
    entry = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(entry, kind):
        types = {str: "a text", list: "a list", Mapping: "an object"}
        raise ValueError(f"{where}.{name}: {types[kind]} is required")
    return entry


def _some(value: Any, name: str, where: str) -> list[Any]:
    entries: list[Any] = _field(value, name, list, where)
    if not entries:
        raise ValueError(f"{where}.{name}: at least one is required")
    return entries


def _texts(value: Any, name: str, where: str) -> list[str]:
    """Return a list of texts, empty if there is none."""
    texts = value.get(name) or [] if isinstance(value, Mapping) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}.{name}: a list of texts is required")
    return texts
