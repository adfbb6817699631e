"""The options of llmc-serve, each declared once; those of the engine are in llmc_runtime.engine_options.

Flags have vLLM's names if their meaning is the same. vLLM's flags that have no meaning here are accepted, too (see
`llmc_runtime.ignored_options`).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmc_runtime import __version__
from llmc_runtime.command_parser import CommandParser
from llmc_runtime.defaults import parse_override
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.ignored_options import by_flag
from llmc_runtime.option_type import Option, of_command, options_of, parse_bytes, positive, serve_option
from llmc_runtime.server.http.tls import Tls
from llmc_runtime.server.requests.request_fields import MAX_NAME
from llmc_runtime.server.tool_calls import registry
from llmc_runtime.server.tool_calls.reasoning import FORMATS as REASONING_FORMATS
from llmc_runtime.text.chat_template import wrong_variable

_GROUPS = ("configuration", "server", "keys and TLS", "load", "logs", "chats and sampling", "engine")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
LOG_LEVELS = ("debug", "info", "warning", "error")


class FormatNames(tuple[str, ...]):
    """The values of `--tool-call-parser`, ours. `in` also finds the names of installed packages."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and registry.is_offered(name))


CALL_FORMATS = FormatNames(("auto", *registry.names(), "none"))


class _Collect(argparse.Action):
    """Appends (flag, values) to `ignored_flags`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        texts = [values] if isinstance(values, str) else list(values or [])
        flag = option or self.option_strings[0]
        namespace.ignored_flags = [*(namespace.ignored_flags or []), (flag, texts)]


def add_ignored(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags that have no meaning here, hidden from the help."""
    nargs: dict[str, int | str | None] = {"": 0, "1": None}
    for flag, row in by_flag().items():
        parser.add_argument(
            flag, action=_Collect, dest="ignored_flags", nargs=nargs.get(row.values, row.values), default=[],
            help=argparse.SUPPRESS,
        )  # fmt: skip


def _port(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 1 << 16:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r:.40} is not a port, 0 to 65535")


def _limit(name: str, seconds: float | None) -> float | None:
    """Return the seconds, or None for 0. Raises LlmcError E668 if they are out of range."""
    if seconds is not None and not 0 <= seconds <= 1e6:
        raise LlmcError("E668", f"{name} {seconds} is out of range", "use seconds up to 1000000, or 0 for no limit")
    return seconds or None


def _origins(name: str, values: Sequence[str]) -> tuple[str, ...]:
    """Return origins given one by one, or as JSON lists as vLLM takes them. Raises LlmcError E648 for other values."""
    origins: list[Any] = []
    for value in values:
        try:
            origins += json.loads(value) if value.startswith("[") else [value]
        except ValueError:
            origins.append(value)
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(str(origin)):
            cause = f"{name}: {str(origin)[:80]!r} is not an origin"
            raise LlmcError("E648", cause, "use a scheme and a host, such as https://example.com, or * for all")
    return tuple(origins)


def _variables(name: str, values: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return variables of a chat template. Raises LlmcError E648 for one that the server sets itself."""
    if values is not None and (bad := wrong_variable(values)) is not None:
        raise LlmcError("E648", f"{name}: {bad[:40]!r} cannot be set there", "name variables that the template reads")
    return values


def _model_names(name: str, values: Sequence[str]) -> Sequence[str]:
    """Return the names of the model. Raises LlmcError E201 for one that is empty or longer than in a request."""
    if bad := [value for value in values if not 0 < len(value) <= MAX_NAME]:
        cause = f"{name}: {bad[0][:40]!r} is not allowed"
        raise LlmcError("E201", cause, f"use names of 1 to {MAX_NAME} characters, or leave it out")
    return values


def _traces_url(name: str, value: str | None) -> str | None:
    """Return the URL of a collector of traces, with the default path of OTLP over HTTP if it has none.

    Raises LlmcError E648 if it has another scheme than http or https, or no host.
    """
    if value is None:
        return None
    try:
        url = urlsplit(value)
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        valid = False
    if not valid:
        remedy = "use the collector's address for OTLP over HTTP, such as http://localhost:4318/v1/traces"
        raise LlmcError("E648", f"{name} is not the URL of an HTTP server", remedy)
    return value if url.path not in ("", "/") else url._replace(path="/v1/traces").geturl()


_configuration, _server, _access, _load, _logs, _chats, _engine = (partial(serve_option, title) for title in _GROUPS)


@dataclass(frozen=True)
class Invocation:
    """Options of the command itself, which the file of --config cannot have."""

    config: Path | None = _configuration(  # noqa: RUF009
        None, "YAML file with options; the command line overrides it", read=Path, metavar="FILE", file=False
    )
    print_config: bool = _configuration(False, "print every option with its source, and exit", read=None, file=False)
    dry_run: bool = _configuration(
        False, "print what would be served and whether it fits, and exit; no device is opened", read=None, file=False
    )
    json: bool = _configuration(
        False, "print the output of --print-config or --dry-run as JSON", read=None, file=False
    )  # fmt: skip


@dataclass(frozen=True)
class KeySources:
    """The sources of API keys and admin keys: files and environment variables."""

    api_key_file: Sequence[Path] = _access(
        (),
        "file with API keys, one per line, each as KEY or NAME: KEY; repeatable",
        read=Path,
        metavar="FILE",
        many="append",
    )
    api_key_env: Sequence[str] = _access(
        (), "environment variable with comma-separated API keys; repeatable", metavar="NAME", many="append"
    )
    admin_key_file: Sequence[Path] = _access(
        (), "file with keys for the /admin routes, one per line; repeatable", read=Path, metavar="FILE", many="append"
    )
    admin_key_env: Sequence[str] = _access(
        (), "environment variable with comma-separated admin keys; repeatable", metavar="NAME", many="append"
    )


@dataclass(frozen=True)
class Options:
    """The options of a server. `engine` are keyword arguments of AsyncLLM, `keys` and `admin_keys` the keys themselves,
    `notes` messages to print at startup, and `notify_socket` the address of a service manager ($NOTIFY_SOCKET).
    """

    model: str
    host: str = _server("127.0.0.1", "address to listen on (127.0.0.1: only this machine)")
    port: int = _server(8000, "port to listen on, 0 to 65535 (8000; 0: any free port)", read=_port)
    uds: Path | None = _server(  # noqa: RUF009
        None, "Unix socket to listen on instead of an address, accessible to this user only", read=Path, metavar="PATH"
    )
    root_path: str = _server("", "path prefix in front of all routes, if a proxy adds one", metavar="PATH")
    names: Sequence[str] = _server(
        (), "names of the model in requests; the first one is in responses (default: the folder's)",
        flags=("--served-model-name",), metavar="NAME", many="+", check=_model_names,
    )  # fmt: skip
    hosts: Sequence[str] = _server(
        (), "further allowed values of the Host header", flags=("--allowed-hosts",), metavar="NAME", many="+"
    )
    origins: Sequence[str] = _server(
        (), "origins whose web pages may use the server, such as https://example.com, or * for all (default: none)",
        flags=("--allowed-origins",), metavar="ORIGIN", many="+", check=_origins,
    )  # fmt: skip
    max_body: int = _server(
        8 << 20, "maximum size of a request body in bytes (8M)", flags=("--max-body-bytes",), read=parse_bytes,
        metavar="BYTES",
    )  # fmt: skip
    max_answer: int = _server(
        64 << 20, "maximum size of a response in bytes (64M)", flags=("--max-answer-bytes",), read=parse_bytes,
        metavar="BYTES",
    )  # fmt: skip
    response_store: int | None = _server(
        None, "memory for stored responses of /v1/responses, in bytes (default: none are stored)",
        flags=("--response-store-bytes",), read=parse_bytes, metavar="BYTES",
    )  # fmt: skip
    keep_alive: int = _server(
        15, "idle time after which a connection is closed, in seconds (15)", flags=("--timeout-keep-alive",),
        read=positive, metavar="SECONDS",
    )  # fmt: skip
    shutdown_timeout: int = _server(
        30, "time limit of open requests after SIGTERM, in seconds (30)", read=positive, metavar="SECONDS"
    )
    key_scope: str = _access(
        "all",
        "routes that need an API key: all except health probes (all), also except /metrics (all-but-metrics), or "
        "only those under /v1 as in vLLM (v1)", flags=("--api-key-scope",), choices=("all", "all-but-metrics", "v1"),
    )  # fmt: skip
    max_queued_requests: int = _load(
        512, "maximum number of waiting sequences (512)", flags=("--max-num-queued-reqs",), read=positive, metavar="N"
    )
    max_queued_tokens: int | None = _load(
        None, "maximum number of tokens of waiting sequences (default: --max-num-queued-reqs times the maximum length)",
        flags=("--max-num-queued-tokens",), read=positive, metavar="N",
    )  # fmt: skip
    max_per_key: int | None = _load(
        None, "maximum number of open sequences per API key (default: no limit)", flags=("--max-num-reqs-per-key",),
        read=positive, metavar="N",
    )  # fmt: skip
    max_queue_wait: float | None = _load(
        600.0, "maximum estimated queueing time of a request in seconds, up to 1000000 (600; 0: no limit)", read=float,
        metavar="SECONDS", check=_limit,
    )  # fmt: skip
    request_timeout: float | None = _load(
        None, "time limit of a request in seconds, up to 1000000 (default: no limit)", read=float, metavar="SECONDS",
        check=_limit,
    )  # fmt: skip
    max_connections: int | None = _load(
        None, "maximum number of connections (4096, or what ulimit -n allows)", read=positive, metavar="N"
    )
    metrics_alias: str | None = _load(
        None, "additional prefix under which every metric is exported (default: none)", choices=("vllm",)
    )
    log_level: str = _logs("info", "minimum level of log lines on stderr (info)", choices=LOG_LEVELS)
    log_format: str = _logs("text", "format of log lines on stderr (text)", choices=("text", "json"))
    access_log: bool = _logs(
        True, "do not log a line for each request",
        flags=("--disable-access-log", "--disable-uvicorn-access-log"), read=None,
    )  # fmt: skip
    log_requests: bool = _logs(
        False, "also log the texts of prompts, which are user data", flags=("--enable-log-requests",), read=None,
        negated=True,
    )  # fmt: skip
    otlp_traces_endpoint: str | None = _logs(
        None, "URL of an OpenTelemetry collector that gets a span per request, by OTLP over HTTP (default: none)",
        metavar="URL", check=_traces_url,
    )  # fmt: skip
    chat_template: str | None = _chats(
        None,
        "file with a chat template, or the name of one of the model's templates (default: the model's)",
        metavar="FILE|NAME",
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = _chats(
        None, 'default variables of the chat template, such as {"enable_thinking": false}; a request may set others',
        read=parse_override, metavar="JSON", check=_variables,
    )  # fmt: skip
    tool_call_parser: str = _chats(
        "auto", "format of the model's tool calls (auto: from its template)", choices=CALL_FORMATS
    )
    reasoning_parser: str = _chats(
        "auto",
        "format of the model's reasoning (auto: from its template)",
        choices=("auto", *REASONING_FORMATS, "none"),
    )
    on_engine_failure: str = _engine(
        "exit", "action when the engine has ended four times within an hour: exit with code 4, or retry at growing "
        "intervals (exit)", choices=("exit", "retry"),
    )  # fmt: skip
    keys: Sequence[str] = ()
    admin_keys: Sequence[str] = ()
    key_names: Sequence[str] = ()  # names of `keys`
    tls: Tls | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    notify_socket: str = ""

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.uds is not None or self.host in ("localhost", "::1") or self.host.startswith("127.")


def serve_options() -> dict[str, Option]:
    """Return every option by its name in argparse's namespace, in the order of the help."""
    owners = (Invocation, Options, KeySources, Tls, EngineOptions)
    options = [option for owner in owners for option in of_command(options_of(owner).values(), "serve")]
    return {option.dest: option for option in sorted(options, key=lambda option: _GROUPS.index(option.group))}


def serve_parser(prog: str = "llmc-serve", exit_on_error: bool = True) -> argparse.ArgumentParser:
    """Return the parser of `llmc-serve`. Without `exit_on_error`, wrong values raise argparse.ArgumentError."""
    parser = CommandParser(
        prog=prog,
        description="Serve a model over HTTP with OpenAI's API. Needs the extra serve.",
        exit_on_error=exit_on_error,
    )
    model = "an artifact, or a Hugging Face folder or id owner/name (compiled on first use)"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=model)
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    groups = {title: parser.add_argument_group(title) for title in _GROUPS}
    for option in serve_options().values():
        option.add_to(groups[option.group])
    add_ignored(parser)
    return parser
