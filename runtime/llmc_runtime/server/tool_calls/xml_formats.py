"""Calls in XML-like elements, one element per argument, with values as plain text. See tagged_args.ArguedFormat.

As nothing is escaped, a value ends where its element's end tag first occurs. Strings are emitted as they arrive; values
of other types (by the tool's schema) are emitted once they are complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from llmc_runtime.server.tool_calls.call_format import Malformed, Steps
from llmc_runtime.server.tool_calls.definitions import NAME
from llmc_runtime.server.tool_calls.lark_text import ANY, Marker, lark, repeated, text_until
from llmc_runtime.server.tool_calls.tagged_args import ArguedFormat, Field
from llmc_runtime.server.tool_calls.text_values import STRING, json_of, property_of, types_of

_LONGEST_KEY = 256
_LINE = '"\\n"?'  # in a grammar
_MOST_FIELDS = 64  # maximum number of arguments without a schema


class Xml(ArguedFormat):
    """Calls enclosed in `markers[0]` and `markers[1]`.

    `call` and `field` are three texts each: before a name, after it, and after everything that it contains. With
    `framed`, there is a newline on both sides of a value.
    """

    call: ClassVar[tuple[str, str, str]]
    field: ClassVar[tuple[str, str, str]]
    framed: ClassVar[bool] = False

    def _reading(self) -> Steps[None]:
        begin, end = self.markers[:2]
        while (opener := (yield from self._until(*self.openers()))) is not None:
            if (yield from self._attempt(self._calls(opener))) and opener == begin:
                yield from self._optional(end)

    @classmethod
    def openers(cls) -> Sequence[str]:
        """See CallFormat."""
        return cls.markers[0], cls.call[0]

    def _calls(self, opener: str) -> Steps[None]:
        """Parse the calls after the begin mark, or one call of a known tool if the mark was left out."""
        if opener == self.markers[0]:
            yield from self._expect(self.call[0])
            yield from self._one()
            while (yield from self._optional(self.call[0])):
                yield from self._one()
            return
        yield from self._one(known=True)

    def _one(self, known: bool = False) -> Steps[None]:
        name = (yield from self._raw(self.call[1])).strip()
        if not self._is_name(name) or (known and name not in self._tools):
            raise Malformed
        self._open(name)
        while (tag := (yield from self._either(self.field[0], self.call[2]))) == self.field[0]:
            yield from self._field_value(name, (yield from self._raw(self.field[1])), self._ends())
        if tag is None:
            raise Malformed
        self._close()

    def _field_value(self, name: str, key: str, ends: Sequence[str]) -> Steps[None]:
        """Parse the argument `key`, whose value ends with one of `ends`."""
        schema = self._tools.get(name, {})
        types = types_of(property_of(schema, key), schema)
        if self.framed and (yield from self._next(solid=False)) == "\n":
            self._at += 1
        if types == STRING:
            yield from self._text_value(key, ends)
            return
        text = yield from self._raw(*ends, most=None)
        value = json_of(text.removesuffix("\n") if self.framed else text, types)
        self._key(key)
        self._argue(value)
        self._mark = self._at

    def _text_value(self, key: str, ends: Sequence[str]) -> Steps[None]:
        """Parse a string, and emit it as it arrives."""
        begun, held = False, ""
        while True:
            rest = self._text[self._at :]
            found = _first(rest, ends, 0)
            text = held + rest[: len(rest) - self._partial(rest, ends) if found is None else found[0]]
            self._at += len(text) - len(held)
            held = "\n" if self.framed and text.endswith("\n") else ""
            if not begun:
                self._key(key)
                self._argue('"')
                begun = True
            self._argue(json.dumps(text[: len(text) - len(held)], ensure_ascii=False)[1:-1])
            self._mark = self._at - len(held)
            if found is not None:
                self._at += len(ends[0]) if found[1] == ends[0] else 0
                self._argue('"')
                self._mark = self._at
                return
            if self._ended:
                raise Malformed
            yield

    def _raw(self, *ends: str, most: int | None = _LONGEST_KEY) -> Steps[str]:
        """Return the text before the first of `ends`. `ends[0]` is consumed, the others are not."""
        looked, longest = self._at, max(map(len, ends))
        while True:
            found = _first(self._text, ends, looked)
            if found is not None:
                at, end = found
                text, self._at = self._text[self._at : at], at + (len(end) if end == ends[0] else 0)
                return text
            if self._ended or (most is not None and len(self._text) - self._at > most):
                self._at = len(self._text) if self._ended else self._at
                raise Malformed
            before = max(len(self._text) - longest + 1, self._at) - self._at
            yield
            looked = self._at + before

    @classmethod
    def _ends(cls) -> Sequence[str]:
        """Return the ends of a value: its end tag, or the ends of the call and the section if that was left out."""
        end = cls.markers[1]
        return cls.field[2], f"{cls.call[2]}\n{end}", cls.call[2] + end

    # --- grammars

    @classmethod
    def behind(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        before, middle, end = cls.call
        calls = " | ".join(f"{lark(f'{before}{name}{middle}{chr(10)}')} {rule}" for name, rule in tools.items())
        ones = repeated("one_call", lark("\n"), 1 if cls.between is not None else most)
        one = f"one_call: (call) {marker(end)}"
        whole = f'behind: "\\n" {ones} "\\n" {marker(cls.markers[1])}'
        return "\n".join([whole, one, f"call: {calls}", *cls._shared(marker)])

    @classmethod
    def _any(cls, rule: str, marker: Marker) -> str:
        before, middle, _ = cls.field
        line = lark("\n") if cls.framed else ""
        one = f'{lark(before)} /{NAME.pattern}/ {lark(middle)} {line} any_text "\\n"'
        return f"{rule}: ({one}){{0,{_MOST_FIELDS}}}"

    @classmethod
    def _shared(cls, marker: Marker) -> Sequence[str]:
        ends = cls._ends()
        text = text_until("any_text", ends[0], marker, before="\n" if cls.framed else "", never=ends)
        return [*super()._shared(marker), text]

    @classmethod
    def _joined(cls, rule: str, fields: Sequence[Field]) -> Sequence[str]:
        parts = (field.rule if field.required else f"{field.rule}?" for field in fields)
        return [f"{rule}: {' '.join(parts) or lark('')}"]

    @classmethod
    def _field(cls, field: Field, marker: Marker) -> Sequence[str]:
        before, middle, _ = cls.field
        head = lark(before + field.key + middle + ("\n" if cls.framed else ""))
        return cls._valued(field, head, lark("\n"), marker)

    @classmethod
    def _valued(cls, field: Field, head: str, tail: str, marker: Marker) -> Sequence[str]:
        """Return rules for the value after `head`, with its end tag and `tail`."""
        if not _sayable(field.key):
            raise cls._unsaid(f"the property {field.key[:60]!r}")
        frame, ends = "\n" if cls.framed else "", cls._ends()
        close = f"{lark(frame)} {marker(ends[0])}" if frame else marker(ends[0])
        lines, values = [], []
        for i, one in enumerate(cls._alternatives(field)):
            rule, types = f"{field.rule}_{i}", types_of(one, field.root)
            if "enum" in one or "const" in one:
                given = [one["const"]] if "const" in one else one["enum"]
                if not isinstance(given, list):
                    raise cls._unsaid(f"an enum that is no list for the property {field.key[:60]!r}")
                values += [f"{lark(text)} {close}" for text in cls._texts(field, given)]
            elif (not types or "string" in types) and (patterns := cls._patterns(field, one)) == [ANY]:
                values.append("any_text")
            elif not types or "string" in types:
                lines.append(text_until(rule, ends[0], marker, patterns, frame, ends))
                values.append(rule)
            else:
                found, more = cls._json(rule, one, field.root)
                values.append(f"{found} {close}")
                lines += more
        return [f"{field.rule}: {head} ({' | '.join(values)}) {tail}", *lines]

    @classmethod
    def _texts(cls, field: Field, given: Sequence[object]) -> list[str]:
        """Return the texts of an enum's values, except those that would be parsed as different values."""
        types = types_of(field.schema, field.root)
        said = [(one, one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)) for one in given]
        told = [(one, text) for one, text in said if _first(text, cls._ends(), 0) is None]
        texts = [text for one, text in told if _read(text, types) == (type(one), one)]
        if not texts:
            raise cls._unsaid(f"values of {field.key[:60]!r} that cannot be told from others")
        return texts


def _first(text: str, marks: Sequence[str], start: int) -> tuple[int, str] | None:
    """Return the position and text of the first of the marks from `start` on, or None."""
    return min(((at, mark) for mark in marks if (at := text.find(mark, start)) >= 0), default=None)


def _read(text: str, types: frozenset[str]) -> tuple[type, object]:
    value = json.loads(json_of(text, types))
    return type(value), value


def _sayable(key: str) -> bool:
    """Return whether an argument's name survives parsing unchanged."""
    return 0 < len(key) <= _LONGEST_KEY and not set(key) & set('<>"\n') and key == key.strip()


class Glm45(Xml):
    """<tool_call>NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument, and </tool_call>.

    GLM-4.5 writes each on a line of its own, GLM-4.7 does not.
    """

    name = "glm45"
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    shown = ("<tool_call>", "<arg_key>")
    between = ""

    @classmethod
    def _ends(cls) -> Sequence[str]:
        return cls.markers[5:]

    @classmethod
    def openers(cls) -> Sequence[str]:
        """See CallFormat."""
        return cls.markers[:1]

    def _calls(self, opener: str) -> Steps[None]:
        _, end, key, key_end, value, _ = self.markers
        yield from self._next()
        name = yield from self._word()
        if not self._is_name(name):
            raise Malformed
        self._open(name)
        tag = yield from self._either(key, end, consume=False)
        if tag is None or (tag == end and name not in self._tools):
            raise Malformed
        while (yield from self._optional(key)):
            found = (yield from self._raw(key_end)).strip()
            yield from self._expect(value)
            yield from self._field_value(name, found, self._ends())
        if not (yield from self._optional(end)):
            raise Malformed
        self._close()

    @classmethod
    def behind(cls, tools: Mapping[str, str], marker: Marker, most: int) -> str:
        """See CallFormat."""
        calls = " | ".join(f"{lark(name)} {_LINE} {rule}" for name, rule in tools.items())
        return "\n".join([f"behind: (call) {marker(cls.markers[1])} {_LINE}", f"call: {calls}", *cls._shared(marker)])

    @classmethod
    def _any(cls, rule: str, marker: Marker) -> str:
        one = f"{cls._head(f'/{NAME.pattern}/', marker)} any_text {_LINE}"
        return f"{rule}: ({one}){{0,{_MOST_FIELDS}}}"

    @classmethod
    def _field(cls, field: Field, marker: Marker) -> Sequence[str]:
        return cls._valued(field, cls._head(lark(field.key), marker), _LINE, marker)

    @classmethod
    def _head(cls, key: str, marker: Marker) -> str:
        """Return the Lark expression of a key with its marks, up to the start of its value."""
        begin, end, value = map(marker, cls.markers[2:5])
        return f"{begin} {key} {end} {_LINE} {value}"
