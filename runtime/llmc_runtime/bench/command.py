"""`llmc bench`: parses the arguments, runs a measurement and prints its report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import IO, Any

from llmc_runtime.bench.table import table
from llmc_runtime.command_parser import CommandParser
from llmc_runtime.format.errors import LlmcError

_BENCHMARKS = {
    "serve": "load test of a running server: throughput, time to first token, time between tokens",
    "offline": "throughput of LLM.generate over many requests in tokens per second",
    "latency": "latency of one batch in seconds, and of a step in milliseconds; prefix caching is off by default",
    "start": "time from the start of a process to its first token in seconds",
}.items()
# Of `latency` as in vLLM's, so that no batch profits from earlier ones.
_CHANGED: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {"latency": {"enable_prefix_caching": {"default": False, "text": "reuse the KV cache of common prefixes (off)"}}}
)


def parser() -> argparse.ArgumentParser:
    """Return the parser for all kinds of measurement."""
    from llmc_runtime.bench import engine_arguments, latency, offline, serve, start

    ap = CommandParser(prog="llmc bench", description="Measure performance. Reports are tables, or JSON with --json.")
    sub = ap.add_subparsers(title="what", metavar="WHAT", dest="what", required=True)
    modules = {"serve": serve, "offline": offline, "latency": latency, "start": start}
    for name, text in _BENCHMARKS:
        p = sub.add_parser(name, help=text, description=text)
        modules[name].arguments(p.add_argument)
        if name != "serve":
            engine_arguments.arguments(p, _CHANGED.get(name, {}))
    return ap


def run(args: argparse.Namespace, environment: Mapping[str, str], out: IO[str], err: IO[str]) -> int:
    """Measure and print the report. Returns the exit status.

    Raises LlmcError E670 to E672, and the errors of opening a model.
    """
    from llmc_runtime.bench import latency, offline, serve, start

    if args.what == "serve":
        return serve.run(args, _keys(args.api_key_env, environment), out, err)
    module: ModuleType = {"offline": offline, "latency": latency, "start": start}[args.what]
    report: dict[str, Any] = module.run(args, err)
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1) if args.json else table(module.LINES, {"": report}), file=out)
    return 0


def _keys(name: str | None, environment: Mapping[str, str]) -> Sequence[str]:
    if name is None:
        return ()
    key = environment.get(name, "").partition(",")[0].strip()
    if not key:
        raise LlmcError("E670", f"${name} contains no API key", "set it, or omit --api-key-env")
    return (key,)
