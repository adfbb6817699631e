"""`llmc bench`: parses the arguments, runs a measurement and prints its report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import IO, Any

from llmc_runtime.bench.table import table
from llmc_runtime.format.errors import LlmcError

_WHAT = {
    "serve": "throughput, time to first token and time between tokens of a running server",
    "offline": "tokens per second of LLM.generate over many requests",
    "latency": "time of one batch, and of a decode step",
    "start": "time from process start to the first token",
}.items()


def parser(sizes: Callable[[str], int]) -> argparse.ArgumentParser:
    """Return the parser for all kinds of measurement; `sizes` parses amounts of memory."""
    from llmc_runtime.bench import common, latency, offline, serve, start

    ap = argparse.ArgumentParser(prog="llmc bench", description="Measure; reports are tables, or JSON with --json.")
    sub = ap.add_subparsers(title="what", metavar="WHAT", dest="what", required=True)
    modules = {"serve": serve, "offline": offline, "latency": latency, "start": start}
    for name, words in _WHAT:
        p = sub.add_parser(name, help=words, description=words)
        modules[name].arguments(p.add_argument)
        if name != "serve":
            common.arguments(p.add_argument, sizes)
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
        raise LlmcError("E670", f"${name} holds no API key", "set it, or leave --api-key-env out")
    return (key,)
