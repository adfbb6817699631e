"""Sizes in a config that no model has: told by their numbers, before building such a model takes all time or memory."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from llmc.diagnostics import Diagnostic

from .tensors import TensorFiles

MOST_LAYERS, MOST = 1000, 65536
_COUNTED = re.compile(r"^(?!vocab).*(layer|head|experts)")  # a vocabulary may be one per layer
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")


def check_sizes(config: Any) -> None:
    """Diagnostic E302 where a text config counts more layers, heads or experts than any model has, or heads wider,
    or where a value is no number (NaN or infinite)."""
    layers = int(config.num_hidden_layers)
    if not 1 <= layers <= MOST_LAYERS:
        raise _wrong("num_hidden_layers", layers, f"1 to {MOST_LAYERS} layers can be compiled")
    for key, value in config.to_dict().items():
        if _COUNTED.match(key) and isinstance(value, int) and value > MOST:
            raise _wrong(key, value, f"at most {MOST} make sense")
        for x in value.values() if isinstance(value, dict) else (value,):
            if isinstance(x, float) and not math.isfinite(x):
                raise _wrong(key, value, "a number is wanted")
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads > 0 and config.hidden_size // heads > MOST:
        raise _wrong("hidden_size", config.hidden_size, f"its {heads} heads would be wider than {MOST}")


def check_layers(folder: Path, layers: int) -> None:
    """Diagnostic E323 where a checkpoint that is there names far fewer layers than the config counts: to trace those
    would take long. A damaged checkpoint, or a few layers that lack, are told of later, in full."""
    try:
        files = TensorFiles(folder)
    except Diagnostic:
        return
    found = [int(m[1]) + 1 for name in files.tensors for m in [_LAYER.search(name)] if m and len(m[1]) < 6]
    files.close()
    if found and layers > 8 * max(found) + 8:  # a model that runs its layers again may count every run
        cause = f"config.json counts {layers} layers; the checkpoint holds tensors of {max(found)}"
        raise Diagnostic("E323", cause, "fetch the whole checkpoint; config.json and weights must be of one model")


def _wrong(key: str, value: Any, why: str) -> Diagnostic:
    return Diagnostic("E302", f"config.json: {key} is {value}; {why}", "correct config.json")
