"""Size expressions: integer expressions over symbols, such as `2*ceil(T, 16)+1`, parsed once and evaluated often.

The grammar, which the compiler's dims print:

    sum     = product { ("+" | "-") product }
    product = atom { "*" atom }
    atom    = "-" atom | "(" sum ")" | "ceil" "(" sum "," integer ")" | integer | symbol

`ceil(x, n)` is x / n rounded up.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType

from llmc_runtime.format.errors import LlmcError

MAX_TEXT = 4096
MAX_DEPTH = 64
MAX_DIGITS = 18

_OPERATORS: Mapping[str, Callable[[int, int], int]] = MappingProxyType(
    {"+": operator.add, "-": operator.sub, "*": operator.mul}
)
_TOKEN = re.compile(r"[ \t]*(?:([0-9]+)|([A-Za-z_][A-Za-z0-9_]*)|([-+*(),]))")


@dataclass(frozen=True)
class Expr:
    """A parsed size expression.

    `code` is in postfix form: an int pushes itself, a str pushes the symbol's value, and the tuples ("+",), ("-",),
    ("*",) and ("ceil", n) are operators.
    """

    text: str
    code: tuple[int | str | tuple[str] | tuple[str, int], ...]

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The symbols that must be bound for evaluation."""
        return frozenset(c for c in self.code if isinstance(c, str))

    @property
    def const(self) -> int | None:
        """The value if no symbol occurs, else None."""
        return None if self.symbols else self({})

    def __call__(self, env: Mapping[str, int]) -> int:
        """Evaluate with the symbols' values from `env`; raise LlmcError E108 if a symbol is not bound."""
        stack: list[int] = []
        for item in self.code:
            if isinstance(item, int):
                stack.append(item)
            elif isinstance(item, str):
                if item not in env:
                    raise LlmcError("E108", f"size {self.text!r} needs a value for {item}", "recompile the artifact")
                stack.append(env[item])
            elif item[0] == "ceil":
                stack.append(-(-stack.pop() // item[1]))  # type: ignore[misc]
            else:
                right = stack.pop()
                left = stack.pop()
                stack.append(_OPERATORS[item[0]](left, right))
        return stack[0]

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=4096)
def parse(text: str) -> Expr:
    """Parse a size expression. Equal texts give the same object.

    Raises LlmcError E108 with the position of a syntax error.
    """
    if len(text) > MAX_TEXT:
        raise LlmcError(
            "E108",
            f"size expression of {len(text)} characters; at most {MAX_TEXT} are allowed",
            "recompile the artifact",
        )
    parser = _Parser(text)
    parser.sum(0)
    if parser.kind != "end":
        parser.fail("unexpected text")
    return Expr(text, tuple(parser.code))


def of(value: str | int) -> Expr:
    """Parse a size expression or a plain integer."""
    return parse(str(value))


class _Parser:
    """A recursive-descent parser with one token of lookahead that emits postfix code."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.start = 0
        self.kind = ""
        self.token = ""
        self.code: list[int | str | tuple[str] | tuple[str, int]] = []
        self.advance()

    def fail(self, reason: str) -> None:
        """Raise LlmcError E108 at the current token."""
        raise LlmcError(
            "E108", f"size expression {self.text[:80]!r}: {reason} at character {self.start}", "recompile the artifact"
        )

    def advance(self) -> None:
        """Read the next token."""
        self.start = self.at
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            if self.text[self.at :].strip(" \t"):
                self.fail("unknown character")
            self.kind, self.token = "end", ""
            return
        self.at = match.end()
        number, name, sign = match.groups()
        if number:
            self.kind, self.token = "number", number
        elif name:
            self.kind, self.token = "name", name
        else:
            self.kind, self.token = "sign", sign
        if number and len(number) > MAX_DIGITS:
            self.fail("number too long")

    def expect(self, sign: str) -> None:
        """Consume `sign`, or fail."""
        if self.kind != "sign" or self.token != sign:
            self.fail(f"expected {sign!r}")
        self.advance()

    def sum(self, depth: int) -> None:
        """Parse the rule `sum`."""
        if depth > MAX_DEPTH:
            self.fail("nested too deeply")
        self.product(depth)
        while self.kind == "sign" and self.token in ("+", "-"):
            sign = self.token
            self.advance()
            self.product(depth)
            self.code.append((sign,))

    def product(self, depth: int) -> None:
        """Parse the rule `product`."""
        self.atom(depth)
        while self.kind == "sign" and self.token == "*":
            self.advance()
            self.atom(depth)
            self.code.append(("*",))

    def atom(self, depth: int) -> None:
        """Parse the rule `atom`."""
        if depth > MAX_DEPTH:
            self.fail("nested too deeply")
        kind, token = self.kind, self.token
        if kind == "number":
            self.advance()
            self.code.append(int(token))
        elif kind == "name" and token == "ceil":
            self.advance()
            self.ceil(depth)
        elif kind == "name":
            self.advance()
            self.code.append(token)
        elif kind == "sign" and token == "-":
            self.advance()
            self.code.append(0)
            self.atom(depth + 1)
            self.code.append(("-",))
        elif kind == "sign" and token == "(":
            self.advance()
            self.sum(depth + 1)
            self.expect(")")
        else:
            self.fail("expected a number, a symbol or '('")

    def ceil(self, depth: int) -> None:
        """Parse the arguments of `ceil`."""
        self.expect("(")
        self.sum(depth + 1)
        self.expect(",")
        if self.kind != "number" or int(self.token) == 0:
            self.fail("ceil needs a positive integer")
        divisor = int(self.token)
        self.advance()
        self.expect(")")
        self.code.append(("ceil", divisor))
