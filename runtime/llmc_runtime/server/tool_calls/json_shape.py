"""Call formats with JSON arguments, declared as a sequence of parts from which the reader and the grammar derive.

A part is a text, or one of the parts below. A grammar requires a text literally (one of the format's `markers` may be a
special token). A reader allows white space before every text, and skips texts that are white space.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from llmc_runtime.grammar.lark_text import Marker, lark, repeated
from llmc_runtime.server.tool_calls.call_format import CallFormat, Malformed, Steps
from llmc_runtime.server.tool_calls.unmarked import Unmarked


class Json(Enum):
    """Parts that depend on the tool: a name followed by arguments, or both in JSON objects."""

    NAME = "name"
    ARGUMENTS = "arguments"
    OBJECT = '{"name": NAME, "arguments": ARGUMENTS}'
    LIST = "[OBJECT, ...]"


class Word(Enum):
    """Parts of letters and digits, with the regular expressions that grammars allow."""

    ID = "[A-Za-z0-9]{9}"
    INDEX = "[0-9]{1,3}"


@dataclass(frozen=True)
class Optional:
    """Parts that a reader does not require. A grammar does with `enforced`."""

    parts: Sequence[str | Word]
    enforced: bool = True


Part = str | Json | Word | Optional


class JsonShape(CallFormat):
    """Calls after the mark `markers[0]`, up to the text `end`. A subclass is a declaration.

    - `call`: the parts of one call. If they start with one of `markers`, this mark precedes each further call, and the
      first call even if `markers[0]` was left out. If `between` is None, they start with a text or with a LIST.
    - `other_calls`: the parts of other notations, which are read as well; one starts with a name, one
      is a LIST, one an OBJECT.
    - `others`: other texts that may stand in place of the first mark.
    - `line`: the text between calls, if all follow one mark (`between` is None).
    - `arguments_key`: the key of the arguments in objects. The reader accepts `arguments` and `parameters`.
    """

    call: ClassVar[Sequence[Part]]
    other_calls: ClassVar[Sequence[Sequence[Part]]] = ()
    end: ClassVar[str] = ""
    others: ClassVar[Sequence[str]] = ()
    line: ClassVar[str] = ""
    arguments_key: ClassVar[str] = "arguments"

    @classmethod
    def openers(cls) -> Sequence[str]:
        """See CallFormat."""
        return *cls.markers[:1], *cls.others, *cls._call_mark()

    @classmethod
    def _call_mark(cls) -> Sequence[str]:
        """Return the mark at the start of each call, if there is one."""
        return [part for part in cls.call[:1] if isinstance(part, str) and part in cls.markers]

    # --- grammar

    @classmethod
    def after_mark(cls, tools: Mapping[str, str], marker: Marker, max_calls: int) -> str:
        """See CallFormat."""
        uses = [i for i, part in enumerate(cls.call) if isinstance(part, Json)]
        before, after = cls.call[: uses[0]], cls.call[uses[-1] + 1 :]
        calls = [cls._lark(cls._named(cls.call[uses[0] : uses[-1] + 1], *tool), marker) for tool in tools.items()]
        listed = cls.call[uses[0]] is Json.LIST
        middle = "(call)"
        if listed:
            bracket = "" if cls.markers[0].endswith("[") else '"[" '
            middle = f'{bracket}{repeated("call", lark(", "), max_calls)} "]"'
        call = " ".join(filter(None, [cls._lark(before, marker), middle, cls._lark(after, marker)]))
        times = 1 if listed or cls.between is not None else max_calls
        ends = cls._lark([cls.end] if cls.end else [], marker)
        whole = f"after_mark: {repeated('one_call', lark(cls.line), times)} {ends}".rstrip()
        return "\n".join([whole, f"one_call: {call}", f"call: {' | '.join(calls)}"])

    @classmethod
    def _named(cls, parts: Sequence[Part], name: str, rule: str) -> Iterator[Part | tuple[str]]:
        """Replace the parts that depend on the tool: by texts, and by (rule,) for its arguments."""
        for part in parts:
            if part is Json.ARGUMENTS:
                yield (rule,)
            elif part is Json.NAME:
                yield name
            elif isinstance(part, Json):
                yield from (f'{{"name": "{name}", "{cls.arguments_key}": ', (rule,), "}")
            else:
                yield part

    @classmethod
    def _lark(cls, parts: Iterable[Part | tuple[str]], marker: Marker) -> str:
        return expression(parts, marker, cls.markers)

    # --- reader

    def _closing_marks(self, opener: str) -> Steps[None]:
        if self.end:
            yield from self._optional(self.end)

    def _parse_calls(self, opener: str) -> Steps[None]:
        mark = self._call_mark()
        if not mark:
            yield from self._parts((yield from self._notation()))
            first = self.call[0]
            while self.between is None and isinstance(first, str) and (yield from self._optional(first.strip())):
                yield from self._parts(self.call[1:])
            return
        if opener not in mark:
            yield from self._expect(mark[0])
        yield from self._parts(self.call[1:])
        while (yield from self._optional(mark[0])):
            yield from self._parts(self.call[1:])

    def _notation(self) -> Steps[Sequence[Part]]:
        """Return the parts of the notation that follows."""
        if not self.other_calls:
            return self.call
        first = {"[": Json.LIST, "{": Json.OBJECT}.get((yield from self._next()), Json.NAME)
        for parts in (self.call, *self.other_calls):
            if next(part for part in parts if isinstance(part, Json)) is first:
                return parts
        return self.call

    def _parts(self, parts: Sequence[Part]) -> Steps[None]:
        """Parse one call."""
        name, emitted = "", False
        for part in parts:
            if part is Json.NAME:
                yield from self._next()
                name = yield from self._word()
            elif part is Json.OBJECT or part is Json.LIST:
                yield from self._object() if part is Json.OBJECT else self._list()
            elif part is Json.ARGUMENTS:
                if not self._is_name(name):
                    raise Malformed
                yield from self._arguments(name)
                emitted, self._mark = True, self._at  # the text after this is valid, or becomes content
            elif isinstance(part, Optional):
                yield from self._optional_parts(part.parts)
            elif isinstance(part, str) and part.strip():
                yield from self._expect(part.strip())
        if emitted:
            self._mark = self._at

    def _list(self) -> Steps[None]:
        """Parse the calls in a JSON list."""
        yield from self._symbol("[")
        end = ","
        while end == ",":
            yield from self._object()
            self._mark = self._at  # the text after this is valid, or becomes content
            end = yield from self._symbol(",]")

    def _object(self) -> Steps[None]:
        """Parse a call as {"name": ..., "arguments": {...}}, with keys in any order."""
        name: str | None = None
        arguments: str | None = None  # arguments that precede the name
        begun = False
        end = yield from self._symbol("{")
        while end != "}":
            key = yield from self._string()
            yield from self._symbol(":")
            if key == "name" and name is None:
                name = yield from self._string()
                if not self._is_name(name):
                    raise Malformed
                self._is_call = name in self._tools
            elif key in ("arguments", "parameters") and not begun and arguments is None:
                begun = name is not None
                arguments = yield from self._arguments(name)
                self._mark = self._at if begun else self._mark
            elif key in ("type", "id"):
                yield from self._value()
            else:
                raise Malformed
            end = yield from self._symbol(",}")
        if name is None:
            raise Malformed
        if not begun:
            self._emit_name(name)
            self._emit_arguments(arguments or "{}")

    def _optional_parts(self, parts: Sequence[str | Word]) -> Steps[None]:
        """Consume the parts if the first one follows; then the words have to be valid."""
        for i, part in enumerate(parts):
            if isinstance(part, Word):
                word = yield from self._word()
                if part is Word.INDEX and not word.isdigit():
                    raise Malformed
            elif part.strip() and not (yield from self._optional(part.strip())):
                if i:
                    raise Malformed
                return


def expression(parts: Iterable[object], marker: Marker, marks: Collection[str]) -> str:
    """Return the Lark expression of parts in sequence: texts, words, optional parts, and (expression,).

    `marks` are the texts that may be special tokens.
    """
    out, text = list[str](), ""
    for part in (*_enforced(parts), ""):
        if isinstance(part, str) and part not in (*marks, ""):
            text += part
            continue
        if text:
            out.append(lark(text))
            text = ""
        if isinstance(part, Optional):
            out.append(f"({expression(part.parts, marker, marks)})?")
        elif isinstance(part, Word):
            out.append(f"/{part.value}/")
        elif isinstance(part, tuple):
            out.append(part[0])
        elif isinstance(part, str) and part:
            out.append(marker(part))
    return " ".join(out)


def _enforced(parts: Iterable[object]) -> Iterator[object]:
    """Replace the optional parts that a grammar requires by their contents."""
    for part in parts:
        yield from part.parts if isinstance(part, Optional) and part.enforced else (part,)


class UnmarkedJson(Unmarked, JsonShape):
    """Calls as JSON objects that need no mark. See Unmarked."""

    bracket = "{"
    between = None
    call = (Json.OBJECT,)

    @classmethod
    def _opening(cls, name: str) -> str:
        return rf'\{{[ \n]*("type" ?: ?"function", ?)?"name" ?: ?"{name}" ?,[ \n]*"{cls.arguments_key}" ?:'

    @classmethod
    def _closing(cls, rule: str, max_calls: int) -> str:
        return f'" "? {rule} "}}"'

    @classmethod
    def _openings(cls, names: str) -> str:
        return rf'\{{(?s:.*)"name"[ \n\t\r]*:[ \n\t\r]*"({names})"'
