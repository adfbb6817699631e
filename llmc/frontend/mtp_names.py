"""The names of the tensors of multi-token-prediction layers in checkpoints."""

from __future__ import annotations

import re
from typing import Any


def tensors_of(config: Any, count: int | None = None) -> re.Pattern[str] | None:
    """Return a pattern of the tensor names of the first `count` MTP layers (None: of all).

    `config` is that of the model. None if it declares no MTP layers.
    """
    text = config.get_text_config()
    declared, first = getattr(text, "num_mtp_layers", None) or 0, int(text.num_hidden_layers)
    numbers = "|".join(str(first + i) for i in range(min(declared, declared if count is None else count)))
    return re.compile(rf"(^|\.)layers\.({numbers})\.") if declared else None
