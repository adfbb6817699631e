"""Perplexity of checkpoints, original or quantised: `python -m quant.make.perplexity TEXTS.jsonl LENGTH FOLDER...`.

Weights are dequantised by reference.py, and transformers runs them in float32; activations are not quantised. Documents
are joined and cut into windows of LENGTH tokens. Run with `tests` on PYTHONPATH.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from quant.test_decode import float_model
from tokenizers import Tokenizer


def perplexity(model: Any, windows: torch.Tensor) -> float:
    """Perplexity of the tokens of each window after its first."""
    total = 0.0
    with torch.no_grad():
        for batch in windows.split(4):
            scores = model(input_ids=batch).logits[:, :-1].float().log_softmax(-1)
            total -= float(scores.gather(-1, batch[:, 1:, None]).sum())
    return math.exp(total / windows[:, 1:].numel())


def main(texts: Path, length: int, folders: list[Path]) -> None:
    """Print a line for each folder."""
    tokenizer = Tokenizer.from_file(str(folders[0] / "tokenizer.json"))
    ids = [i for line in texts.open() for i in tokenizer.encode(json.loads(line)["text"]).ids]
    windows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    for folder in folders:
        if "quantization_config" in json.loads((folder / "config.json").read_text()):
            model = float_model(folder)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        print(f"{folder.name}: {perplexity(model, windows):.3f} ({len(windows)} windows)", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [Path(f) for f in sys.argv[3:]])
