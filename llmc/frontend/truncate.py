"""Truncates a model to its first layers: shortens the config, and identifies the tensors of the removed layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from llmc.diagnostics import Diagnostic


def first_layers(config: Any, count: int) -> tuple[Any, int]:
    """Return the config of a model's first `count` layers, and the model's number of layers.

    Per-layer lists in the config are shortened, too. Raises Diagnostic E312 if the model does not have more than
    `count` layers, or if transformers rejects the shortened config.
    """
    text = config.get_text_config()
    total = int(text.num_hidden_layers)
    if not 1 <= count < total:
        remedy = f"give 1 to {total - 1}, or leave it out for the whole model" if total > 1 else "leave it out"
        raise Diagnostic("E312", f"--layers {count}: the model has {total}", remedy)
    data = config.to_dict()
    inner = data if text is config else _part(config, data, text)
    inner.update({name: _shortened(value, total, count) for name, value in inner.items()})
    inner[text.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = count
    try:
        return type(config).from_dict(data), total
    except Exception as e:  # transformers raises many types; each means that it rejects the shortened config
        reason = " ".join(str(e).split())[:200]
        cause = f"--layers {count}: transformers refuses the model of {count} layers: {reason}"
        raise Diagnostic("E312", cause, "give another number of layers") from e


def _shortened(value: Any, total: int, count: int) -> Any:
    """Return the first `count` layers of a list with one entry per layer, or of a dict by layer; else the value."""
    if isinstance(value, list) and len(value) == total:
        return value[:count]
    if isinstance(value, dict) and value and all(str(layer).isdigit() for layer in value):
        return {layer: entry for layer, entry in value.items() if int(layer) < count}
    return value


def _part(config: Any, data: dict[str, Any], text: Any) -> dict[str, Any]:
    """Return the entries of the text config in those of the whole config; raises Diagnostic E312 if it has none."""
    for name, value in data.items():
        is_text = getattr(config, name, None) is text
        if isinstance(value, dict) and (is_text or value.get("model_type") == text.model_type):
            return value
    cause = f"--layers: the config of {config.model_type} does not contain its text config"
    raise Diagnostic("E312", cause, "leave it out for the whole model")


def layer_lists(model: Any, count: int) -> list[tuple[str, Any]]:
    """Return (path, list) of a model's module lists of this length, those of its decoder before a vision tower's."""
    get_decoder = getattr(model, "get_decoder", None)
    inside = {id(m) for m in get_decoder().modules()} if get_decoder else set()
    lists = [(path, m) for path, m in model.named_modules() if type(m).__name__ == "ModuleList" and len(m) == count]
    return sorted(lists, key=lambda item: (id(item[1]) not in inside, item[0].count(".")))


def outside_layers(model: Any, count: int) -> Callable[[str], bool]:
    """Return a predicate on names of stored tensors: whether one belongs to a layer after the first `count`."""
    path = next((path for path, _ in layer_lists(model, count)), "layers")
    layer = re.compile(rf"(?:^|\.){re.escape(path.rpartition('.')[2])}\.(\d+)\.")

    def is_outside(name: str) -> bool:
        match = layer.search(name)
        return match is not None and int(match[1]) >= count

    return is_outside
