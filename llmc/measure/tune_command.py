"""The command `llmc tune`: its arguments and its output."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import IO

from llmc_runtime.option_type import positive, positive_number

from llmc.options import Options, add_options


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of `llmc tune`."""
    p.add_argument("source", nargs="?", help="artifact, or Hugging Face folder")
    p.add_argument("-o", "--output", default="tuning.jsonl", metavar="FILE", help="file of measurements (tuning.jsonl)")
    limit = "time in seconds after which no measurement is started (600)"
    p.add_argument("--limit", type=positive_number, default=600.0, metavar="SECONDS", help=limit)
    p.add_argument("--context", type=positive, default=1024, metavar="N", help="tokens in the KV cache per row (1024)")
    sustained = "seconds to run each candidate without pauses, as long prompts at a GPU's power limit (0: bursts)"
    p.add_argument("--sustained", type=_duration, default=0.0, metavar="SECONDS", help=sustained)
    p.add_argument("--kernels", default="", metavar="A,B", help="kernels to measure (all)")
    compare = "print a comparison instead: these kernels with all others, or launches that another artifact lacks"
    p.add_argument("--compare", metavar="A,B|ARTIFACT", help=compare)
    p.add_argument("--all", action="store_true", help="also measure nodes that have a single candidate")
    p.add_argument(
        "--show", metavar="FILE", help="print the kernels that a file of measurements chooses, without measuring"
    )
    add_options(p, "tune")
    p.set_defaults(target="")


def _duration(text: str) -> float:
    """Parse a number of seconds from 0 on."""
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return seconds


def run(args: argparse.Namespace, options: Options, target: str, out: IO[str]) -> int:
    """Measure, or show a file of measurements. `target` is the one on the command line ("": not given)."""
    from llmc.measure.tune import Settings, render, show, tune

    if not args.show and not args.source:
        args.usage_error("give an artifact or a model to measure, or a file to --show")
    if args.compare:
        return _compare(args, options, target, out)
    if not args.show:
        settings = Settings(
            args.limit, args.context, args.all, target, options.cache, progress=_to_stderr,
            kernels=_names(args.kernels), sustained=args.sustained,
        )  # fmt: skip
        _to_stderr(tune(Path(args.source), Path(args.output), settings, options).text())
    result = show(Path(args.show or args.output))
    print(json.dumps(result, indent=2) if args.json else render(result), file=out)
    return 0


def _compare(args: argparse.Namespace, options: Options, target: str, out: IO[str]) -> int:
    """Print the comparison with kernels or with an artifact."""
    from llmc.measure.compare import compare_artifacts, compare_kernels, render
    from llmc.measure.tune import Settings

    if args.show:
        args.usage_error("--compare measures, and --show does not: use one of them")
    if args.sustained:
        args.usage_error("--compare measures in bursts: leave --sustained out")
    settings = Settings(args.limit, args.context, True, target, options.cache, progress=_to_stderr)
    if (Path(args.compare) / "manifest.json").is_file():
        rows = compare_artifacts(Path(args.source), Path(args.compare), settings)
    else:
        rows = compare_kernels(Path(args.source), _names(args.compare), settings, options)
    print(json.dumps(rows, indent=2) if args.json else render(rows), file=out)
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
