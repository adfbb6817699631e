"""What an operator gave: the command line, then a file in YAML, then defaults, and which it was; it starts nothing."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.flags import NOT_IN_FILE, serve_parser

if TYPE_CHECKING:
    from llmc_runtime.server.command import Options

_MOST = 1 << 20  # bytes of a file
_LONGEST_PAUSE = 300.0  # seconds between two tries to start the engine again
_ENGINE = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "enable_prefix_caching",
    "scheduling_policy", "seed", "threads", "prepare", "canary", "target", "dtype", "generation_config",
    "override_generation_config",
)  # fmt: skip


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
    parser = serve_parser(prog)
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "version")}
    words = [_spelled(word) for word in argv]
    _check_known(parser, words)
    args = parser.parse_args(words, argparse.Namespace(**dict.fromkeys(actions)))
    sources = dict.fromkeys(actions, "default")
    for name, action in actions.items():
        if getattr(args, name) is not None:
            sources[name] = "flag"
        else:
            setattr(args, name, action.default)
    if args.config is not None:
        for name, value in _of_file(args.config, parser, args):
            if sources[name] == "default":
                setattr(args, name, value)
                sources[name] = str(args.config)
    if args.model is None:
        parser.error("the model is missing: llmc-serve MODEL, or model: MODEL in the file of --config")
    kept = {name: source for name, source in sources.items() if name not in NOT_IN_FILE}
    return Given(args, kept)


def options_of(
    args: argparse.Namespace, environment: Mapping[str, str], template: str | None, notes: Sequence[str] = ()
) -> Options:
    """What the server is started with; keys are read here. LlmcError E647 to E649, E668."""
    from llmc_runtime.cache import default_root
    from llmc_runtime.server.command import Options, read_keys
    from llmc_runtime.server.listen import Tls

    tls = None
    if args.ssl_certfile is not None:
        files = args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs
        tls = Tls(*files, args.ssl_cert_reqs, args.ssl_ciphers, args.enable_ssl_refresh)
    elif args.ssl_keyfile or args.ssl_ca_certs or args.ssl_cert_reqs or args.ssl_ciphers or args.enable_ssl_refresh:
        cause = "--ssl-... or --enable-ssl-refresh without --ssl-certfile"
        raise LlmcError("E649", f"{cause}: nothing would be encrypted", "name the certificate's file")
    keys = read_keys(args.api_key_file, args.api_key_env, environment)
    admin_keys = read_keys(args.admin_key_file, args.admin_key_env, environment)
    if set(keys) & set(admin_keys):
        remedy = "make another one for /admin: openssl rand -hex 24"
        raise LlmcError("E647", "a key is given as an API key and as an admin key", remedy)
    engine = {name: getattr(args, name) for name in _ENGINE} | {"cache_dir": args.cache or default_root(environment)}
    engine["max_restart_delay"] = _LONGEST_PAUSE if args.on_engine_failure == "retry" else None
    return Options(
        model=args.model, host=args.host, port=args.port, uds=args.uds, names=args.served_model_name, tls=tls,
        keys=keys, key_scope=args.api_key_scope, hosts=args.allowed_hosts,
        max_queued_requests=args.max_num_queued_reqs, max_queued_tokens=args.max_num_queued_tokens,
        max_per_key=args.max_num_reqs_per_key, max_queue_wait=_limit("--max-queue-wait", args.max_queue_wait),
        request_timeout=_limit("--request-timeout", args.request_timeout), max_connections=args.max_connections,
        metrics_alias=args.metrics_alias, max_body=args.max_body_bytes, max_answer=args.max_answer_bytes,
        root_path=args.root_path,
        shutdown_timeout=args.shutdown_timeout, keep_alive=args.timeout_keep_alive, log_level=args.log_level,
        chat_template=template,
        tool_call_parser=args.tool_call_parser, reasoning_parser=args.reasoning_parser,
        admin_keys=admin_keys, log_format=args.log_format, access_log=not args.disable_access_log,
        log_requests=args.enable_log_requests,
        engine=engine, notes=notes,
    )  # fmt: skip


def _limit(name: str, seconds: float) -> float | None:
    """Seconds, or none for 0. LlmcError E668 for what is no time."""
    if not 0 <= seconds <= 1e6:
        raise LlmcError("E668", f"{name} {seconds} is no time", "seconds, up to 1000000, or 0 for no limit")
    return seconds or None


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _spelled(word: str) -> str:
    """Flags may have underscores."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _check_known(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    known = parser._option_string_actions
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known:
            shown = [
                flag for flag, action in known.items() if flag.startswith("--") and action.help != argparse.SUPPRESS
            ]
            parser.error(f"there is no option {name}{_nearest(name, shown)}")


def _nearest(name: str, known: Sequence[str]) -> str:
    if name == "--model":
        return "; the model is named without a flag: llmc-serve MODEL"
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else "; --help lists all"


def _of_file(path: Path, parser: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """(name, value) of each key. Flags that mean nothing here go to `args.elsewhere`."""
    flags = parser._option_string_actions
    by_key = {flag[2:]: action for flag, action in flags.items() if flag.startswith("--") and not _denies(flag, action)}
    by_key = {key: action for key, action in by_key.items() if action.dest not in NOT_IN_FILE - {"elsewhere"}}
    by_key["model"] = next(action for action in parser._actions if action.dest == "model")
    for key, value in _load(path).items():
        key = str(key)
        name = key.replace("_", "-")
        action = by_key.get(name)
        if action is None:
            shown = [k for k, a in by_key.items() if a.help != argparse.SUPPRESS]
            raise _wrong(path, f"there is no option {key[:60]!r}{_nearest(name, shown)}")
        if action.dest == "elsewhere":
            if value is not False:
                args.elsewhere = [*args.elsewhere, (f"--{name}", [] if value is True else _texts(path, key, value))]
            continue
        yield action.dest, _value(path, key, action, value)


def _denies(flag: str, action: argparse.Action) -> bool:
    return isinstance(action, argparse.BooleanOptionalAction) and flag.startswith("--no-")


def _value(path: Path, key: str, action: argparse.Action, value: Any) -> Any:
    """The value as the flag would give it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise _wrong(path, f"{key} has to be true or false")
        return value
    if isinstance(value, dict) and action.metavar == "JSON":
        value = json.dumps(value)
    many = isinstance(action.default, list)
    if isinstance(value, list) and not many:
        raise _wrong(path, f"{key} has one value, not a list")
    found = [_converted(path, key, action, text) for text in _texts(path, key, value)]
    return found if many else found[0]


def _texts(path: Path, key: str, value: Any) -> list[str]:
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in found):
        raise _wrong(path, f"{key} has to be a text or a number")
    return [str(one) for one in found]


def _converted(path: Path, key: str, action: argparse.Action, text: str) -> Any:
    convert: Any = action.type or str
    try:
        value = convert(text)
    except (ValueError, TypeError, argparse.ArgumentTypeError) as e:
        raise _wrong(path, f"{key}: {e}") from None
    if action.choices is not None and value not in action.choices:
        raise _wrong(path, f"{key} is one of {', '.join(map(str, action.choices))}, not {text:.60}")
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
