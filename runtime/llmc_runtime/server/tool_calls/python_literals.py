"""Incremental scanner of Python literals, which converts them to JSON without evaluating anything.

Accepts strings (with one or three quotes, without prefix), numbers, True, False, None and JSON's words for them, lists,
and dicts with string keys. Nesting is limited to MAX_DEPTH, and other literals to MAX_LITERAL characters. Strings may
contain line breaks.
"""

from __future__ import annotations

import json
import re
from types import MappingProxyType

from llmc_runtime.server.tool_calls.json_stream import MAX_DEPTH, MAX_LITERAL, SPACE

_WORDS = MappingProxyType(
    {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
)
_ESCAPES = MappingProxyType(
    {
        "n": "\n",
        "t": "\t",
        "r": "\r",
        "b": "\b",
        "f": "\f",
        "a": "\a",
        "v": "\v",
        "\n": "",
        "\\": "\\",
        "'": "'",
        '"': '"',
    }
)
_OCTAL = "01234567"
_CODES = MappingProxyType({"x": 2, "u": 4, "U": 8})  # number of digits in an escape sequence
_INTEGER = re.compile(r"([+-]?)(0+|[1-9](?:_?[0-9])*)")
_FLOAT = re.compile(r"([+-]?)([0-9](?:_?[0-9])*)?(?:\.((?:[0-9](?:_?[0-9])*)?))?([eE][+-]?[0-9]+)?")
_BASED = re.compile(r"([+-]?)(0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+)")
_VALUE, _KEY, _COLON, _AFTER, _QUOTE, _STRING, _ESCAPE, _CODE, _LITERAL, _DONE = range(10)


class PythonText:
    """Scans one literal. The joined results of `take` are a prefix of its JSON, and all of it once `done`."""

    def __init__(self) -> None:
        self.done = self.failed = False
        self._state, self._stack = _VALUE, list[str]()
        self._first = True  # the current list or dict has no element yet
        self._is_key = False  # the current string is a key
        self._quote, self._triple, self._quotes = "", False, 0
        self._held = ""  # characters of the current literal or escape
        self._digits = 0
        self._lead = ""  # text to emit before the next value
        self._new: list[str] = []
        self.unsaid = 0  # characters read since the last one that contributed to the JSON

    @property
    def promising(self) -> bool:
        """Whether anything has been converted."""
        return bool(self._new)

    def take(self) -> str:
        """Return the JSON of the text that was read since the last call."""
        new, self._new = "".join(self._new), []
        return new

    def feed(self, text: str, at: int) -> int:
        """Read on from position `at`. Returns the position after the value, of the first invalid character, or of the
        text's end.
        """
        while at < len(text) and not self.done:
            size = len(self._new)
            used = self._step(text[at])
            if used is None:
                self.failed = not self.done
                break
            at += used
            self.unsaid = 0 if len(self._new) > size else self.unsaid + used
        return at

    def _step(self, char: str) -> int | None:
        """Process a character. Returns 1 if it was consumed, 0 if it is to be processed again, None if invalid."""
        state = self._state
        if state == _STRING:
            return self._in_string(char)
        if state == _QUOTE:
            return self._opening(char)
        if state in (_ESCAPE, _CODE):
            return self._escape(char) if state == _ESCAPE else self._code(char)
        if state == _LITERAL:
            return self._in_literal(char)
        if char in SPACE:
            return 1
        return 1 if self._between(char) else None

    # --- strings

    def _opening(self, char: str) -> int:
        """Process the characters after the first quote: an empty string, a string, or three quotes."""
        if char != self._quote:
            if self._quotes:
                self._end_string()
            else:
                self._state = _STRING
            return 0
        self._quotes += 1
        if self._quotes == 2:
            self._triple, self._state, self._quotes = True, _STRING, 0
        return 1

    def _in_string(self, char: str) -> int:
        if char == self._quote:
            self._quotes += 1
            if self._quotes == (3 if self._triple else 1):
                self._end_string()
            return 1
        if self._quotes:
            self._say(self._quote * self._quotes)
            self._quotes = 0
        if char == "\\":
            self._state = _ESCAPE
        else:
            self._say(char)
        return 1

    def _end_string(self) -> None:
        self._end_value('"')
        if self._is_key:
            self._state, self._is_key = _COLON, False

    def _escape(self, char: str) -> int:
        self._state = _STRING
        if char in _CODES:
            self._held, self._digits, self._state = char, _CODES[char], _CODE
        elif char in _OCTAL:
            self._held, self._digits, self._state = "o" + char, 2, _CODE
        else:
            self._say(_ESCAPES.get(char, "\\" + char))
        return 1

    def _code(self, char: str) -> int | None:
        octal = self._held[0] == "o"
        if char in (_OCTAL if octal else "0123456789abcdefABCDEF"):
            self._held, self._digits = self._held + char, self._digits - 1
            return 1 if self._digits else self._coded(1)
        return self._coded(0) if octal else None

    def _coded(self, used: int) -> int | None:
        """Emit the character of a complete numeric escape."""
        code = int(self._held[1:], 8 if self._held[0] == "o" else 16)
        if code > 0x10FFFF:
            return None
        self._state = _STRING
        self._say(chr(code))
        return used

    def _say(self, text: str) -> None:
        """Emit text of a string; an unpaired surrogate remains an escape."""
        plain = not any("\ud800" <= char <= "\udfff" for char in text)
        self._new.append(json.dumps(text, ensure_ascii=not plain)[1:-1])

    # --- other literals

    def _in_literal(self, char: str) -> int | None:
        if char.isascii() and (char.isalnum() or char in "+-._"):
            self._held += char
            return 1 if len(self._held) <= MAX_LITERAL else None
        value = _json_of(self._held)
        if value is None:
            return None
        self._end_value(value)
        return 0

    # --- between values

    def _between(self, char: str) -> bool:
        """Process a character between values, or one that starts or ends a value."""
        state, stack = self._state, self._stack
        if state == _COLON:
            self._state = _VALUE
            if char == ":":
                self._new.append(": ")
            return char == ":"
        if stack and char == stack[-1] and (state == _AFTER or (state in (_VALUE, _KEY) and not self._pending_value())):
            stack.pop()
            self._end_value(char)
            return True
        if state == _AFTER:
            self._state = _KEY if stack[-1] == "}" else _VALUE
            self._first = False
            return char == ","
        return self._begin(char)

    def _pending_value(self) -> bool:
        """Return whether a value must follow, after a colon."""
        return self._state == _VALUE and self._stack[-1] == "}"

    def _begin(self, char: str) -> bool:
        key = self._state == _KEY
        if self._stack and not self._first and not self._pending_value():
            self._lead = ", "
        if char in "'\"":
            self._quote, self._triple, self._quotes, self._state = char, False, 0, _QUOTE
            self._put('"')
            self._is_key = key
            return True
        if key:
            return False
        if char in "{[":
            self._stack.append("}" if char == "{" else "]")
            self._state, self._first = _KEY if char == "{" else _VALUE, True
            self._put(char)
            return len(self._stack) <= MAX_DEPTH
        self._state, self._held = _LITERAL, char
        return char.isascii() and (char.isalnum() or char in "+-.")

    def _put(self, text: str) -> None:
        self._new.append(self._lead + text)
        self._lead = ""

    def _end_value(self, text: str) -> None:
        self._put(text)
        self._state = _AFTER if self._stack else _DONE
        self.done = not self._stack


def _json_of(literal: str) -> str | None:
    """Return the JSON of a number or word; None if the literal is neither."""
    if literal in _WORDS:
        return _WORDS[literal]
    if match := _INTEGER.fullmatch(literal):
        return _signed(match[1], match[2].replace("_", "").lstrip("0") or "0")
    if match := _BASED.fullmatch(literal):
        return _signed(match[1], str(int(match[2], 0)))
    match = _FLOAT.fullmatch(literal)
    if match is None or not (match[2] or match[3]) or (match[3] is None and not match[4]):
        return None
    whole, part = ((match[i] or "").replace("_", "") for i in (2, 3))
    return _signed(match[1], f"{whole.lstrip('0') or '0'}{'.' + (part or '0') if match[3] is not None else ''}") + (
        match[4] or ""
    )


def _signed(sign: str, number: str) -> str:
    return ("-" if sign == "-" else "") + number
