"""The arguments of `llmc quantize`."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from llmc_runtime.command_parser import CommandParser
from llmc_runtime.option_type import positive

from llmc.options import QUANT_FLAGS, add_hub_options, add_output
from llmc.quant.make.recipes import BY_HEAD, BY_LAYER, KV_FP8, NONE, RECIPES

if TYPE_CHECKING:
    from llmc.quant.make.plan import Settings


def add_arguments(p: CommandParser) -> None:
    """Add the arguments of the command."""
    p.add_argument("model", help="Hugging Face folder, or owner/name@revision")
    add_output(p, "new folder of the quantised checkpoint")
    schemes = ", ".join(f"{r.name} ({r.summary})" for r in RECIPES.values())
    text = f"format and algorithm of the weights: {schemes}, or none (as they are, with --kv-cache-dtype fp8)"
    p.add_argument(*reversed(QUANT_FLAGS), dest="scheme", required=True, choices=(*RECIPES, NONE), help=text)
    p.add_argument(
        "--group-size", type=positive, metavar="N", help="columns that share a scale (int8: all; 4 bits: 128)"
    )
    texts = "texts of calibration: JSON lines with a field text, or plain text"
    p.add_argument("--calibrate", type=Path, metavar="FILE", help=texts)
    p.add_argument("--samples", type=positive, default=128, metavar="N", help="windows of the texts to use (128)")
    p.add_argument("--length", type=positive, default=2048, metavar="N", help="tokens in a window (2048)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the choice of windows (0)")
    ignore = "module to leave as it is: its name, or re: and a regular expression; may be repeated"
    p.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help=ignore)
    cache = "fp8: store the scales of a float8_e4m3 KV cache, computed with the texts of --calibrate (auto: none)"
    p.add_argument("--kv-cache-dtype", default="auto", choices=("auto", *KV_FP8), help=cache)
    shared = "one scale of the KV cache per layer, which every engine supports, or per KV head (layer)"
    p.add_argument("--kv-scales", default=BY_LAYER, choices=(BY_LAYER, BY_HEAD), help=shared)
    add_hub_options(p)


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the Settings of parsed arguments."""
    from llmc.quant.make.plan import Settings

    values = {field.name: getattr(args, field.name) for field in fields(Settings)}
    return Settings(**(values | {"ignore": tuple(args.ignore)}))
