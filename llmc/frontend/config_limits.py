"""Rejects excessive sizes in a config before building such a model exhausts time or memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.frontend.safetensors_reader import TensorFiles

MAX_LAYERS, MAX_SIZE = 1000, 65536
# The sparse attention of model types: the keys of a config whose product is how many earlier tokens a layer selects.
TOP_K, TOP_BLOCKS = ("index_topk",), ("index_topk_blocks", "index_block_size")
SPARSE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), TOP_K) | {"minimax_m3_vl_text": TOP_BLOCKS}
)
_COUNTED = re.compile(r"^(?!vocab).*(layer|head|experts)")  # vocabularies may be counted per layer
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")


def check_sizes(config: Any) -> None:
    """Raise Diagnostic E302 if layers, heads, experts or head width exceed any real model, or a value is not finite."""
    layers = int(config.num_hidden_layers)
    if not 1 <= layers <= MAX_LAYERS:
        raise _wrong("num_hidden_layers", layers, f"1 to {MAX_LAYERS} layers can be compiled")
    for key, value in config.to_dict().items():
        if _COUNTED.match(key) and isinstance(value, int) and value > MAX_SIZE:
            raise _wrong(key, value, f"the maximum is {MAX_SIZE}")
        numbers = value.values() if isinstance(value, dict) else [value]
        for x in numbers:
            if isinstance(x, float) and not math.isfinite(x):
                raise _wrong(key, value, "it must be a finite number")
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads > 0 and config.hidden_size // heads > MAX_SIZE:
        raise _wrong("hidden_size", config.hidden_size, f"its {heads} heads would be wider than {MAX_SIZE}")


def chunk_size(config: Any) -> int | None:
    """Return the width of a text config's attention chunks in tokens; None if no layer attends in chunks.

    A token attends to the earlier tokens of its own chunk. Within the first chunk that is ordinary causal attention, so
    such a model is compiled for sequences of at most one chunk.
    """
    kinds, size = getattr(config, "layer_types", None), getattr(config, "attention_chunk_size", None)
    return int(size) if size and (kinds is None or "chunked_attention" in kinds) else None


def dense_limit(config: Any) -> tuple[int, str] | None:
    """Return the number of tokens up to which a text config's attention is ordinary causal attention, and what limits
    it; None if it always is.

    The limit is the length of a chunk, or in sparse attention the number of earlier tokens that an indexer selects for
    each token: it selects all of them in shorter sequences.
    """
    if chunk := chunk_size(config):
        return chunk, f"the chunk that its layers attend to ({chunk} tokens)"
    keys = SPARSE.get(getattr(config, "model_type", ""))
    kinds = getattr(config, "layer_types", None)
    if keys and (kinds is None or any("sparse" in kind for kind in kinds)):
        count = math.prod(int(getattr(config, key)) for key in keys)
        return count, f"as its layers attend to {' * '.join(keys)} = {count} tokens"
    return None


def check_layers(folder: Path, layers: int) -> None:
    """Raise Diagnostic E323 if the checkpoint has far fewer layers than the config, before a long trace.

    Damaged checkpoints and a few missing layers are reported in detail later, by `Checkpoint`.
    """
    try:
        files = TensorFiles(folder)
    except Diagnostic:
        return
    files.close()
    matches = filter(None, map(_LAYER.search, files.tensors))
    counts = [int(match[1]) + 1 for match in matches if len(match[1]) < 6]
    if counts and layers > 8 * max(counts) + 8:  # a model that reuses its layers may count every pass
        cause = f"config.json counts {layers} layers; the checkpoint contains tensors of {max(counts)}"
        raise Diagnostic("E323", cause, "download the whole checkpoint; config.json and weights must be of one model")


def _wrong(key: str, value: Any, why: str) -> Diagnostic:
    return Diagnostic("E302", f"config.json: {key} is {value}; {why}", "correct config.json")
