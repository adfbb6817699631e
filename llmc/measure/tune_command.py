"""The command `llmc tune`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import IO

from llmc_runtime.option_type import positive

from llmc.options import Options, add_options


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of `llmc tune`."""
    p.add_argument("source", nargs="?", help="artifact, or Hugging Face folder")
    p.add_argument("-o", "--output", default="tuning.jsonl", metavar="FILE", help="file of measurements (tuning.jsonl)")
    limit = "time in seconds after which no measurement is started (600)"
    p.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help=limit)
    p.add_argument("--context", type=positive, default=1024, metavar="N", help="tokens in the KV cache per row (1024)")
    p.add_argument("--kernels", default="", metavar="A,B", help="kernels to measure (all)")
    p.add_argument("--all", action="store_true", help="also measure nodes that have a single candidate")
    p.add_argument("--show", metavar="FILE", help="file of measurements to print the choices of, without measuring")
    add_options(p, "tune")
    p.set_defaults(target="")


def run(args: argparse.Namespace, options: Options, target: str, out: IO[str]) -> int:
    """Measure, or show a file of measurements. `target` is the one on the command line ("": not given)."""
    from llmc.measure.tune import Settings, render, show, tune

    if not args.show and not args.source:
        args.usage_error("give an artifact or a model to measure, or a file to --show")
    if not args.show:
        kernels = tuple(k.strip() for k in args.kernels.split(",") if k.strip())
        settings = Settings(
            args.limit, args.context, args.all, target, options.cache, progress=_to_stderr, kernels=kernels
        )
        _to_stderr(tune(Path(args.source), Path(args.output), settings, options).text())
    result = show(Path(args.show or args.output))
    print(json.dumps(result, indent=2) if args.json else render(result), file=out)
    return 0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
