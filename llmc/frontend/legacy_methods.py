"""Methods that make tensors of Python numbers while they run, which have no values on the meta device.

They are replaced by methods that compute the same with the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def patch(model: torch.nn.Module) -> None:
    """Replace the methods of the modules whose class is in the table."""
    for module in model.modules():
        for name, make in METHODS.get(type(module).__name__, {}).items():
            setattr(module, name, make(module))


def _sparse(mlp: Any) -> Callable[[Tensor], Tensor]:
    """Gates below a quantile of the normal distribution that has their mean and deviation are zero."""
    if not 0 < mlp.activation_sparsity < 1:
        return torch.relu
    quantile = NormalDist().inv_cdf(mlp.activation_sparsity)
    rounded = float(torch.tensor(quantile, dtype=mlp.gate_proj.weight.dtype, device="cpu"))
    return partial(_above, rounded)


def _above(quantile: float, x: Tensor) -> Tensor:
    """x [*, n] -> relu(x - mean - deviation * quantile), with mean and deviation of the last axis."""
    mean = x.mean(-1, keepdim=True)
    wide = x.float()
    variance = (wide - wide.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)
    return torch.relu(x - (mean + variance.sqrt().to(x.dtype) * quantile))


METHODS: Mapping[str, Mapping[str, Callable[[Any], Callable[..., Any]]]] = MappingProxyType(
    {"Gemma3nTextMLP": {"_gaussian_topk": _sparse}}
)
