"""Incremental scanner of JSON values (RFC 8259), character by character, without building the value.

There are two differences: nesting is limited to MAX_DEPTH and numbers to MAX_LITERAL characters; and control characters
in strings, which models write, are converted to escapes.

A stream needs the text of the arguments as the model writes it, and the character at which the value ends. A parser
such as jiter's partial mode returns values instead; it also parses the whole prefix again for every piece, so that a
response costs quadratic time.
"""

from __future__ import annotations

import json
import re

MAX_DEPTH = 64
MAX_LITERAL = 400
SPACE = " \t\r\n"  # white space between the tokens of JSON
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# A number, or the beginning of one.
_PART = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?[0-9]*)?)?")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # part of a string
_WORDS = ("true", "false", "null")
_VALUE, _FIRST_VALUE, _KEY, _FIRST_KEY, _COLON, _AFTER, _STRING, _ESCAPE, _HEX, _LITERAL, _DONE = range(11)


class JsonText:
    """Scans one value. The joined results of `take` are a prefix of a JSON value, and all of it once `done`."""

    def __init__(self) -> None:
        self.done = self.failed = False
        self._state, self._stack = _VALUE, list[str]()
        self._is_key = False  # the current string is a key
        self._literal, self._digits = "", 0
        self._new: list[str] = []

    @property
    def promising(self) -> bool:
        """Whether more than the value's first bracket has been read."""
        return self.done or not (len(self._stack) == 1 and self._state in (_FIRST_KEY, _FIRST_VALUE))

    def feed(self, text: str, at: int) -> int:
        """Read on from position `at`. Returns the position after the value, of the first invalid character, or of the
        text's end.
        """
        while at < len(text) and not self.done:
            if self._state == _STRING and (plain := _PLAIN.match(text, at)):
                self._new.append(plain[0])
                at = plain.end()
                continue
            emitted = self._step(text[at])
            if emitted is None:
                self.failed = not self.done
                break
            self._new.append(emitted)
            at += 1
        return at

    def take(self) -> str:
        """Return the text read since the last call."""
        new, self._new = "".join(self._new), []
        return new

    def _step(self, char: str) -> str | None:
        """Return the text to keep for a character; None if it does not belong to the value."""
        state = self._state
        if state == _STRING:
            return self._in_string(char)
        if state == _ESCAPE:
            self._state, self._digits = (_HEX, 4) if char == "u" else (_STRING, 0)
            return char if char in '"\\/bfnrtu' else None
        if state == _HEX:
            self._digits -= 1
            self._state = _HEX if self._digits else _STRING
            return char if char in "0123456789abcdefABCDEF" else None
        if state == _LITERAL:
            if char.isascii() and (char.isalnum() or char in "+-."):
                return char if self._grow(char) else None
            if self._literal not in _WORDS and not _NUMBER.fullmatch(self._literal):
                return None
            self._end_value()
            if self.done:
                return None
        return char if char in SPACE or self._between(char) else None

    def _in_string(self, char: str) -> str:
        if char == '"':
            if self._is_key:
                self._state = _COLON
            else:
                self._end_value()
        elif char == "\\":
            self._state = _ESCAPE
        elif char < " ":
            return json.dumps(char)[1:-1]
        return char

    def _between(self, char: str) -> bool:
        """Process a character between values, or one that starts or ends a value."""
        state, stack = self._state, self._stack
        if state in (_VALUE, _FIRST_VALUE):
            return (char == "]" and state == _FIRST_VALUE and self._close(char)) or self._begin(char)
        if state in (_KEY, _FIRST_KEY):
            if char == '"':
                self._state, self._is_key = _STRING, True
                return True
            return char == "}" and state == _FIRST_KEY and self._close(char)
        if state == _COLON:
            self._state = _VALUE
            return char == ":"
        if char == ",":
            self._state = _KEY if stack[-1] == "}" else _VALUE
            return True
        return self._close(char)

    def _begin(self, char: str) -> bool:
        if char in "{[":
            self._stack.append("}" if char == "{" else "]")
            self._state = _FIRST_KEY if char == "{" else _FIRST_VALUE
            return len(self._stack) <= MAX_DEPTH
        if char == '"':
            self._state, self._is_key = _STRING, False
            return True
        self._state, self._literal = _LITERAL, ""
        return self._grow(char)

    def _grow(self, char: str) -> bool:
        self._literal += char
        text = self._literal
        words = any(word.startswith(text) for word in _WORDS)
        return words or (len(text) <= MAX_LITERAL and _PART.fullmatch(text) is not None)

    def _close(self, char: str) -> bool:
        if self._stack[-1] != char:
            return False
        self._stack.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self._state = _AFTER if self._stack else _DONE
        self.done = not self._stack
