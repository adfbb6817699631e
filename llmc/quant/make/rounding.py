"""Rounding to nearest: scales and zero points from the range of each block of weights, then codes from those.

The scales equal those of compressed-tensors, bit for bit. Quotients are computed in float32; its tools divide in the
model's dtype, so their codes may be farther from the weights, but never nearer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmc.diagnostics import Diagnostic
from llmc.quant.make.recipes import Recipe


@dataclass(frozen=True)
class Grid:
    """The values that codes of a weight [n, k] can have: (code - zero) * scale.

    scale: [blocks of n, blocks of k], in the dtype in which it is stored. zero: int8 of the same shape, or None.
    """

    recipe: Recipe
    shape: tuple[int, int]
    scale: Tensor
    zero: Tensor | None = None

    def spread(self, x: Tensor) -> Tensor:
        """Return a value of each weight in float32, given one of each block."""
        rows, columns = block_sizes(self.recipe, self.shape)
        wide = x.float().repeat_interleave(rows, 0)[: self.shape[0]]
        return wide.repeat_interleave(columns, 1)[:, : self.shape[1]]

    def codes(self, w: Tensor) -> Tensor:
        """Return the nearest codes, int8 or float8_e4m3."""
        lo, hi = self.recipe.range
        x = w / self.spread(self.scale)
        if self.recipe.code == "float":
            return x.clamp(lo, hi).to(torch.float8_e4m3fn)
        x = x if self.zero is None else x + self.spread(self.zero)
        return x.round().clamp(lo, hi).to(torch.int8)

    def values(self, codes: Tensor) -> Tensor:
        """Return the values of codes in float32."""
        x = codes.float() if self.zero is None else codes.float() - self.spread(self.zero)
        return x * self.spread(self.scale)


@dataclass(frozen=True)
class Quantised:
    """A quantised weight: codes on a grid."""

    grid: Grid
    codes: Tensor

    def values(self) -> Tensor:
        """Return the dequantised weight in float32."""
        return self.grid.values(self.codes)


def block_sizes(recipe: Recipe, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of a block in a weight of this shape."""
    return recipe.block[0] or shape[0], recipe.block[1] or shape[1]


def extremes(w: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each block, widened to contain 0."""
    n, k = w.shape
    rows, columns = block_sizes(recipe, (n, k))
    full = pad(w, (0, -k % columns, 0, -n % rows))
    blocks = full.reshape(full.shape[0] // rows, rows, full.shape[1] // columns, columns)
    return blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)


def grid_of(w: Tensor, recipe: Recipe, dtype: torch.dtype) -> Grid:
    """Return the grid that covers the range of each block of `w`, a float32 weight [n, k]; scales are `dtype`."""
    return grid_from(*extremes(w, recipe), recipe, (w.shape[0], w.shape[1]), dtype)


def grid_from(low: Tensor, high: Tensor, recipe: Recipe, shape: tuple[int, int], dtype: torch.dtype) -> Grid:
    """Return the grid that covers [low, high] in each block."""
    first, last = recipe.range
    if recipe.symmetric:
        return Grid(recipe, shape, _stored(torch.maximum(-low, high) / ((last - first) / 2), dtype))
    scale = _stored((high - low) / (last - first), dtype)
    zero = (first - low / scale.float()).round().clamp(first, last)
    return Grid(recipe, shape, scale, zero.to(torch.int8))


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to the stored dtype. A block of zeros takes its epsilon, as compressed-tensors does."""
    rounded = scale.to(dtype)
    return torch.where(rounded == 0, torch.tensor(torch.finfo(dtype).eps, dtype=dtype), rounded)


def round_to_nearest(w: Tensor, recipe: Recipe, dtype: torch.dtype) -> Quantised:
    """Quantise a float32 weight [n, k]; scales are stored as `dtype`."""
    grid = grid_of(w, recipe, dtype)
    return Quantised(grid, grid.codes(w))


def finite(name: str, w: Tensor) -> Tensor:
    """Return a weight; raises Diagnostic E350 if it has values that are not finite."""
    if not w.isfinite().all():
        raise Diagnostic("E350", f"{name} has values that are NaN or infinite", "download the checkpoint again")
    return w
