"""Reads the options of llmc-serve: the command line, then a YAML file, then the defaults."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc_runtime.compile_cache import default_root
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.install_command import install_command
from llmc_runtime.format.nearest import nearest
from llmc_runtime.format.text_file import read_text
from llmc_runtime.ignored_options import by_flag
from llmc_runtime.option_type import Option, of_command
from llmc_runtime.option_type import options_of as declared
from llmc_runtime.server.http.tls import Tls
from llmc_runtime.server.server_options import Options, serve_options, serve_parser

_MAX_FILE = 1 << 20  # bytes
_MIN_KEY_CHARACTERS = 8
_NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]{1,64}):[ \t]+(.*)")
_MAX_RESTART_SECONDS = 300.0


@dataclass(frozen=True)
class Settings:
    """Every option by name, and the source of its value: "flag", the file's path, or "default"."""

    args: argparse.Namespace
    sources: Mapping[str, str]

    def describe(self, as_json: bool) -> str:
        """Return the options as JSON, or one a line as YAML for --config, with unset ones as comments."""
        rows = {name.replace("_", "-"): (getattr(self.args, name), self.sources[name]) for name in self.sources}
        if as_json:
            document = {name: {"value": value, "source": source} for name, (value, source) in rows.items()}
            return json.dumps(document, default=str)
        lines = []
        for name, (value, source) in rows.items():
            text = f"{name}: {json.dumps(value, default=str)}" if value is not None else f"# {name}:"
            lines.append(f"{text:<40}  # {source}")
        return "\n".join(lines)


def read(argv: Sequence[str], prog: str = "llmc-serve") -> Settings:
    """Return the options of a command line and of the file that it names. Invalid arguments exit with code 2.

    Raises LlmcError E648 if the file cannot be used, and E665 if it needs a package.
    """
    parser, known = serve_parser(prog), serve_options()
    arguments = _joined(parser, known, [_with_dashes(argument) for argument in argv])
    _check_known(parser, known, arguments)
    defaults = {"model": None, **{name: option.unset for name, option in known.items()}, "ignored_flags": []}
    args = parser.parse_args(arguments, argparse.Namespace(**dict.fromkeys(defaults)))
    sources = {name: "default" if getattr(args, name) is None else "flag" for name in defaults}
    if args.config is not None:
        of_file = _of_file(args.config, known)
        args.ignored_flags = [*(args.ignored_flags or []), *of_file.pop("ignored_flags")]
        for name, value in of_file.items():
            if sources[name] == "default":
                setattr(args, name, value)
                sources[name] = str(args.config)
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.model is None:
        parser.error("the model is missing: llmc-serve MODEL, or model: MODEL in the file of --config")
    in_file = {"model", *(name for name, option in known.items() if option.file)}
    return Settings(args, {name: source for name, source in sources.items() if name in in_file})


def options_of(
    args: argparse.Namespace, environment: Mapping[str, str], template: str | None, notes: Sequence[str] = ()
) -> Options:
    """Return how the model is served; API keys are read here. Raises LlmcError E647 to E649 and E668."""
    tls = Tls(**_values(Tls, args))
    if tls.certfile is None and tls != Tls():
        cause = "--ssl-... or --enable-ssl-refresh without --ssl-certfile: nothing would be encrypted"
        raise LlmcError("E649", cause, "add --ssl-certfile FILE")
    keys = read_keys(args.api_key_file, args.api_key_env, environment)
    admin_keys = read_keys(args.admin_key_file, args.admin_key_env, environment)
    if set(keys) & set(admin_keys):
        remedy = "create another key for /admin: openssl rand -hex 24"
        raise LlmcError("E647", "the same key is an API key and an admin key", remedy)
    engine = _values(EngineOptions, args)
    engine["cache_dir"] = args.cache or default_root(environment)
    engine["max_restart_delay"] = _MAX_RESTART_SECONDS if args.on_engine_failure == "retry" else None
    more: dict[str, Any] = {"keys": list(keys), "admin_keys": list(admin_keys), "key_names": list(keys.values())}
    more["tls"] = None if tls == Tls() else tls
    more["notify_socket"] = environment.get("NOTIFY_SOCKET", "")
    values = _values(Options, args) | {"chat_template": template}
    return Options(args.model, **values, **more, engine=engine, notes=notes)


def _values(owner: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return keyword arguments for a dataclass of options from the parsed flags."""
    values = {}
    for option in of_command(declared(owner).values(), "serve"):
        value = option.value(args)
        values[option.name] = option.check(option.spellings[0], value) if option.check is not None else value
    return values


def read_keys(files: Sequence[Path], variables: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return API keys, one per line of each file, and comma-separated in each variable, with their names.

    A key may follow its name: "NAME: KEY". Others are named by their numbers: key-1. Several may have one name. Blank
    lines and lines that start with # are skipped. Raises LlmcError E647 if a source has no keys, or one that is too
    short to be a secret.
    """
    named_keys: list[tuple[str, str]] = []
    for path in files:
        try:
            lines = read_text(path, _MAX_FILE).splitlines()
        except ValueError as e:
            raise LlmcError("E647", f"{path} cannot be read: {e}", "name a text file with one key per line") from e
        named_keys += _checked([line for line in lines if not line.lstrip().startswith("#")], str(path))
    for name in variables:
        named_keys += _checked(environment.get(name, "").split(","), f"${name}")
    keys: dict[str, str] = {}
    for key, name in named_keys:
        keys.setdefault(key, name or f"key-{len(keys) + 1}")
    return keys


def _checked(texts: list[str], source: str) -> list[tuple[str, str]]:
    """Return keys and their names, "" if they have none."""
    named = [_NAMED_KEY.fullmatch(text) or ("", "", text) for text in map(str.strip, texts) if text]
    keys = [(match[2], match[1] or "") for match in named]
    if not keys:
        raise LlmcError("E647", f"{source} contains no API key", "put keys there, or omit the option")
    if any(len(key) < _MIN_KEY_CHARACTERS or not (key.isascii() and key.isprintable()) for key, _ in keys):
        cause = (
            f"{source} contains a key of fewer than {_MIN_KEY_CHARACTERS} characters, or with characters outside ASCII"
        )
        raise LlmcError("E647", cause, "create keys with: openssl rand -hex 24")
    return keys


def _with_dashes(argument: str) -> str:
    """Return a flag with dashes for underscores; other words are unchanged."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if argument.startswith("--") else argument


def _joined(parser: argparse.ArgumentParser, known: Mapping[str, Option], arguments: Sequence[str]) -> list[str]:
    """Join flags such as --speculative-config.method; exits if they contradict each other."""
    objects = {flag for option in known.values() if option.takes_json for flag in option.spellings}
    objects |= {flag for flag, row in by_flag().items() if row.values == "1"}
    try:
        return join_dotted(arguments, objects.__contains__)
    except ValueError as e:
        parser.error(str(e))


def _check_known(parser: argparse.ArgumentParser, known: Mapping[str, Option], arguments: Sequence[str]) -> None:
    """Exit with a suggestion if a flag is unknown."""
    flags = [flag for option in known.values() for flag in (*option.spellings, *option.negations)]
    flags += ["--help", "--version"]
    ignored = by_flag()
    for argument in arguments:
        if argument == "--":
            return
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in flags and name not in ignored:
            parser.error(f"unknown option {name}{_suggestion(name, flags)}")


def _suggestion(name: str, known: Sequence[str]) -> str:
    if name == "--model":
        return "; pass the model without a flag: llmc-serve MODEL"
    close = nearest(name, known)
    return f"; did you mean {' or '.join(close)}?" if close else "; --help lists all"


def _of_file(path: Path, known: Mapping[str, Option]) -> dict[str, Any]:
    """Return the options of a file by name. Values are parsed as those of flags."""
    in_files = [option for option in known.values() if option.file]
    by_key = {flag.removeprefix("--"): option for option in in_files for flag in option.spellings}
    ignored = by_flag()
    parser = serve_parser(exit_on_error=False)
    values: dict[str, Any] = {"ignored_flags": []}
    for key, value in _load(path).items():
        name = str(key).replace("_", "-")
        option = by_key.get(name)
        if option is not None:
            values[option.dest] = _option_value(path, key, option, value, parser)
        elif name == "model":
            values[name] = _texts(path, name, value, many=False)[0]
        elif f"--{name}" not in ignored:
            raise _unusable(path, f"unknown option {str(key)[:60]!r}{_suggestion(name, ['model', *by_key])}")
        elif value is not False:
            values["ignored_flags"].append((f"--{name}", [] if value is True else _texts(path, name, value)))
    return values


def _option_value(path: Path, key: object, option: Option, value: Any, parser: argparse.ArgumentParser) -> Any:
    """Return the value of an option in a file as its flag would set it."""
    if option.read is None:
        if not isinstance(value, bool):
            raise _unusable(path, f"{key} has to be true or false")
        return value
    arguments = _as_flags(path, str(key).replace("_", "-"), option, value)
    try:
        return getattr(parser.parse_args(arguments), option.dest)
    except argparse.ArgumentError as e:
        raise _unusable(path, f"{key}: {e.message}") from None


def _as_flags(path: Path, key: str, option: Option, value: Any) -> list[str]:
    if isinstance(value, dict) and option.takes_json:
        value = json.dumps(value)
    flag, texts = option.spellings[0], _texts(path, key, value, many=bool(option.many))
    return [flag, *texts] if option.many == "+" and texts else [f"{flag}={text}" for text in texts]


def _texts(path: Path, key: str, value: Any, many: bool = True) -> list[str]:
    if isinstance(value, list) and not many:
        raise _unusable(path, f"{key} takes one value, not a list")
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in values):
        raise _unusable(path, f"{key} has to be a text or a number")
    return [str(item) for item in values]


def _load(path: Path) -> dict[Any, Any]:
    """Return a YAML mapping of plain values."""
    try:
        import yaml
    except ImportError as e:
        raise LlmcError("E665", f"--config needs a package: {e}", install_command("serve")) from None
    try:
        text = read_text(path, _MAX_FILE)
    except ValueError as e:
        raise LlmcError("E648", f"--config {path} cannot be read: {e}", "name a YAML file of options") from None
    try:
        mapping, document = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as e:
        raise _unusable(path, f"it is not valid YAML: {e}") from None
    if not isinstance(mapping, dict):
        raise _unusable(path, "it is not a mapping of options to values")
    keys = [str(key.value) for key, _ in document.value]
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated is not None:
        raise _unusable(path, f"{repeated[:60]!r} occurs twice")
    return mapping


def _unusable(path: Path, cause: str) -> LlmcError:
    return LlmcError("E648", f"{path}: {cause}", "write lines such as `port: 8000`; docs/serving.md has an example")


def join_dotted(arguments: Sequence[str], takes_object: Callable[[str], bool]) -> list[str]:
    """Return the arguments with the keys of each flag joined to one JSON object, at the place of its first key.

    A value is JSON if it can be parsed, else text. Dashes in keys are underscores. `takes_object` decides which flags
    take an object; others are unchanged. Raises ValueError if a value is missing, or if an object is given twice, in
    whole and by keys.
    """
    joined: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            joined += [argument, *rest]
            break
        name, equals, value = argument.partition("=")
        flag, dot, path = name.partition(".")
        if not (dot and path and takes_object(flag)):
            joined.append(argument)
            continue
        if not equals and (not rest or rest[0].startswith("--")):
            raise ValueError(f"{name} needs a value")
        if flag not in objects:
            objects[flag], places[flag] = {}, len(joined)
            joined.append(flag)
        _set(objects[flag], path.replace("-", "_").split("."), _parsed(value if equals else rest.pop(0)), name)
    whole = {argument.partition("=")[0] for i, argument in enumerate(joined) if i not in places.values()}
    if twice := next((flag for flag in objects if flag in whole), None):
        raise ValueError(f"{twice} is given as a whole and by its keys")
    for flag, place in places.items():
        joined[place] = f"{flag}={json.dumps(objects[flag])}"
    return joined


def _set(target: dict[str, Any], path: Sequence[str], value: Any, name: str) -> None:
    for key in path[:-1]:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{name} contradicts an earlier flag")
        target = inner
    if path[-1] in target:
        raise ValueError(f"{name} is given twice")
    target[path[-1]] = value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
