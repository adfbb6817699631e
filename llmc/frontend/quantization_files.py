"""Reads how a model is quantised from the files that some tools write beside config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic

# File -> the method of configurations that do not name one: AutoGPTQ's, AutoAWQ's, AutoRound's.
FILES: Mapping[str, str] = MappingProxyType(
    {"quantize_config.json": "gptq", "quant_config.json": "awq", "quantization_config.json": ""}
)
KEY = "quantization_config"
# The keys that change how weights are read, with their synonyms.
DECISIVE = (
    ("quant_method",),
    ("bits", "w_bit"),
    ("group_size", "q_group_size"),
    ("checkpoint_format", "format"),
    ("version",),
    ("packing_format",),
    ("weight_block_size",),
    ("dynamic",),
    ("extra_config",),
)


def with_quantization(config: Mapping[str, Any], beside: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a config.json with the `quantization_config` of the files beside it, by name, if it has none itself.

    Raises Diagnostic E340 for files that contradict one another.
    """
    known, source = config.get(KEY) or config.get("compression_config"), "config.json"
    for name, content in beside.items():
        method = content.get("quant_method") or FILES[name] or None
        found = {**content, "quant_method": method}
        if isinstance(known, Mapping):
            _compare(name, found, source, known)
        elif known is None and method:
            known, source = found, name
    return config if known is None or source == "config.json" else {**config, KEY: known}


def _compare(name: str, found: Mapping[str, Any], source: str, known: Mapping[str, Any]) -> None:
    for keys in DECISIVE:
        a, b = (next((c[k] for k in keys if c.get(k) is not None), None) for c in (found, known))
        if a is not None and b is not None and _plain(a) != _plain(b):
            cause = f"{name} has {keys[0]} = {str(a)[:80]!r}; {source} has {str(b)[:80]!r}"
            raise Diagnostic("E340", cause, "download the checkpoint again; its files must be of one revision")


def _plain(value: Any) -> Any:
    """Normalise a value for comparison: "GEMM" and "gemm" are equal."""
    return value.lower() if isinstance(value, str) else value
