"""SmoothQuant (arXiv 2211.10438): scales that move half of the activations' outliers into the weights (alpha = 0.5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmc.quant.make.layer_runs import Inputs

ALPHA = 0.5  # 0 leaves activations as they are, 1 makes all channels equally large


def smooth_scales(group: Inputs, weights: Sequence[Tensor]) -> Tensor:
    """Return the scale of each input channel, max|x|^a / max|w|^(1-a) of the modules that read it."""
    size = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
    scale = group.largest.clamp(min=1e-5) ** ALPHA / size.clamp(min=1e-5) ** (1 - ALPHA)
    return scale.clamp(min=1e-5)
