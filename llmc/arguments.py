"""Command-line options shared by several `llmc` commands, and the parsers of their values."""

from __future__ import annotations

import argparse
from pathlib import Path


def build_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options of a compile: target, limits, pipeline, tuning file and cache."""
    p.add_argument(
        "--target",
        default="cpu:native",
        metavar="NAME",
        help="cpu:native (default), cpu:x86-64-v3, cpu:x86-64-v4, cpu:portable, "
        "cuda:sm_80, cuda:sm_90, cuda:sm_100, hip:gfx942",
    )
    p.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of weights and activations"
    )
    p.add_argument(
        "--max-model-len", type=positive, metavar="N", help="tokens of the longest sequence (the model's own)"
    )
    p.add_argument("--max-num-seqs", type=positive, metavar="N", help="sequences that run at once (CPU: 16, GPU: 256)")
    p.add_argument(
        "--max-num-batched-tokens", type=positive, metavar="N", help="tokens of one step (CPU: 512, GPU: 8192)"
    )
    p.add_argument(
        "--layers", type=positive, metavar="N", help="a quick build of the first N layers alone: not the model"
    )
    p.add_argument("--pipeline", metavar="TEXT", help='passes, for example "serve, after fuse-norm: my-fuse"')
    p.add_argument(
        "--tuning", metavar="FILE", type=Path, help="measurements that choose kernels (those that come with llmc)"
    )
    p.add_argument("--cache", metavar="DIR", type=Path, help="cache of kernels and artifacts (~/.cache/llmc)")
    p.add_argument("--no-cache", action="store_true", help="build everything anew, keep nothing")
    p.add_argument(
        "--no-reuse", action="store_true", help="use cached kernels, but neither use nor keep a whole artifact"
    )
    hub_arguments(p)


def hub_arguments(p: argparse.ArgumentParser) -> None:
    """Add the options that say where a model named by its hub id is looked up and stored."""
    p.add_argument(
        "--download-dir", metavar="DIR", type=Path, help="where models by id are kept (huggingface_hub's cache)"
    )
    p.add_argument("--hub-endpoint", metavar="URL", help="the hub to ask for models by id (the public one)")
    p.add_argument(
        "--offline", action="store_true", help="ask no hub: models by id come from the download folder alone"
    )
    p.add_argument("--trust-remote-code", action="store_true", help="refused: no code of a model is ever run")


def positive(text: str) -> int:
    """Parse an integer of at least 1; raises argparse.ArgumentTypeError for a smaller one."""
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"{n}: it must be at least 1")
    return n


def gib(text: str) -> int:
    """Parse a size in bytes; a number without a unit is in GiB."""
    return nbytes(f"{text}GiB" if text.replace(".", "", 1).isdigit() else text)


def nbytes(text: str) -> int:
    """Parse a size in bytes with an optional unit: 1048576, 512M, 2GiB."""
    from llmc_runtime.option_type import parse_bytes

    return parse_bytes(text)
