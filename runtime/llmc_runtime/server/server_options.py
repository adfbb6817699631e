"""The options of llmc-serve, each declared once; those of the engine are in llmc_runtime.engine_options.

Flags are spelled as vLLM's where they mean the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.option_type import parse_bytes, positive, serve_option
from llmc_runtime.server.call_format_names import OURS, FormatNames
from llmc_runtime.server.http.listen import Tls

_LEVELS = ("debug", "info", "warning", "error")
_MARKS = (
    "auto", "qwen3", "deepseek_r1", "deepseek_v3", "glm45", "glm47", "granite", "mistral", "openai_gptoss",
    "kimi_k2", "minimax_m2", "seed_oss", "hunyuan_a13b", "ernie45", "step3", "step3p5", "olmo3", "nemotron_v3",
    "holo2", "mimo", "none",
)  # fmt: skip


def _port(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 1 << 16:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r:.40} is no port, 0 to 65535")


def _limit(name: str, seconds: float | None) -> float | None:
    """Seconds, or none for 0. LlmcError E668 for what is no time."""
    if seconds is not None and not 0 <= seconds <= 1e6:
        raise LlmcError("E668", f"{name} {seconds} is no time", "seconds, up to 1000000, or 0 for no limit")
    return seconds or None


@dataclass(frozen=True)
class Invocation:
    """What the command itself does; a file cannot say it."""

    config: Path | None = serve_option(
        "configuration", None, "options in YAML; the command line overrides them", read=Path, metavar="FILE", file=False
    )
    print_config: bool = serve_option(
        "configuration", False, "print every option and where it comes from, and serve nothing", read=None, file=False
    )
    dry_run: bool = serve_option(
        "configuration", False, "print what would be served and whether it fits; open no device", read=None, file=False
    )
    json: bool = serve_option("configuration", False, "print those as JSON", read=None, file=False)


@dataclass(frozen=True)
class KeySources:
    """Where API keys and admin keys are read from."""

    api_key_file: Sequence[Path] = serve_option(
        "keys and TLS", (), "API keys, one a line", read=Path, metavar="FILE", many="append"
    )
    api_key_env: Sequence[str] = serve_option(
        "keys and TLS", (), "a variable with keys, comma-separated", metavar="NAME", many="append"
    )
    admin_key_file: Sequence[Path] = serve_option(
        "keys and TLS", (), "keys of the /admin routes", read=Path, metavar="FILE", many="append"
    )
    admin_key_env: Sequence[str] = serve_option(
        "keys and TLS", (), "a variable with such keys", metavar="NAME", many="append"
    )


@dataclass(frozen=True)
class Options:
    """How a model is served. `engine` are keywords of AsyncLLM, `keys` and `admin_keys` the keys themselves, `notes`
    lines to print at the start."""

    model: str
    host: str = serve_option("server", "127.0.0.1", "address to listen on (127.0.0.1: only this machine)")
    port: int = serve_option("server", 8000, "port to listen on; 0 takes any that is free (8000)", read=_port)
    uds: Path | None = serve_option(
        "server", None, "Unix socket to listen on instead of an address, accessible to this user only", read=Path,
        metavar="PATH",
    )  # fmt: skip
    root_path: str = serve_option("server", "", "path prefix that a proxy strips; for /openapi.json", metavar="PATH")
    names: Sequence[str] = serve_option(
        "server", (), "names of the model (default: the folder's)", flags=("--served-model-name",), metavar="NAME",
        many="+",
    )  # fmt: skip
    hosts: Sequence[str] = serve_option(
        "server", (), "allowed values of the Host header", flags=("--allowed-hosts",), metavar="NAME", many="+"
    )
    max_body: int = serve_option(
        "server", 8 << 20, "maximum size of a request body (8M)", flags=("--max-body-bytes",), read=parse_bytes,
        metavar="BYTES",
    )  # fmt: skip
    max_answer: int = serve_option(
        "server", 64 << 20, "maximum size of a response (64M)", flags=("--max-answer-bytes",), read=parse_bytes,
        metavar="BYTES",
    )  # fmt: skip
    keep_alive: int = serve_option(
        "server", 15, "seconds that an idle connection stays open (15)", flags=("--timeout-keep-alive",), read=positive,
        metavar="SECONDS",
    )  # fmt: skip
    shutdown_timeout: int = serve_option(
        "server", 30, "seconds for open requests after SIGTERM (30)", read=positive, metavar="SECONDS"
    )
    key_scope: str = serve_option(
        "keys and TLS", "all",
        "what needs an API key: all but /health and /ready (default), not /metrics either, or /v1 alone as in vLLM",
        flags=("--api-key-scope",), choices=("all", "all-but-metrics", "v1"),
    )  # fmt: skip
    max_queued_requests: int = serve_option(
        "load", 512, "maximum number of waiting sequences (512)", flags=("--max-num-queued-reqs",), read=positive,
        metavar="N",
    )  # fmt: skip
    max_queued_tokens: int | None = serve_option(
        "load", None, "maximum number of their tokens, prompts and outputs", flags=("--max-num-queued-tokens",),
        read=positive, metavar="N",
    )  # fmt: skip
    max_per_key: int | None = serve_option(
        "load", None, "maximum number of open sequences of an API key", flags=("--max-num-reqs-per-key",),
        read=positive, metavar="N",
    )  # fmt: skip
    max_queue_wait: float | None = serve_option(
        "load", 600.0, "maximum estimated wait of a request in seconds (600; 0: no limit)", read=float,
        metavar="SECONDS", check=_limit,
    )  # fmt: skip
    request_timeout: float | None = serve_option(
        "load", None, "seconds after which a request ends (0: never)", read=float, metavar="SECONDS", check=_limit
    )
    max_connections: int | None = serve_option(
        "load", None, "maximum number of connections (4096, or what ulimit -n allows)", read=positive, metavar="N"
    )
    metrics_alias: str | None = serve_option(
        "load", None, "also export every metric with this prefix", choices=("vllm",)
    )
    log_level: str = serve_option("logs", "info", "minimum level of log lines on stderr (info)", choices=_LEVELS)
    log_format: str = serve_option("logs", "text", "format of the lines on stderr (text)", choices=("text", "json"))
    access_log: bool = serve_option(
        "logs", True, "log a line per request (--disable-access-log: do not)",
        flags=("--disable-access-log", "--disable-uvicorn-access-log"), read=None,
    )  # fmt: skip
    log_requests: bool = serve_option(
        "logs", False, "also log the text of prompts, which is user data", flags=("--enable-log-requests",), read=None,
        negated=True,
    )  # fmt: skip
    chat_template: str | None = serve_option(
        "chats and sampling", None, "chat template to use, or the name of one of the model's", metavar="FILE|NAME"
    )
    tool_call_parser: str = serve_option(
        "chats and sampling",
        "auto",
        "format of the model's tool calls (auto: by its template)",
        choices=FormatNames(OURS),
    )
    reasoning_parser: str = serve_option(
        "chats and sampling", "auto", "marks of the model's reasoning (auto: by its template)", choices=_MARKS
    )
    on_engine_failure: str = serve_option(
        "engine", "exit",
        "when it has ended four times within an hour: exit (code 4), or retry at growing intervals (exit)",
        choices=("exit", "retry"),
    )  # fmt: skip
    keys: Sequence[str] = ()
    admin_keys: Sequence[str] = ()
    tls: Tls | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def local(self) -> bool:
        """Whether this machine alone can reach it."""
        return self.uds is not None or self.host in ("localhost", "::1") or self.host.startswith("127.")
