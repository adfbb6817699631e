"""What an operator gave: the command line, then a file in YAML, then defaults, and which it was; it starts nothing."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc_runtime.compile_cache import default_root
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.option_type import Option, of_command
from llmc_runtime.option_type import options_of as declared
from llmc_runtime.server.flags import serve_options, serve_parser
from llmc_runtime.server.http.listen import Tls
from llmc_runtime.server.ignored_flags import PASSED_OVER, REFUSED
from llmc_runtime.server.server_options import Options

_MOST = 1 << 20  # bytes of a file
_SHORTEST_KEY = 8
_LONGEST_PAUSE = 300.0  # seconds between two tries to start the engine again


@dataclass(frozen=True)
class Given:
    """Every option by its name, and by the same name "flag", the file's path, or "default"."""

    args: argparse.Namespace
    sources: Mapping[str, str]

    def describe(self, as_json: bool) -> str:
        """The options, one a line: YAML that --config takes, or JSON. What was not set anywhere is a comment."""
        rows = {name.replace("_", "-"): (_plain(getattr(self.args, name)), self.sources[name]) for name in self.sources}
        if as_json:
            return json.dumps({name: {"value": value, "source": source} for name, (value, source) in rows.items()})
        lines = []
        for name, (value, source) in rows.items():
            text = f"{name}: {json.dumps(value)}" if value is not None else f"# {name}:"
            lines.append(f"{text:<40}  # {source}")
        return "\n".join(lines)


def read(argv: Sequence[str], prog: str = "llmc-serve") -> Given:
    """The options of a command line and of the file that it names. Wrong usage ends the program with code 2.

    LlmcError E648 where the file cannot be used, E665 where it needs a package.
    """
    parser, known = serve_parser(prog), serve_options()
    words = [_spelled(word) for word in argv]
    _check_known(parser, known, words)
    unset = {"model": None, **{name: one.unset for name, one in known.items()}, "elsewhere": []}
    args = parser.parse_args(words, argparse.Namespace(**dict.fromkeys(unset)))
    sources = dict.fromkeys(unset, "default")
    for name, default in unset.items():
        if getattr(args, name) is not None:
            sources[name] = "flag"
        else:
            setattr(args, name, default)
    if args.config is not None:
        for name, value in _of_file(args.config, known, args):
            if sources[name] == "default":
                setattr(args, name, value)
                sources[name] = str(args.config)
    if args.model is None:
        parser.error("the model is missing: llmc-serve MODEL, or model: MODEL in the file of --config")
    kept = {name: source for name, source in sources.items() if name in _in_file(known) or name == "model"}
    return Given(args, kept)


def options_of(
    args: argparse.Namespace, environment: Mapping[str, str], template: str | None, notes: Sequence[str] = ()
) -> Options:
    """How the model is served; keys are read here. LlmcError E647 to E649, E668."""
    tls = Tls(**_values(Tls, args))
    if tls.certfile is None and tls != Tls():
        cause = "--ssl-... or --enable-ssl-refresh without --ssl-certfile"
        raise LlmcError("E649", f"{cause}: nothing would be encrypted", "name the certificate's file")
    keys = read_keys(args.api_key_file, args.api_key_env, environment)
    admin_keys = read_keys(args.admin_key_file, args.admin_key_env, environment)
    if set(keys) & set(admin_keys):
        remedy = "make another one for /admin: openssl rand -hex 24"
        raise LlmcError("E647", "a key is given as an API key and as an admin key", remedy)
    engine = _values(EngineOptions, args)
    engine["cache_dir"] = args.cache or default_root(environment)
    engine["max_restart_delay"] = _LONGEST_PAUSE if args.on_engine_failure == "retry" else None
    more: dict[str, Any] = {"keys": keys, "admin_keys": admin_keys, "tls": None if tls == Tls() else tls}
    values = _values(Options, args) | {"chat_template": template}
    return Options(args.model, **values, **more, engine=engine, notes=notes)


def _values(owner: type, args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of a dataclass of options by the flags that were parsed."""
    found = {}
    for one in of_command(declared(owner).values(), "serve"):
        value = one.value(args)
        found[one.name] = one.check(one.spellings[0], value) if one.check is not None else value
    return found


def _in_file(known: Mapping[str, Option]) -> dict[str, Option]:
    return {name: one for name, one in known.items() if one.file}


def read_keys(files: Sequence[Path], variables: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """API keys: one a line of each file, blank lines and those that begin with # left out, and, comma-separated, of
    each named variable. LlmcError E647 where there are none, or one is too short to be a secret."""
    keys: list[str] = []
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as e:
            raise LlmcError("E647", f"{path} cannot be read: {e}", "name a text file with one key a line") from e
        keys += _checked([line.strip() for line in lines if not line.lstrip().startswith("#")], str(path))
    for name in variables:
        keys += _checked([key.strip() for key in environment.get(name, "").split(",")], f"${name}")
    return keys


def _checked(keys: list[str], where: str) -> list[str]:
    found = [key for key in keys if key]
    if not found:
        raise LlmcError("E647", f"{where} holds no API key", "put keys there, one a line, or leave the option out")
    if min(map(len, found)) < _SHORTEST_KEY or not all(key.isascii() and key.isprintable() for key in found):
        cause = f"{where} holds a key shorter than {_SHORTEST_KEY} characters, or of other characters than ASCII's"
        raise LlmcError("E647", cause, "make keys with: openssl rand -hex 24")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _spelled(word: str) -> str:
    """Flags may have underscores."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _check_known(parser: argparse.ArgumentParser, known: Mapping[str, Option], words: Sequence[str]) -> None:
    shown = [flag for one in known.values() for flag in (*one.spellings, *one.negations)]
    shown += ["--help", "--version"]
    others = {flag for row in (*PASSED_OVER, *REFUSED) for flag in row.flags}
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0]
        if name.startswith("--") and name not in shown and name not in others:
            parser.error(f"there is no option {name}{_nearest(name, shown)}")


def _nearest(name: str, known: Sequence[str]) -> str:
    if name == "--model":
        return "; the model is named without a flag: llmc-serve MODEL"
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else "; --help lists all"


def _of_file(path: Path, known: Mapping[str, Option], args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """(name, value) of each key. Flags that mean nothing here go to `args.elsewhere`."""
    by_key = {flag.removeprefix("--"): one for one in _in_file(known).values() for flag in one.spellings}
    others = {flag[2:] for row in (*PASSED_OVER, *REFUSED) for flag in row.flags if flag.startswith("--")}
    for key, value in _load(path).items():
        key = str(key)
        name = key.replace("_", "-")
        if name == "model":
            yield name, _one_text(path, key, value)
        elif name in by_key:
            yield by_key[name].dest, _value(path, key, by_key[name], value)
        elif name in others:
            if value is not False:
                args.elsewhere = [*args.elsewhere, (f"--{name}", [] if value is True else _texts(path, key, value))]
        else:
            raise _wrong(path, f"there is no option {key[:60]!r}{_nearest(name, ['model', *by_key])}")


def _value(path: Path, key: str, one: Option, value: Any) -> Any:
    """The value as the flag would give it."""
    if one.read is None:
        if not isinstance(value, bool):
            raise _wrong(path, f"{key} has to be true or false")
        return value
    if isinstance(value, dict) and one.metavar == "JSON":
        value = json.dumps(value)
    if one.many:
        return [_converted(path, key, one, text) for text in _texts(path, key, value)]
    return _converted(path, key, one, _one_text(path, key, value))


def _one_text(path: Path, key: str, value: Any) -> str:
    if isinstance(value, list):
        raise _wrong(path, f"{key} has one value, not a list")
    return _texts(path, key, value)[0]


def _texts(path: Path, key: str, value: Any) -> list[str]:
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in found):
        raise _wrong(path, f"{key} has to be a text or a number")
    return [str(one) for one in found]


def _converted(path: Path, key: str, one: Option, text: str) -> Any:
    convert: Any = one.read
    try:
        value = convert(text)
    except (ValueError, TypeError, argparse.ArgumentTypeError) as e:
        raise _wrong(path, f"{key}: {e}") from None
    if one.choices is not None and value not in one.choices:
        raise _wrong(path, f"{key} is one of {', '.join(map(str, one.choices))}, not {text:.60}")
    return value


def _load(path: Path) -> dict[Any, Any]:
    """A YAML mapping, read without making objects of anything."""
    try:
        import yaml
    except ImportError as e:
        raise LlmcError("E665", f"--config needs a package: {e}", "pip install 'llmc-aot[serve]'") from None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise _wrong(path, f"it cannot be read: {e}") from None
    if len(text) > _MOST:
        raise _wrong(path, f"it has more than {_MOST} characters")
    try:
        found, document = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as e:
        raise _wrong(path, f"it is no YAML: {e}") from None
    if not isinstance(found, dict):
        raise _wrong(path, "it is no mapping of options to values")
    keys = [str(key.value) for key, _ in document.value]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise _wrong(path, f"{twice[:60]!r} is there twice")
    return found


def _wrong(path: Path, words: str) -> LlmcError:
    return LlmcError("E648", f"{path}: {words}", "lines such as `port: 8000`; docs/serving.md has an example")
