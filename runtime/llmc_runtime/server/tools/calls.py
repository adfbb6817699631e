"""Generated text on its way into content and tool calls: what a format is, and what all share. It samples nothing.

Invariants, whatever the text and however it is cut into pieces: pieces joined are the same; what was given out is never
taken back; the arguments of a call are the beginning of a JSON object, and the whole of one unless the text ended or
was no JSON there; all else is content, but for the marks around calls and up to MAX_SPACE of white space beside them.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from llmc_runtime.server.tools.scan import JsonText

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_SPACE = 64
_SPACE = " \t\r\n"

T = TypeVar("T")
Steps = Generator[None, None, T]  # a reader that waits for more text where it yields


@dataclass(frozen=True)
class CallPiece:
    """What is new of the call `index`: its `name` with the first piece, then its arguments as they come."""

    index: int
    name: str | None
    arguments: str


class Malformed(Exception):
    """What was read is no call."""


class CallFormat(ABC):
    """A format of tool calls, and as an instance the reader of one output in it; `names` are those of the tools.

    `markers`: texts that may be special tokens and have to be visible. `short_ids`: ids of calls are nine letters and
    digits. `several`: an answer may have more than one call. `channels`: there are marks around answers without calls.
    """

    name: ClassVar[str]
    markers: ClassVar[Sequence[str]]
    short_ids: ClassVar[bool] = False
    several: ClassVar[bool] = True
    channels: ClassVar[bool] = False

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._text, self._at, self._ended = "", 0, False
        self._mark: int | None = None  # where what may become a call began
        self._space = ""  # held back: it is dropped where a call follows
        self._fresh_line = True  # only white space since the last line's end
        self._out: list[str | CallPiece] = []
        self._count = 0
        self._work = self._read()
        next(self._work)

    @classmethod
    @abstractmethod
    def fits(cls, template: str) -> bool:
        """Whether a chat template shows calls in this format."""

    @classmethod
    @abstractmethod
    def rules(cls, tools: Mapping[str, str], marker: Callable[[str], str], most: int) -> str:
        """Lark rules of which `calls` is 1 to `most` calls; `tools`: the rule of the arguments by name; `marker`: how
        Lark has a text that is made of special tokens, or is not."""

    @classmethod
    def before_answer(cls, marker: Callable[[str], str]) -> str:
        """What stands in front of an answer without calls, for Lark."""
        return ""

    def push(self, text: str) -> list[str | CallPiece]:
        """Content (a text) and pieces of calls that are certain with this much more text."""
        start = self._at if self._mark is None else self._mark
        self._text, self._at = self._text[start:] + text, self._at - start
        self._mark = None if self._mark is None else 0
        next(self._work)
        return self._taken()

    def finish(self) -> list[str | CallPiece]:
        """No more text comes: the rest."""
        self._ended = True
        next(self._work, None)
        if self._space and not self._count:
            self._out.append(self._space)
        return self._taken()

    @abstractmethod
    def _reading(self) -> Steps[None]:
        """Read everything."""

    def _read(self) -> Steps[None]:
        yield
        yield from self._reading()

    def _taken(self) -> list[str | CallPiece]:
        out, self._out = self._out, []
        return out

    # --- what comes out

    def _say(self, text: str) -> None:
        """It is content."""
        *lines, last = text.split("\n")
        self._fresh_line = (bool(lines) or self._fresh_line) and not last.strip()
        text = self._space + text
        sure = max(len(text.rstrip(_SPACE)), len(text) - MAX_SPACE)
        self._space = text[sure:]
        if sure:
            self._out.append(text[:sure])

    def _begin(self, name: str) -> None:
        """A call is certain."""
        self._out.append(CallPiece(self._count, name, ""))
        self._count += 1
        self._space, self._mark, self._fresh_line = "", None, True

    def _argue(self, text: str) -> None:
        if text:
            self._out.append(CallPiece(self._count - 1, None, text))

    # --- what is read

    def _until(self, *openers: str) -> Steps[str | None]:
        """Everything in front of the first of `openers` is content; that one, which is read; None at the end."""
        while True:
            rest = self._text[self._at :]
            found = min(((rest.index(one), one) for one in openers if one in rest), default=None)
            length = len(rest) - self._partial(rest, openers) if found is None else found[0]
            self._say(rest[:length])
            self._at += length
            if found is not None:
                self._mark, self._at = self._at, self._at + len(found[1])
                return found[1]
            if self._ended:
                return None
            yield

    def _partial(self, text: str, openers: Sequence[str]) -> int:
        """The length of the longest beginning of one of `openers` that `text` ends with."""
        longest = 0 if self._ended else max(map(len, openers)) - 1
        ends = range(min(longest, len(text)), 0, -1)
        return next((n for n in ends if any(one.startswith(text[-n:]) for one in openers)), 0)

    def _attempt(self, reader: Steps[None]) -> Steps[bool]:
        """Read calls. What was read since the mark is content where it makes no sense. Whether there was a call."""
        before = self._count
        try:
            yield from reader
        except Malformed:
            if self._mark is not None:
                self._say(self._text[self._mark : self._at])
        self._mark = None
        return self._count > before

    def _optional(self, marker: str, *, consume: bool = True) -> Steps[bool]:
        """Whether `marker` follows, behind white space; both are read then, and nothing otherwise."""
        while True:
            rest = self._text[self._at :]
            bare = rest.lstrip(_SPACE)
            if bare.startswith(marker) and len(rest) - len(bare) <= MAX_SPACE:
                self._at += len(rest) - len(bare) + len(marker) if consume else 0
                return True
            if self._ended or not marker.startswith(bare) or len(rest) - len(bare) > MAX_SPACE:
                return False
            yield

    def _next(self, *, solid: bool = True) -> Steps[str]:
        """The next character, which is not read, behind white space, which is; "" at the end."""
        while True:
            while self._at < len(self._text):
                char = self._text[self._at]
                if not solid or char not in _SPACE:
                    return char
                self._at += 1
            if self._ended:
                return ""
            yield

    def _symbol(self, allowed: str) -> Steps[str]:
        """One of these characters."""
        char = yield from self._next()
        if not char or char not in allowed:
            raise Malformed
        self._at += 1
        return char

    def _value(self, take: Callable[[str], None] | None = None) -> Steps[str]:
        """A JSON value as it is written; `take` gets it as it comes instead."""
        scan, parts = JsonText(), list[str]()
        yield from self._next()
        while True:
            self._at = scan.feed(self._text, self._at)
            if scan.promising:
                (take or parts.append)(scan.take())
            if scan.done:
                return "".join(parts)
            if scan.failed or self._ended:
                raise Malformed
            yield

    def _string(self) -> Steps[str]:
        if (yield from self._next()) != '"':
            raise Malformed
        return str(json.loads((yield from self._value())))

    def _is_name(self, name: str) -> bool:
        return NAME.fullmatch(name) is not None

    def _object(self) -> Steps[None]:
        """A call as {"name": ..., "arguments": {...}}, whose keys come in any order."""
        name: str | None = None
        arguments: str | None = None  # read in front of the name
        begun = False
        end = yield from self._symbol("{")
        while end != "}":
            key = yield from self._string()
            yield from self._symbol(":")
            if key == "name" and name is None:
                name = yield from self._string()
                if not self._is_name(name):
                    raise Malformed
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
            self._begin(name)
            self._argue(arguments or "{}")

    def _arguments(self, name: str | None) -> Steps[str]:
        """The arguments of a call that begins with them where its name is known; else their text. null is {}."""
        first = yield from self._next()
        if first == "n" and (yield from self._value()) == "null":
            if name is not None:
                self._begin(name)
                self._argue("{}")
            return "{}"
        if first != "{":
            raise Malformed
        if name is None:
            return (yield from self._value())
        begun = False

        def take(text: str) -> None:
            nonlocal begun
            if not begun:
                self._begin(name)
            begun = True
            self._argue(text)

        return (yield from self._value(take))


def choice_of(tools: Mapping[str, str], before: str, between: str, after: str) -> str:
    """The Lark alternatives of one call for each tool: `before` NAME `between` arguments `after`."""
    return " | ".join(
        f"{lark(before + name + between)} {rule}{after and ' ' + lark(after)}" for name, rule in tools.items()
    )


def lark(text: str) -> str:
    """A text as Lark has it."""
    return json.dumps(text)


def repeated(one: str, between: str, most: int) -> str:
    """Lark for 1 to `most` times the rule `one`."""
    return one if most == 1 else f"{one} ({between} {one}){{0,{most - 1}}}"
