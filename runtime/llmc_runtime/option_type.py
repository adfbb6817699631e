"""Options, each declared once as a field of a dataclass: the Python keyword, the flag and the key in a YAML file.

`option` makes such a field. Commands, the file of llmc-serve --config, shell completion and the tables in docs/ are
derived from the declarations. The functions at the end read values of flags; what only they need is imported by them,
because LLM imports this module, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmc_runtime.format.errors import LlmcError

if TYPE_CHECKING:
    import argparse

_DECIMAL = MappingProxyType({"k": 10**3, "m": 10**6, "g": 10**9})
_BINARY = MappingProxyType({"K": 1 << 10, "M": 1 << 20, "G": 1 << 30})
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}.items()


@dataclass(frozen=True)
class Option:
    """A declared option.

    text:     the description, for help texts and docs
    commands: those that have a flag for it: "serve" (llmc-serve), "run" (llmc-run), "compile" (llmc run)
    flags:    spellings of the flag; empty: the name
    read:     parses the flag's text; None: a switch, whose flag sets the opposite of the default
    negated:  a switch has a second flag, --no-...
    many:     "+": the flag takes several values; "append": it may be repeated
    group:    heading in the help of llmc-serve
    file:     whether the file of --config may have it
    check:    returns the keyword's value in its normal form, or raises LlmcError
    engine:   whether the engine process needs it
    """

    name: str
    default: Any
    text: str
    commands: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = str
    metavar: str | None = None
    choices: Sequence[Any] | None = None
    negated: bool = False
    many: str = ""
    group: str = "engine"
    file: bool = True
    check: Callable[[str, Any], Any] | None = None
    engine: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        """The flags, without the negated ones."""
        return self.flags or ("--" + self.name.replace("_", "-"),)

    @property
    def negations(self) -> tuple[str, ...]:
        """The flags that make a switch false."""
        return tuple(flag.replace("--", "--no-", 1) for flag in self.spellings) if self.negated else ()

    @property
    def dest(self) -> str:
        """The name in argparse's namespace: that of the flag, which is also the key in a file."""
        return self.spellings[0].removeprefix("--").replace("-", "_")

    @property
    def inverted(self) -> bool:
        """Whether the flag is a switch that makes the keyword false."""
        return self.read is None and self.default is True and not self.negated

    @property
    def takes_json(self) -> bool:
        """Whether the flag's value can be a JSON object."""
        return (self.metavar or "").endswith("JSON")

    @property
    def unset(self) -> Any:
        """The value in argparse's namespace if the flag is absent."""
        if self.inverted:
            return False
        return list(self.default) if self.many else self.default

    def value(self, args: argparse.Namespace) -> Any:
        """Return the keyword's value from the parsed flags."""
        value = getattr(args, self.dest)
        return not value if self.inverted else value

    def checked(self, value: Any) -> Any:
        """Return the value as it is stored. Raises LlmcError: that of `check`, or E201 if it is none of `choices`."""
        if self.check is not None:
            return self.check(self.name, value)
        if self.choices is not None and value not in self.choices:
            raise not_allowed(self.name, value, f"set {self.name} to {' or '.join(map(str, self.choices))}")
        return value

    def add_to(self, group: Any) -> None:
        """Add the flag to a parser or an argument group."""
        more: dict[str, Any] = {"default": self.unset, "help": self.text}
        if self.read is None:
            from argparse import BooleanOptionalAction

            more["action"] = BooleanOptionalAction if self.negated else "store_true"
        else:
            more |= {"type": self.read, "metavar": self.metavar, "choices": self.choices}
            if self.many:
                more |= {"nargs": "+"} if self.many == "+" else {"action": "append"}
        group.add_argument(*self.spellings, dest=self.dest, **more)


def not_allowed(name: str, value: Any, remedy: str, code: str = "E201") -> LlmcError:
    """Return the error for an option with a value that is not allowed."""
    return LlmcError(code, f"{name} = {value!r:.60} is not allowed", remedy)


def option(default: Any, text: str, **more: Any) -> Any:
    """Return a dataclass field that declares an option; `more` are fields of Option."""
    return field(default=default, metadata={"option": (text, more)})


def serve_option(group: str, default: Any, text: str, **more: Any) -> Any:
    """Return a dataclass field that declares an option of llmc-serve."""
    return option(default, text, commands=("serve",), group=group, **more)


@cache
def options_of(owner: type) -> Mapping[str, Option]:
    """Return the options that a dataclass declares, by name."""
    options = {}
    for declared in fields(owner):
        if "option" in declared.metadata:
            text, more = declared.metadata["option"]
            options[declared.name] = Option(declared.name, declared.default, text, **more)
    return MappingProxyType(options)


def of_command(declared: Iterable[Option], command: str) -> list[Option]:
    """Return the options that are flags of a command."""
    return [option for option in declared if command in option.commands]


def malformed(message: str) -> argparse.ArgumentTypeError:
    """Return the error for the text of a flag, whose message argparse prints."""
    from argparse import ArgumentTypeError

    return ArgumentTypeError(message)


def parse_bytes(text: str) -> int:
    """Parse a number of bytes with an optional unit: 1048576, 512M, 1.5GiB. Units are powers of 1024."""
    lowered = text.strip().lower().removesuffix("ib").removesuffix("b")
    for unit, size in reversed(_UNITS):
        if (unit and lowered.endswith(unit)) or not unit:
            try:
                value = float(lowered.removesuffix(unit)) * size
            except ValueError:
                break
            if 0 < value < 1 << 60:
                return int(value)
            break
    raise malformed(f"{text!r} is not a number of bytes, such as 1048576, 512M or 2GiB")


def count(text: str) -> int:
    """Parse a whole number of at least 1. As in vLLM, 32k is 32000 and 32K is 32768."""
    head, last = text.strip()[:-1], text.strip()[-1:]
    scale = _DECIMAL.get(last) or _BINARY.get(last)
    if scale is None:
        return positive(text)
    from decimal import Decimal

    try:
        value = Decimal(head) * scale
    except ArithmeticError:
        return positive(text)
    return positive(str(int(value)) if value.is_finite() and value == int(value) else text)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise malformed(f"{text!r} is not a whole number of at least 1")
    return value


def positive_number(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise malformed(f"{text[:40]!r} is not a number above 0")
    return value


def switch(name: str, value: Any) -> bool:
    """Return the value of a switch; raises LlmcError E201 for anything but True and False, or 1 and 0."""
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise not_allowed(name, value, f"set {name} to True or False")


def optional_switch(name: str, value: Any) -> bool | None:
    """Return the value of a switch, or None for its default; raises LlmcError E201 like `switch`."""
    return None if value is None else switch(name, value)


def in_range(minimum: float, maximum: float = 1_000_000, optional: bool = False) -> Callable[[str, Any], Any]:
    """Return a check for a number in this range; `optional`: or None. It raises LlmcError E201."""

    def check(name: str, value: Any) -> Any:
        if value is None and optional:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise not_allowed(name, value, f"set {name} to a number from {minimum} to {maximum}")
        return value

    return check
