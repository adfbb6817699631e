"""The options of `llmc-serve`, spelled as vLLM's where they mean the same; it reads no file and starts nothing."""

from __future__ import annotations

import argparse
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc_runtime import __version__
from llmc_runtime.defaults import parse_override
from llmc_runtime.server.elsewhere import add_elsewhere

_DECIMAL = MappingProxyType({"k": 10**3, "m": 10**6, "g": 10**9})
_BINARY = MappingProxyType({"K": 1 << 10, "M": 1 << 20, "G": 1 << 30})
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}.items()
NOT_IN_FILE = frozenset({"help", "version", "config", "print_config", "dry_run", "json", "elsewhere"})


def serve_parser(prog: str = "llmc-serve") -> argparse.ArgumentParser:
    """Every option, in groups. What is left open is None where it was parsed by `given.read`."""
    ap = argparse.ArgumentParser(
        prog=prog,
        description="Serve a model over HTTP, for OpenAI's clients. Needs: pip install 'llmc-aot[serve]'",
        allow_abbrev=False,
    )
    what = "an artifact, or a Hugging Face folder or id owner/name (compiled on first use)"
    ap.add_argument("model", metavar="MODEL", nargs="?", help=what)
    ap.add_argument("--version", action="version", version=f"{prog} {__version__}")
    _configuration(ap.add_argument_group("configuration").add_argument)
    _server(ap.add_argument_group("server").add_argument)
    _keys(ap.add_argument_group("keys and TLS").add_argument)
    _load(ap.add_argument_group("load").add_argument)
    _logs(ap.add_argument_group("logs").add_argument)
    _chats(ap.add_argument_group("chats and sampling").add_argument)
    _engine(ap.add_argument_group("engine").add_argument)
    add_elsewhere(ap)
    return ap


def _configuration(add: Any) -> None:
    add("--config", type=Path, metavar="FILE", help="options in YAML; those of the command line come first")
    add("--print-config", action="store_true", help="print every option and where it comes from, and serve nothing")
    add("--dry-run", action="store_true", help="print what would be served and whether it fits; open no device")
    add("--json", action="store_true", help="print those as JSON")


def _server(add: Any) -> None:
    add("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1: this machine alone)")
    add("--port", type=_port, default=8000, help="0 takes any that is free (8000)")
    add("--uds", type=Path, metavar="PATH", help="listen on a Unix socket, for this user alone, instead of an address")
    add("--root-path", default="", metavar="PATH", help="what a proxy in front takes off the path; for /openapi.json")
    add("--served-model-name", nargs="+", default=[], metavar="NAME", help="names of the model (the folder's)")
    add("--allowed-hosts", nargs="+", default=[], metavar="NAME", help="names that a Host header may have")
    add("--max-body-bytes", type=parse_bytes, default=8 << 20, metavar="BYTES", help="of one request (8M)")
    add("--max-answer-bytes", type=parse_bytes, default=64 << 20, metavar="BYTES", help="of one answer (64M)")
    add(
        "--timeout-keep-alive",
        type=positive,
        default=15,
        metavar="SECONDS",
        help="for a connection's next request (15)",
    )
    add("--shutdown-timeout", type=positive, default=30, metavar="SECONDS", help="to drain after SIGTERM (30)")


def _keys(add: Any) -> None:
    add("--api-key-file", action="append", default=[], type=Path, metavar="FILE", help="API keys, one a line")
    add("--api-key-env", action="append", default=[], metavar="NAME", help="a variable with keys, comma-separated")
    scopes = ("all", "all-but-metrics", "v1")
    what = "what needs an API key: all but /health and /ready (default), not /metrics either, or /v1 alone as in vLLM"
    add("--api-key-scope", default="all", choices=scopes, help=what)
    add("--admin-key-file", action="append", default=[], type=Path, metavar="FILE", help="keys of the /admin routes")
    add("--admin-key-env", action="append", default=[], metavar="NAME", help="a variable with such keys")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="the private key, PEM; may be in the certificate's file")
    add("--ssl-certfile", type=Path, metavar="FILE", help="the certificate and its chain, PEM: serve over TLS")
    add("--ssl-ca-certs", type=Path, metavar="FILE", help="who may sign certificates of clients, PEM")
    add("--ssl-cert-reqs", type=int, default=0, choices=(0, 1, 2), help="of clients: 0 none, 1 optional, 2 required")
    add("--ssl-ciphers", metavar="LIST", help="of TLS 1.2, as OpenSSL names them")
    add("--enable-ssl-refresh", action="store_true", help="take up new files of certificates while serving")


def _load(add: Any) -> None:
    add("--max-num-queued-reqs", type=positive, default=512, metavar="N", help="sequences that may wait (512)")
    add("--max-num-queued-tokens", type=positive, metavar="N", help="their tokens, prompts and most output")
    add("--max-num-reqs-per-key", type=positive, metavar="N", help="open sequences of one API key")
    add("--max-queue-wait", type=float, default=600.0, metavar="SECONDS", help="most that may be waited (600; 0: any)")
    add("--request-timeout", type=float, default=0.0, metavar="SECONDS", help="a request ends after so many (0: never)")
    add("--max-connections", type=positive, metavar="N", help="open connections (4096, or what ulimit -n allows)")
    add("--metrics-alias", choices=("vllm",), help="every metric under this prefix, too")


def _logs(add: Any) -> None:
    levels = ("debug", "info", "warning", "error")
    add("--log-level", default="info", choices=levels, help="what is told on stderr (info)")
    add("--log-format", default="text", choices=("text", "json"), help="of the lines on stderr (text)")
    add("--disable-access-log", "--disable-uvicorn-access-log", action="store_true", help="no line for each request")
    add(
        "--enable-log-requests", action=argparse.BooleanOptionalAction, default=False,
        help="log the text of prompts, too; they are your users' words",
    )  # fmt: skip


def _chats(add: Any) -> None:
    formats = (
        "auto", "hermes", "llama3_json", "mistral", "openai", "qwen3_coder", "qwen3_xml", "seed_oss", "minimax_m2",
        "glm45", "glm47", "deepseek_v3", "deepseek_v31", "kimi_k2", "granite", "granite-20b-fc", "phi4_mini_json",
        "pythonic", "llama4_pythonic", "llama4_json", "lfm2", "granite4", "mimo", "none",
    )  # fmt: skip
    marks = (
        "auto", "qwen3", "deepseek_r1", "deepseek_v3", "glm45", "glm47", "granite", "mistral", "openai_gptoss",
        "kimi_k2", "minimax_m2", "seed_oss", "hunyuan_a13b", "ernie45", "step3", "step3p5", "olmo3", "nemotron_v3",
        "holo2", "mimo", "none",
    )  # fmt: skip
    add("--chat-template", metavar="FILE|NAME", help="another template, or the name of one of the model's")
    generation_flags(add)
    add("--tool-call-parser", default="auto", choices=formats, help="how the model writes calls (by its template)")
    add("--reasoning-parser", default="auto", choices=marks, help="how it marks reasoning (by its template)")


def _engine(add: Any) -> None:
    add("--max-model-len", type=count, metavar="N", help="tokens of the longest sequence")
    add("--max-num-seqs", type=positive, metavar="N", help="sequences that run at a time")
    add("--max-num-batched-tokens", type=count, metavar="N", help="tokens of one step")
    add("--kv-cache-memory-bytes", type=parse_bytes, metavar="BYTES", help="of the KV cache, for example 2GiB")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="share equal beginnings")
    add("--scheduling-policy", default="fcfs", choices=("fcfs", "priority"), help="who runs first (fcfs)")
    add("--seed", type=int, default=0, metavar="N", help="of the seeds of requests that bring none (0)")
    what = "when it has ended four times within an hour: exit (code 4), or retry at growing intervals (exit)"
    add("--on-engine-failure", default="exit", choices=("exit", "retry"), help=what)
    add("--threads", type=positive, metavar="N", help="of the CPU (physical cores)")
    add("--prepare", action="store_true", help="build device graphs (of GPUs) and grammars' vocabulary at the start")
    add("--canary", action="store_true", help="compare with the recorded canary before anything else runs")
    add("--target", default="cpu:native", help="what to compile a folder for (cpu:native)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of a compiled folder")
    add("--cache", type=Path, metavar="DIR", help="where compiled models are kept ($LLMC_CACHE, ~/.cache/llmc)")


def generation_flags(add: Any) -> None:
    """Those about defaults of sampling; llmc-run has them, too."""
    what = "defaults of sampling: auto (the model's generation_config.json), vllm (none), or a folder with another"
    add("--generation-config", default="auto", metavar="auto|vllm|DIR", help=what)
    what = 'goes over these, such as {"temperature": 0.7}'
    add("--override-generation-config", type=parse_override, metavar="JSON", help=what)


def parse_bytes(text: str) -> int:
    """A number of bytes, with an optional unit: 1048576, 512M, 1.5GiB; units are powers of 1024."""
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
    raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory; write 1048576, 512M or 2GiB")


def count(text: str) -> int:
    """A whole number of at least 1; as in vLLM 32k is 32000, and 32K 32768."""
    head, last = text.strip()[:-1], text.strip()[-1:]
    scale = _DECIMAL.get(last) or _BINARY.get(last)
    if scale is None:
        return positive(text)
    try:
        value = Decimal(head) * scale
    except ArithmeticError:
        return positive(text)
    return positive(str(int(value)) if value.is_finite() and value == int(value) else text)


def _port(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 1 << 16:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r:.40} is no port, 0 to 65535")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value
