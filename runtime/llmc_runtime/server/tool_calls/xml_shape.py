"""Call formats with one element per argument and values as plain text, declared as sequences of parts.

The reader and the grammar derive from the declaration. As nothing is escaped, a value ends where its element's end tag
first occurs. Strings are emitted as they arrive; values of other types (by the tool's schema) are emitted once they are
complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

from llmc_runtime.grammar.lark_text import ANY, Marker, lark, repeated, text_until
from llmc_runtime.server.requests.request_fields import FUNCTION_NAME
from llmc_runtime.server.tool_calls.call_format import Malformed, Steps
from llmc_runtime.server.tool_calls.json_shape import Optional, expression
from llmc_runtime.server.tool_calls.marks import first_mark
from llmc_runtime.server.tool_calls.tagged_args import MAX_FIELDS, ArguedFormat, Field
from llmc_runtime.server.tool_calls.text_values import STRING, ValueText, json_of, property_of, types_of

_LONGEST_KEY = 256
_MAX_VALUES = 4096  # maximum values of an enum; with their end tags, more would exceed the limit of a grammar


LINE = Optional(("\n",), enforced=False)  # a newline that a grammar permits


class Xml(Enum):
    """Parts of a call, besides texts and LINE."""

    NAME = "the name of the tool"
    FIELDS = "its arguments, as `field` describes them"
    KEY = "the name of an argument"
    VALUE = "its value"


Part = str | Optional | Xml


class XmlShape(ArguedFormat):
    """Calls between the marks `markers[0]` and `markers[1]`. A subclass is a declaration.

    - `call`: the parts of a call: NAME, FIELDS, and then its end tag. If they start with a text, several calls may
      stand between the marks, and a reader accepts a call of a known tool without the marks. If the end tag is
      `markers[1]`, one call stands between the marks.
    - `field`: the parts of an argument: a tag, KEY, VALUE, and then the end tag. A newline next to VALUE is not part of
      it. The end tag of the call does not start with the first tag.

    A reader allows white space before every tag except the one after KEY, and skips parts that are white space.
    """

    call: ClassVar[Sequence[Part]]
    field: ClassVar[Sequence[Part]]

    # --- the declaration

    @classmethod
    def openers(cls) -> Sequence[str]:
        """See CallFormat."""
        return *cls.markers[:1], *cls._start_tag()

    @classmethod
    def _start_tag(cls) -> Sequence[str]:
        """Return the text before a call's name, if there is one."""
        return [part for part in cls.call[:1] if isinstance(part, str)]

    @classmethod
    def _call_end(cls) -> str:
        """Return the end tag of a call."""
        return _tags(cls.call, Xml.FIELDS)[0]

    @classmethod
    def _framed(cls) -> bool:
        """Return whether newlines enclose a value."""
        return cls.field[cls.field.index(Xml.VALUE) - 1] == "\n"

    @classmethod
    def _ends(cls) -> Sequence[str]:
        """Return the ends of a value: its end tag, or the ends of the call and the section if that was left out."""
        tag, end, section = _tags(cls.field, Xml.VALUE)[0], cls._call_end(), cls.markers[1]
        return (tag,) if end == section else (tag, f"{end}\n{section}", end + section)

    # --- reader

    def _closing_marks(self, opener: str) -> Steps[None]:
        if opener == self.markers[0]:
            yield from self._optional(self.markers[1])

    def _parse_calls(self, opener: str) -> Steps[None]:
        start = self._start_tag()
        if not start or opener in start:
            yield from self._one(known=opener in start)
            return
        yield from self._expect(start[0])
        yield from self._one()
        while (yield from self._optional(start[0])):
            yield from self._one()

    def _one(self, known: bool = False) -> Steps[None]:
        """Parse a call after its start tag. With `known`, it has to be of a known tool; also if it has neither a tag
        after its name nor arguments.
        """
        stop, first, end = _tags(self.call, Xml.NAME, Xml.FIELDS), self.field[0], self._call_end()
        assert isinstance(first, str)
        if stop:
            name = (yield from self._raw(stop[0])).strip()
        else:
            yield from self._next()
            name = yield from self._word()
        if not self._is_name(name) or (known and name not in self._tools):
            raise Malformed
        self._open(name)
        while (tag := (yield from self._next_marker(first, end))) == first:
            yield from self._argument(name)
        if tag is None or not (stop or self._fields or name in self._tools):
            raise Malformed
        self._close()

    def _argument(self, name: str) -> Steps[None]:
        """Parse an argument after its first tag. White space around a key counts unless an element encloses the key."""
        stop, *more = _tags(self.field, Xml.KEY, Xml.VALUE)
        key = yield from self._raw(stop)
        for tag in more:
            yield from self._expect(tag)
        yield from self._field_value(name, key.strip() if more else key, self._ends())

    def _field_value(self, name: str, key: str, ends: Sequence[str]) -> Steps[None]:
        """Parse the argument `key`, whose value ends with one of `ends`."""
        schema = self._tools.get(name, {})
        types = types_of(property_of(schema, key), schema)
        if self._framed() and (yield from self._next(solid=False)) == "\n":
            self._at += 1
        if types == STRING:
            yield from self._text_value(key, ends)
            return
        value = ValueText()
        yield from self._until(ends, value.push, emitted=False)
        self._key(key)
        self._emit_arguments(value.json(types))
        self._mark = self._at

    def _text_value(self, key: str, ends: Sequence[str]) -> Steps[None]:
        """Parse a string, and emit it as it arrives."""
        begun = False

        def take(text: str) -> None:
            nonlocal begun
            if not begun:
                self._key(key)
                self._emit_arguments('"')
                begun = True
            self._emit_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

        yield from self._until(ends, take, emitted=True)
        self._emit_arguments('"')
        self._mark = self._at

    def _until(self, ends: Sequence[str], take: Callable[[str], None], *, emitted: bool) -> Steps[None]:
        """Pass the text before the first of `ends` to `take` as it arrives, without a newline that encloses the value.
        `ends[0]` is consumed, the others are not. `emitted`: what was taken is valid even if the rest is malformed.
        """
        newline = ""
        while True:
            rest = self._text[self._at :]
            mark = first_mark(rest, ends)
            text = newline + rest[: len(rest) - self._partial(ends) if mark is None else mark[0]]
            self._at += len(text) - len(newline)
            newline = "\n" if self._framed() and text.endswith("\n") else ""
            take(text[: len(text) - len(newline)])
            if emitted:
                self._mark = self._at - len(newline)
            if mark is not None:
                self._at += len(ends[0]) if mark[1] == ends[0] else 0
                return
            if self._ended:
                raise Malformed
            yield

    def _raw(self, *ends: str) -> Steps[str]:
        """Return the text before the first of `ends`, up to _LONGEST_KEY characters. `ends[0]` is consumed, the others
        are not.
        """
        while True:
            mark = first_mark(self._text, ends, self._at)
            if mark is not None:
                at, end = mark
                text, self._at = self._text[self._at : at], at + (len(end) if end == ends[0] else 0)
                return text
            if self._ended or len(self._text) - self._at > _LONGEST_KEY:
                self._at = len(self._text) if self._ended else self._at
                raise Malformed
            yield

    # --- grammar

    @classmethod
    def after_mark(cls, tools: Mapping[str, str], marker: Marker, max_calls: int) -> str:
        """See CallFormat."""
        at = cls.call.index(Xml.FIELDS)
        heads = {name: [name if part is Xml.NAME else part for part in cls.call[:at]] for name in tools}
        calls = " | ".join(f"{cls._lark(heads[name], marker)} {rule}" for name, rule in tools.items())
        call = f"(call) {cls._lark(cls.call[at + 1 :], marker)}"
        lines = [f"after_mark: {call}"]
        if cls._call_end() != cls.markers[1]:
            repeated_calls = repeated("one_call", lark("\n"), 1 if cls.between is not None else max_calls)
            lines = [f'after_mark: "\\n" {repeated_calls} "\\n" {marker(cls.markers[1])}', f"one_call: {call}"]
        return "\n".join([*lines, f"call: {calls}", *cls._shared(marker)])

    @classmethod
    def _lark(cls, parts: Iterable[Part | tuple[str]], marker: Marker) -> str:
        """Return the Lark expression of texts, lines, and (expression,)."""
        return expression(parts, marker, (*cls.markers, cls._call_end(), cls._ends()[0]))

    @classmethod
    def _around_value(cls, key: str | tuple[str], marker: Marker) -> tuple[str, str]:
        """Return the Lark expressions of what precedes an argument's value, and of what follows its end tag."""
        at, end = cls.field.index(Xml.VALUE), cls.field.index(cls._ends()[0])
        head = [key if part is Xml.KEY else part for part in cls.field[:at]]
        return cls._lark(head, marker), cls._lark(cls.field[end + 1 :], marker)

    @classmethod
    def _any(cls, rule: str, marker: Marker) -> str:
        head, tail = cls._around_value((f"/{FUNCTION_NAME.pattern}/",), marker)
        return f"{rule}: ({head} any_text {tail}){{0,{MAX_FIELDS}}}"

    @classmethod
    def _shared(cls, marker: Marker) -> Sequence[str]:
        ends = cls._ends()
        text = text_until("any_text", ends[0], marker, before="\n" if cls._framed() else "", never=ends)
        return [*super()._shared(marker), text]

    @classmethod
    def _joined(cls, rule: str, fields: Sequence[Field]) -> Sequence[str]:
        parts = (field.rule if field.required else f"{field.rule}?" for field in fields)
        return [f"{rule}: {' '.join(parts) or lark('')}"]

    @classmethod
    def _field(cls, field: Field, marker: Marker) -> Sequence[str]:
        head, tail = cls._around_value(field.key, marker)
        if not _is_plain(field.key):
            raise cls._inexpressible(f"the property {field.key[:60]!r}")
        values: list[str] = []
        rules: list[str] = []
        for i, schema in enumerate(cls._alternatives(field)):
            schema_values, schema_rules = cls._values(f"{field.rule}_{i}", field, schema, marker)
            values += schema_values
            rules += schema_rules
        return [f"{field.rule}: {head} ({' | '.join(values)}) {tail}", *rules]

    @classmethod
    def _values(cls, rule: str, field: Field, schema: dict[str, Any], marker: Marker) -> tuple[list[str], list[str]]:
        """Return expressions for the values of a schema, each with its end tag, and the rules that they require."""
        frame = "\n" if cls._framed() else ""
        ends = cls._ends()
        close = f"{lark(frame)} {marker(ends[0])}" if frame else marker(ends[0])
        if "enum" in schema or "const" in schema:
            return [f"{lark(text)} {close}" for text in cls._texts(field, cls._listed(field, schema))], []
        types = types_of(schema, field.root)
        if types and "string" not in types:
            json_name, json_rules = cls._json(rule, schema, field.root)
            return [f"{json_name} {close}"], json_rules
        patterns = cls._patterns(field, schema)
        if patterns == [ANY]:
            return ["any_text"], []
        return [rule], [text_until(rule, ends[0], marker, patterns, frame, ends)]

    @classmethod
    def _listed(cls, field: Field, schema: Mapping[str, Any]) -> Sequence[object]:
        """Return the values of a schema with an enum or a const. Raises ApiError 400 if the enum is not a list,
        or a longer one than a grammar holds."""
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list):
            raise cls._inexpressible(f"an enum that is not a list for the property {field.key[:60]!r}")
        if len(values) > _MAX_VALUES:
            raise cls._inexpressible(f"an enum of {len(values)} values for the property {field.key[:60]!r}")
        return values

    @classmethod
    def _texts(cls, field: Field, values: Sequence[object]) -> list[str]:
        """Return the texts of an enum's values, except those that would be parsed as different values."""
        types = types_of(field.schema, field.root)
        texts = []
        for value in values:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            has_end = first_mark(text, cls._ends()) is not None
            if not has_end and _read(text, types) == (type(value), value):
                texts.append(text)
        if not texts:
            raise cls._inexpressible(f"values of {field.key[:60]!r} that cannot be distinguished from others")
        return texts


def _tags(parts: Sequence[Part], after: Xml, until: Xml | None = None) -> list[str]:
    """Return the texts after one part, up to another one, that are not white space."""
    between = parts[parts.index(after) + 1 : None if until is None else parts.index(until)]
    return [part for part in between if isinstance(part, str) and part.strip()]


def _read(text: str, types: frozenset[str]) -> tuple[type, object]:
    value = json.loads(json_of(text, types))
    return type(value), value


def _is_plain(key: str) -> bool:
    """Return whether an argument's name survives parsing unchanged."""
    return 0 < len(key) <= _LONGEST_KEY and not set(key) & set('<>"\n') and key == key.strip()
