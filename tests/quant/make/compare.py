"""Perplexity of what `llmc quantize` makes compared with what producers make, with the same windows of calibration.

    PYTHONPATH=.:runtime:tests python -m quant.make.compare TRAIN.jsonl HELD.jsonl WORK PRODUCER=PYTHON...

PRODUCER is one of producers.py (gptqmodel, autoawq, auto-round), and PYTHON that of its environment (README.md). TRAIN
and HELD are texts, such as the two sides of examples/training/prepare.py. Both sides have 4 bits, groups of 128 and the
same windows; other settings are their own defaults. WORK gets the checkpoints; those that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from quant.make.perplexity import perplexity
from quant.test_decode import float_model
from tokenizers import Tokenizer

from llmc.quant.make.texts import read_texts, windows

DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo-model"
SCHEMES = {"gptqmodel": "gptq", "autoawq": "awq", "auto-round": "autoround"}
LENGTH = 512  # tokens of a window of held-out text


def held_out(path: Path, model: Path) -> torch.Tensor:
    """Return the tokens of a text in windows [n, LENGTH]."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = [i for text in read_texts(path) for i in tokenizer.encode(text).ids]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


def make(args: argparse.Namespace, producer: str, python: str) -> tuple[Path, Path]:
    """Return the checkpoints of `llmc quantize` and of a producer, which are made unless they are there."""
    scheme, tokens = SCHEMES[producer], args.work / "tokens.pt"
    ours, theirs = args.work / f"llmc-{scheme}", args.work / producer
    if not ours.exists():
        drawn = ["--samples", str(args.samples), "--length", str(args.length)]
        command = ["quantize", args.model, ours, "--scheme", scheme, "--calibrate", args.train, *drawn]
        subprocess.run([Path(sys.executable).with_name("llmc"), *command], check=True)
    if not theirs.exists():
        script = Path(__file__).with_name("producers.py")
        subprocess.run([python, script, producer, args.model, tokens, theirs], check=True)
    return ours, theirs


def plain_model(folder: Path) -> Any:
    """The model of a folder in float32, with the values of its weights."""
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        return float_model(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main() -> None:
    """Print the table."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("train", type=Path, help="texts of calibration")
    p.add_argument("held", type=Path, help="texts on which perplexity is measured")
    p.add_argument("work", type=Path, help="folder of the checkpoints")
    p.add_argument("producers", nargs="+", metavar="PRODUCER=PYTHON", help=f"of {', '.join(SCHEMES)}")
    p.add_argument("--model", type=Path, default=DEMO, help="folder of the model (the demonstration model)")
    p.add_argument("--samples", type=int, default=32, help="windows of calibration (32)")
    p.add_argument("--length", type=int, default=256, help="tokens of each (256)")
    args = p.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.save(windows(read_texts(args.train), args.model, args.samples, args.length, 0), args.work / "tokens.pt")
    held = held_out(args.held, args.model)
    base = perplexity(plain_model(args.model), held)
    print(f"{args.model.name}: {base:.3f}, {len(held)} windows of {LENGTH} tokens\n")
    print("| scheme | llmc | producer | llmc / producer |\n|---|---|---|---|", flush=True)
    for producer, python in (one.split("=", 1) for one in args.producers):
        ours, theirs = (perplexity(plain_model(folder), held) for folder in make(args, producer, python))
        cells = [f"{x:.3f} ({x / base - 1:+.1%})" for x in (ours, theirs)]
        print(f"| {SCHEMES[producer]} | {cells[0]} | {producer} {cells[1]} | {ours / theirs:.3f} |", flush=True)


if __name__ == "__main__":
    main()
