"""Reads whether a checkpoint is made for a KV cache of 8-bit floats, and its scales of keys and values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from llmc.diagnostics import Diagnostic

# The layer's number and which scale it is, in names such as model.layers.3.self_attn.k_scale. Older checkpoints have
# k_proj.output_scale and v_proj.output_scale, or one kv_scale for both.
NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?(?:(k|v|kv)_scale|([kv])_proj\.output_scale)$")
# Scales of the KV cache by the last part of their names; they are not weights of the model.
KV_SCALES = ("k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "output_scale", "k_zero_point", "v_zero_point")
Scales = tuple[np.ndarray, np.ndarray]  # (scales of keys, scales of values), float32, shape () or [KV heads]
UNIT_SCALE = np.ones((), np.float32)
NO_ALGORITHM = ("", "NONE", "AUTO")  # values of ModelOpt's kv_cache_quant_algo


def kv_dtype_of(config: Mapping[str, Any]) -> str:
    """Return "f8e4m3" if a config.json requests a KV cache of 8-bit floats, else "".

    compressed-tensors has the key kv_cache_scheme for it, ModelOpt also the name of an algorithm, there or as
    kv_cache_quant_algo. Raises Diagnostic E340 for a scheme that is not supported.
    """
    quantisation = config.get("quantization_config")
    places = [quantisation, quantisation.get("quantization")] if isinstance(quantisation, Mapping) else []
    keys = ("kv_cache_scheme", "kv_cache_quant_algo")
    values = (place.get(key) for place in places if isinstance(place, Mapping) for key in keys)
    scheme = next((x for x in values if x is not None), None)
    if scheme is None or (isinstance(scheme, str) and scheme.upper() in NO_ALGORITHM):
        return ""
    if isinstance(scheme, str) and scheme.upper() == "FP8":
        return "f8e4m3"
    requested = scheme if isinstance(scheme, Mapping) else {}
    if (requested.get("num_bits"), requested.get("type")) != (8, "float") or requested.get("dynamic"):
        cause = f"the kv_cache_scheme is {str(scheme)[:200]}; supported are 8-bit floats with stored scales"
        raise Diagnostic("E340", cause, "use --kv-cache-dtype bf16, which needs no scales")
    return "f8e4m3"


def kv_scales_of(names: Iterable[str], read: Callable[[str], np.ndarray]) -> dict[int, Scales]:
    """Read the scales of the KV cache by layer. A scale of -1 stands for none; a missing one of a pair is 1.

    Raises Diagnostic E341 for scales of a wrong shape, E342 for scales that are not positive and finite.
    """
    by_layer: dict[int, dict[str, np.ndarray]] = {}
    for name in names:
        if m := NAME.search(name):
            scale = _checked(name, read(name))
            if scale is not None:
                by_layer.setdefault(int(m[1]), {}).update(dict.fromkeys(m[2] or m[3], scale))
    return {layer: (pair.get("k", UNIT_SCALE), pair.get("v", UNIT_SCALE)) for layer, pair in by_layer.items()}


def _checked(name: str, stored: np.ndarray) -> np.ndarray | None:
    scale = stored.astype(np.float32)
    if scale.size == 1:
        scale = scale.reshape(())
    elif scale.ndim > 1 and len(scale) == scale.size:  # [KV heads, 1, 1], with the strategy attn_head
        scale = scale.reshape(-1)
    if scale.ndim > 1:
        raise Diagnostic("E341", f"{name} has shape {list(stored.shape)}", "download the checkpoint again")
    if (scale == -1).all():
        return None
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise Diagnostic("E342", f"{name} is zero, negative or not finite", "download the checkpoint again")
    return scale
