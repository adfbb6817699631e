"""The names of the tensors of multi-token-prediction layers in checkpoints."""

from __future__ import annotations

import re
from typing import Any

from llmc.diagnostics import Diagnostic

MTP_NAMES = re.compile(r"^mtp\.")  # tensors beside the model's own; transformers skips them
OTHER_DRAFTS = "draft with --draft MODEL or --draft eagle:PATH"  # the remedy if a model has no such layer
FIRST_MTP_NAMES = re.compile(r"^mtp\.(?!layers\.[1-9])")  # the same, without the layers after the first
_MAX_LAYERS = 64  # published models have up to three


def tensors_of(config: Any, count: int | None = None) -> re.Pattern[str] | None:
    """Return a pattern of the tensor names of the first `count` MTP layers (None: of all).

    `config` is that of the model. None if it declares no MTP layers. Raises Diagnostic E302 if their number is absurd.
    """
    text = config.get_text_config()
    declared, first = getattr(text, "num_mtp_layers", None) or 0, int(text.num_hidden_layers)
    if not isinstance(declared, int) or not 0 <= declared <= _MAX_LAYERS:
        cause = f"config.json: num_nextn_predict_layers is {declared!r:.40}"
        raise Diagnostic("E302", cause, f"use the number of multi-token-prediction layers, 0 to {_MAX_LAYERS}")
    numbers = "|".join(str(first + i) for i in range(min(declared, declared if count is None else count)))
    return re.compile(rf"(^|\.)layers\.({numbers})\.") if declared else None


def are_apart(model: Any) -> bool:
    """Whether checkpoints of a model may have an MTP layer apart from its layers (see mtp_head.ApartHead)."""
    skipped = model._keys_to_ignore_on_load_unexpected or ()
    return tensors_of(model.config) is None and any(pattern.startswith("^mtp") for pattern in skipped)
