"""AutoRound (arXiv 2309.05516): learns how to round each weight of a layer, and the range of each group.

A weight is rounded at w / scale + v, with v in [-1/2, 1/2], and ranges shrink by factors in [1/2, 1]. Both are learned
by signed gradient descent with step sizes that decay to zero. The loss is the squared error of the layer's output,
compared with the unquantised model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Linear

from llmc.quant.make.expert_weights import expert_tokens, too_few_tokens
from llmc.quant.make.layer_runs import Layer
from llmc.quant.make.recipes import Recipe
from llmc.quant.make.rounding import Grid, Quantised, extremes, grid_from, round_to_nearest

STEPS, BATCH = 200, 8


@dataclass
class _Learned:
    """The learned parameters of one weight: rounding offsets, and factors of the lower and upper end of each group."""

    w: Tensor
    recipe: Recipe
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.low, self.high = extremes(self.w, self.recipe)
        self.offset = torch.zeros_like(self.w, requires_grad=True)
        self.shrink = torch.ones(2, *self.low.shape, requires_grad=True)

    def grid(self) -> Grid:
        """Return the grid of the shrunk ranges."""
        low = self.low * self.shrink[0]
        high = self.high * self.shrink[1]
        return grid_from(low, high, self.recipe, (self.w.shape[0], self.w.shape[1]), self.dtype)

    def values(self) -> Tensor:
        """Return the dequantised weight; gradients pass through the roundings as if there were none."""
        span = torch.maximum(-self.low * self.shrink[0], self.high * self.shrink[1])
        lo, hi = self.recipe.range
        exact = span / ((hi - lo) / 2)
        grid = self.grid()
        scale = grid.spread(exact + (grid.scale.float() - exact).detach())
        at = self.w / scale + self.offset
        return (at + (at.round() - at).detach()).clamp(lo, hi) * scale

    def step(self, rate: float) -> None:
        """Move against the sign of the gradients."""
        with torch.no_grad():
            for x, lo, hi in ((self.offset, -0.5, 0.5), (self.shrink, 0.5, 1.0)):
                if x.grad is not None:
                    x -= rate * x.grad.sign()
                    x.clamp_(lo, hi)
                    x.grad = None

    @torch.no_grad()
    def quantised(self) -> Quantised:
        """Return the weight at the end."""
        grid = self.grid()
        lo, hi = self.recipe.range
        codes = (self.w / grid.spread(grid.scale) + self.offset).round().clamp(lo, hi)
        return Quantised(grid, codes.to(torch.int8))


def sign_rounding(
    layer: Layer, linears: Mapping[str, Linear], recipe: Recipe, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Quantised]:
    """Quantise the linear modules of a layer; see `methods.Method`."""
    layer.advance_reference()
    assert layer.reference is not None
    rounded = _rounded_experts(layer, recipe, dtypes)  # those that too few tokens reach
    weights = {name: m.weight.data for name, m in linears.items()}
    weights |= {name: e.of(layer.module).clone() for name, e in layer.experts.items() if name not in rounded}
    learned = {name: _Learned(w, recipe, dtypes[name]) for name, w in weights.items()}
    draw = torch.Generator().manual_seed(layer.seed)
    for step in range(STEPS):
        samples = torch.randint(len(layer.hidden), (BATCH,), generator=draw).tolist()
        values = {name: weight.values() for name, weight in learned.items()}
        parameters = {f"{name}.weight": values[name] for name in linears} | _stacks(layer, values)
        output = layer.call(torch.from_numpy(layer.hidden[samples]), parameters)
        loss: Tensor = ((output - torch.from_numpy(layer.reference[samples])) ** 2).mean()
        loss.backward()
        rate = (1 - step / STEPS) / STEPS  # decreases to 0
        for weight in learned.values():
            weight.step(rate)
    return rounded | {name: weight.quantised() for name, weight in learned.items()}


def _rounded_experts(layer: Layer, recipe: Recipe, dtypes: Mapping[str, torch.dtype]) -> dict[str, Quantised]:
    """Round the weights of experts with too few tokens to nearest, also in the layer; return them."""
    rounded = {}
    counts = expert_tokens(layer)
    for name, expert in layer.experts.items():
        w = expert.of(layer.module)
        if too_few_tokens(counts[expert.slice], w):
            rounded[name] = round_to_nearest(w, recipe, dtypes[name])
            w.copy_(rounded[name].values())
    layer.rounded |= rounded.keys()
    return rounded


def _stacks(layer: Layer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the stacks of the layer's experts with these values of some weights."""
    pieces: dict[str, dict[int, dict[int, Tensor]]] = {}
    for name, expert in layer.experts.items():
        if name in values:
            pieces.setdefault(expert.stack, {}).setdefault(expert.expert, {})[expert.row] = values[name]
    out = {}
    for stack, experts in pieces.items():
        whole = layer.module.get_parameter(stack).data
        out[stack] = torch.stack([_replaced(x, experts.get(e, {})) for e, x in enumerate(whole)])
    return out


def _replaced(whole: Tensor, rows: Mapping[int, Tensor]) -> Tensor:
    """Return a matrix with other values of some runs of rows, by the first row of each."""
    parts, end = [], 0
    for row, x in sorted(rows.items()):
        parts += [whole[end:row], x]
        end = row + len(x)
    return torch.cat([*parts, whole[end:]])
