"""Scales of input channels, by which activations are divided and the columns of weights multiplied before rounding.

AWQ (arXiv 2306.00978) makes rounding cheap for the channels with large inputs. The scale of a channel is
mean|x|^r / mean|w|^(1-r). The exponent r is searched on a grid of 20, for the smallest error of the products: the sum
over modules of tr(D G DT), where D is the error of a weight and G the sum of x xT.

SmoothQuant (arXiv 2211.10438) moves half of the activations' outliers into the weights (ALPHA = 0.5).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmc.quant.make.layer_runs import Inputs
from llmc.quant.make.recipes import Recipe
from llmc.quant.make.rounding import round_to_nearest

STEPS = 20
ALPHA = 0.5  # 0 leaves activations as they are, 1 makes all channels equally large


def awq_scales(group: Inputs, weights: Sequence[Tensor], recipe: Recipe) -> Tensor:
    """Return the scale of each input channel of a group of modules; ones if none is better."""
    activity = group.total / max(group.tokens, 1)
    size = torch.stack([w.abs().mean(0) for w in weights]).mean(0)
    best = torch.ones_like(activity)
    lowest = _error(group.gram, weights, best, recipe)
    for step in range(1, STEPS + 1):
        r = step / STEPS
        scale = (activity.clamp(min=1e-4) ** r / size.clamp(min=1e-4) ** (1 - r)).clamp(min=1e-4)
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = _error(group.gram, weights, scale, recipe)
        if error < lowest:
            best, lowest = scale, error
    return best


def _error(gram: Tensor, weights: Sequence[Tensor], scale: Tensor, recipe: Recipe) -> float:
    """Return the squared error of the products, if weights times `scale` are rounded to nearest."""
    total = 0.0
    for w in weights:
        d = round_to_nearest(w * scale, recipe, torch.bfloat16).values() / scale - w
        total += float(((d @ gram) * d).sum())
    return total


def smooth_scales(group: Inputs, weights: Sequence[Tensor]) -> Tensor:
    """Return the scale of each input channel, max|x|^a / max|w|^(1-a) of the modules that read it."""
    size = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
    scale = group.largest.clamp(min=1e-5) ** ALPHA / size.clamp(min=1e-5) ** (1 - ALPHA)
    return scale.clamp(min=1e-5)
