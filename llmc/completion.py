"""Generate completion scripts for bash, zsh and fish from the argparse parsers."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

_FILES, _FOLDERS = "files", "folders"


@dataclass(frozen=True)
class Option:
    """An option of a command.

    `value` is the kind of its value: None (it takes no value), a tuple of choices, "files", "folders", or "" (any
    text).
    """

    flags: tuple[str, ...]
    help: str
    value: tuple[str, ...] | str | None


@dataclass(frozen=True)
class Node:
    """A command with its options, its subcommands (`subcommands`) and the kind of its positional arguments."""

    name: str
    help: str = ""
    options: tuple[Option, ...] = ()
    subcommands: tuple[Node, ...] = ()
    arguments: tuple[str, ...] | str = ""
    path: tuple[str, ...] = ()


def script(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the completion script for a shell: bash, zsh or fish.

    `parsers` maps each command to its parser; "command subcommand" keys override the parser of a subcommand.
    """
    roots = [_node(name, parser, parsers, (name,)) for name, parser in parsers.items() if " " not in name]
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](roots)


def _node(
    name: str, parser: argparse.ArgumentParser, others: Mapping[str, argparse.ArgumentParser], path: tuple[str, ...]
) -> Node:
    """Convert a parser and its subparsers to a Node."""
    options: dict[str, Option] = {}
    subcommands: list[Node] = []
    arguments: tuple[str, ...] | str = ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subcommands += _subcommands(action, others, path)
        elif action.option_strings and action.help != argparse.SUPPRESS:
            option = Option(tuple(action.option_strings), _summary(action.help or ""), _value_kind(action))
            options[option.flags[0]] = option
        elif not action.option_strings:
            arguments = arguments or _value_kind(action) or _FILES
    return Node(name, _summary(parser.description or ""), tuple(options.values()), tuple(subcommands), arguments, path)


def _subcommands(
    action: argparse._SubParsersAction, others: Mapping[str, argparse.ArgumentParser], path: tuple[str, ...]
) -> Iterator[Node]:
    """Convert the subparsers of a command, with the help that `action` declares for each."""
    helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
    for name, parser in action.choices.items():
        inner_path = (*path, name)
        node = _node(name, others.get(" ".join(inner_path), parser), others, inner_path)
        yield replace(node, help=_summary(helps.get(name, "")))


def _value_kind(action: argparse.Action) -> tuple[str, ...] | str | None:
    """Return the kind of value that follows an option, in the form of `Option.value`."""
    metavar = str(action.metavar or "")
    if action.choices is not None:
        return tuple(map(str, action.choices))
    if action.nargs == 0:
        return None
    if metavar == "DIR":
        return _FOLDERS
    if action.type is Path or re.search("FILE|PATH", metavar) or not action.option_strings:
        return _FILES
    return ""


def _summary(text: str) -> str:
    """Return the first 70 characters of a help text, without characters that would need quoting in a script."""
    return re.sub(r"[^\w ./,<>+-]", "", text.replace("%%", "%").replace(": ", ", "))[:70].strip()


def _all(nodes: list[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _all(list(node.subcommands))


def _bash(roots: list[Node]) -> str:
    """Return two case statements, candidates by command and values by option, and one function that reads them."""
    words = [_bash_words(node) for node in _all(roots)]
    values = [case for node in _all(roots) for case in _bash_values(node)]
    names = " ".join(node.name for node in roots)
    nested = " | ".join(shlex.quote(" ".join(node.path)) for node in _all(roots) if len(node.path) > 1)
    return f"""# bash completion of {names}
_llmc_complete() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev= words= kind= path=${{COMP_WORDS[0]##*/}} i
    [[ $COMP_CWORD -gt 1 ]] && prev=${{COMP_WORDS[COMP_CWORD-1]}}
    if [[ $cur == = ]]; then cur=
    elif [[ $prev == = ]]; then prev=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$path ${{COMP_WORDS[i]}}" in
        {nested or "''"}) path="$path ${{COMP_WORDS[i]}}" ;;
        esac
    done
    case $path in
{chr(10).join(words)}
    esac
    case "$path $prev" in
{chr(10).join(values)}
    esac
    COMPREPLY=()
    case $kind in
        folders) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -d -- "$cur") ;;
        files)
            if [[ $cur != -* ]]; then
                compopt -o filenames 2>/dev/null
                mapfile -t COMPREPLY < <(compgen -f -- "$cur")
            fi ;;
    esac
    [[ $kind == nothing ]] || mapfile -t -O ${{#COMPREPLY[@]}} COMPREPLY < <(compgen -W "$words" -- "$cur")
}}
complete -F _llmc_complete {names}
"""


def _bash_words(node: Node) -> str:
    """Return the case of a command: its subcommands or arguments, then its options."""
    flags = [flag for option in node.options for flag in option.flags]
    takes_files = node.arguments == _FILES
    first = [n.name for n in node.subcommands] or ([] if takes_files else list(node.arguments))
    kind = _FILES if takes_files and not node.subcommands else ""
    return f"        {shlex.quote(' '.join(node.path))}) words={shlex.quote(' '.join([*first, *flags]))} kind={kind} ;;"


def _bash_values(node: Node) -> Iterator[str]:
    """Yield a case for each option that takes a value: the values, or the kind of path."""
    path = " ".join(node.path)
    for option in node.options:
        if option.value is None:
            continue
        keys = " | ".join(shlex.quote(f"{path} {flag}") for flag in option.flags)
        value = f"kind= words={shlex.quote(' '.join(option.value))}"
        if isinstance(option.value, str):
            value = f"kind={option.value or 'nothing'} words="
        yield f"        {keys}) {value} ;;"


def _zsh(roots: list[Node]) -> str:
    """Return one function per command, built on zsh's `_arguments`."""
    parts = [f"#compdef {' '.join(node.name for node in roots)}"]
    for node in _all(roots):
        specs = [_zsh_option(option) for option in node.options]
        if node.subcommands:
            names = " ".join(shlex.quote(f"{n.name}:{n.help}") for n in node.subcommands)
            cases = "\n".join(f"            {n.name}) {_zsh_name(n)} ;;" for n in node.subcommands)
            body = f"""    local state line
    _arguments -C {" ".join([*specs, "'1:command:->command'", "'*::argument:->rest'"])}
    case $state in
        command) local -a commands=({names}); _describe command commands ;;
        rest) case $line[1] in
{cases}
        esac ;;
    esac"""
        else:
            action = "_files" if node.arguments == _FILES else f"({' '.join(node.arguments)})"
            rest = [shlex.quote(f"*:argument:{action}")] if node.arguments else []
            body = f"    _arguments {' '.join([*specs, *rest])}"
        parts.append(f"{_zsh_name(node)}() {{\n{body}\n}}")
    parts.append("case $service in\n" + "\n".join(f'    {n.name}) {_zsh_name(n)} "$@" ;;' for n in roots) + "\nesac")
    return "\n".join(parts) + "\n"


def _zsh_name(node: Node) -> str:
    return "_llmc_complete_" + "__".join(node.path).replace("-", "_")


def _zsh_option(option: Option) -> str:
    """Return one `_arguments` spec per flag; the leading `*` allows a flag to be repeated."""
    after = ""
    if option.value is not None:
        actions = {_FILES: "_files", _FOLDERS: "_files -/", "": " "}
        after = ":value:" + (actions[option.value] if isinstance(option.value, str) else f"({' '.join(option.value)})")
    return " ".join(shlex.quote(f"*{flag}[{option.help}]{after}") for flag in option.flags)


def _fish(roots: list[Node]) -> str:
    """Return one `complete` line per option of each command."""
    lines = []
    for node in _all(roots):
        root, condition = node.path[0], ""
        if len(node.path) > 1:
            condition = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in node.path[1:])
        no_subcommand = (
            f"not __fish_seen_subcommand_from {' '.join(n.name for n in node.subcommands)}" if node.subcommands else ""
        )
        condition_text = "; and ".join(filter(None, (condition, no_subcommand)))
        head = f"complete -c {root}" + (f" -n {shlex.quote(condition_text)}" if condition_text else "")
        lines += [f"{head} -f -a {n.name} -d {shlex.quote(n.help)}" for n in node.subcommands]
        if not node.subcommands and isinstance(node.arguments, tuple) and node.arguments:
            lines.append(f"{head} -f -a {shlex.quote(' '.join(node.arguments))}")
        lines += [f"{head}{_fish_option(option)}" for option in node.options]
    return "\n".join(lines) + "\n"


def _fish_flag(flag: str) -> str:
    """Return the option of `complete` for a flag: -l for --long, -s for a single letter, -o for -long."""
    if flag.startswith("--"):
        return f" -l {flag[2:]}"
    return f" -s {flag[1:]}" if len(flag) == 2 else f" -o {flag[1:]}"


def _fish_option(option: Option) -> str:
    flags = "".join(map(_fish_flag, option.flags))
    after = ""
    if isinstance(option.value, tuple):
        after = f" -x -a {shlex.quote(' '.join(option.value))}"
    elif option.value is not None:
        after = {_FILES: " -r -F", _FOLDERS: " -x -a '(__fish_complete_directories)'", "": " -x"}[option.value]
    return f"{flags}{after} -d {shlex.quote(option.help)}"
