"""Reads how a model is quantised from all places where tools write it: config.json and files next to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic

# File -> the method of configurations that do not name one: AutoGPTQ's, AutoAWQ's, AutoRound's, ModelOpt's, quanto's.
FILES: Mapping[str, str] = MappingProxyType(
    {
        "quantize_config.json": "gptq",
        "quant_config.json": "awq",
        "quantization_config.json": "",
        "hf_quant_config.json": "modelopt",
        "quanto_qmap.json": "quanto",
    }
)
KEY = "quantization_config"
# Older name of KEY in config.json, and the method of configurations there that do not name one.
OLD_KEY, OLD_METHOD = "compression_config", "compressed-tensors"
# MLX writes this key to config.json, and repeats its value under KEY without a quant_method
MLX_KEY, MLX = "quantization", "mlx"
# The last parts of names that only tensors of quantised weights have.
MARKS = frozenset(
    (
        "qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "SCB", "absmax",
        "weight_scales", "embedding_quantized", "biases", "qbiases", "_data", "_scale",
    )
)  # fmt: skip
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
    ("config_groups",),
    ("mode",),
)


def with_quantization(config: Mapping[str, Any], other_files: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a config.json whose `quantization_config` has the keys of all places that describe the quantisation.

    These are `quantization_config` and `compression_config` of config.json and of its `text_config`, `quantization` of
    MLX, and the files next to it, by name. If several places have a key, the first one is used. Raises Diagnostic E340
    for places, or synonyms in one place, that contradict one another.
    """
    known, source = config.get(KEY), "config.json"
    if known is not None and not isinstance(known, Mapping):
        return config
    for name, content, default in _places(config, other_files):
        settings = {**content, "quant_method": content.get("quant_method") or default or None}
        if known:
            _compare(name, settings, source, known)
            known = {**settings, **{key: value for key, value in known.items() if value is not None}}
        elif settings["quant_method"]:
            known, source = settings, name
    if known:
        _compare(source, known, source, known)
    return {**config, KEY: known} if known else config


def _places(
    config: Mapping[str, Any], other_files: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield (name, content, default method) of the places besides `quantization_config` of config.json."""
    inner, mlx = config.get("text_config"), config.get(MLX_KEY)
    places = [(OLD_KEY, config.get(OLD_KEY), OLD_METHOD)]
    if isinstance(mlx, Mapping) and {"bits", "group_size"} <= mlx.keys():
        places.append((MLX_KEY, mlx, MLX))
    if isinstance(inner, Mapping):
        places += [(f"text_config.{key}", inner.get(key), method) for key, method in ((KEY, ""), (OLD_KEY, OLD_METHOD))]
    for name, content, method in (*places, *((name, content, FILES[name]) for name, content in other_files.items())):
        if isinstance(content, Mapping):
            yield name, content, method


def _compare(name: str, settings: Mapping[str, Any], source: str, known: Mapping[str, Any]) -> None:
    """Raise Diagnostic E340 if two places, or two synonyms in one of them, give a decisive key different values."""
    for synonyms in DECISIVE:
        values = []  # (place, key, value)
        for place, config in ((name, settings), (source, known)):
            values += [(place, key, config[key]) for key in synonyms if config.get(key) is not None]
        for place, key, value in values[:-1]:
            last_place, last_key, last_value = values[-1]
            if _plain(value) != _plain(last_value):
                where = f"{last_place} has " if last_place != place else "and "
                cause = f"{place} has {key} = {value!r:.80}; {where}{last_key} = {last_value!r:.80}"
                raise Diagnostic("E340", cause, "download the checkpoint again; its files must be of one revision")


def _plain(value: Any) -> Any:
    """Normalise a value for comparison: "GEMM" and "gemm" are equal, and all names of ModelOpt's method."""
    if not isinstance(value, str):
        return value
    return "modelopt" if value.lower().startswith("modelopt_") else value.lower()
