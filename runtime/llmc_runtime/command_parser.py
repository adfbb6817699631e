"""The argument parser of all commands: flags are written in full, and misspelt ones are answered with the nearest."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from llmc_runtime.format.nearest import nearest

_FLAG = re.compile(r"(?<![\w-])--?[A-Za-z](?:[\w-]*\w)?(?![\w-])")
_CHOICES = re.compile(r"invalid choice: '(?P<name>.*?)' \(choose from (?P<known>.*)\)$", re.S)
_UNKNOWN = re.compile(r"unrecognized arguments: (?P<name>-[^\s=]*)")


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, whose messages suggest flags, choices and commands."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **more})
        self.commands: Any = None  # the result of add_subparsers
        self.late = ""  # the last positional argument, if it is optional and may follow flags

    def add_subparsers(self, **more: Any) -> Any:
        """Add subparsers, which are CommandParsers."""
        self.commands = super().add_subparsers(**more)
        return self.commands

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; `late` may follow flags, where argparse before Python 3.12.7 does not look for it."""
        parsed, rest = super().parse_known_args(args, namespace)
        if self.late and rest and not rest[0].startswith("-") and getattr(parsed, self.late) is None:
            setattr(parsed, self.late, rest.pop(0))
        return parsed, rest

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and end the process with status 2 and a message if an argument is not known."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            self._of_command(sys.argv[1:] if args is None else args).error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed

    def _of_command(self, args: Any) -> CommandParser:
        """Return the parser of the command in `args`: this one if they name none."""
        commands = self.commands.choices if self.commands else {}
        for i, word in enumerate(args):
            if isinstance(commands.get(word), CommandParser):
                return commands[word]._of_command(args[i + 1 :])
        return self

    def error(self, message: str) -> NoReturn:
        """Print the message, with a suggestion if a flag or a choice is misspelt, and exit with status 2."""
        known: list[str] = []
        if match := _CHOICES.search(message):
            known = re.findall(r"[^\s',()]+", match["known"])
        elif match := _UNKNOWN.search(message):
            known = self.flags()
        if match and match["name"] in known:
            message = f"{message}: options of a command follow it, as in {self.prog} ... {match['name']}"
        elif match and (close := nearest(match["name"], known)):
            message = f"{message}; did you mean {' or '.join(close)}?"
        self.exit(2, f"{self.prog}: error: {message}\n  Try: {self.prog} --help\n")

    def flags(self) -> list[str]:
        """Return the flags in the help, and those of subcommands."""
        parsers = self.commands.choices.values() if self.commands else ()
        inner = [flag for parser in parsers if isinstance(parser, CommandParser) for flag in parser.flags()]
        return sorted({*_FLAG.findall(self.format_help()), *inner})
