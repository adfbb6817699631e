"""Clips the range of each block of a weight where codes that lie closer to each other compute better products.

The range is shrunk in steps, as AutoAWQ shrinks it, and the step with the smallest error of each block's products is
kept: d G dT, where d is the error of a row of the block and G the part of the sum of x xT that its columns have.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmc.quant.make.recipes import Recipe
from llmc.quant.make.rounding import Grid, Quantised, block_sizes, extremes, grid_from

STEP, STEPS = 0.05, 10  # step, as a share of the largest |weight| of a block, and number of steps


@torch.no_grad()
def round_clipped(w: Tensor, gram: Tensor, recipe: Recipe, dtype: torch.dtype) -> Quantised:
    """Round a float32 weight [n, k] to nearest in blocks of one row, given the sum of x xT of its inputs [k, k].

    Scales are stored as `dtype`.
    """
    low, high = extremes(w, recipe)
    largest = torch.maximum(-low, high)
    sums = _diagonal_blocks(gram, block_sizes(recipe, (w.shape[0], w.shape[1]))[1])
    factors, lowest = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for step in range(STEPS):
        factor = 1 - step * STEP
        error = _errors(w, _grid(low, high, largest * factor, w, recipe, dtype), sums)
        better = error < lowest
        factors[better], lowest[better] = factor, error[better]
    grid = _grid(low, high, largest * factors, w, recipe, dtype)
    return Quantised(grid, grid.codes(w))


def _grid(low: Tensor, high: Tensor, limit: Tensor, w: Tensor, recipe: Recipe, dtype: torch.dtype) -> Grid:
    """Return the grid of ranges whose ends are at most `limit` away from 0."""
    shape = (w.shape[0], w.shape[1])
    return grid_from(torch.maximum(low, -limit), torch.minimum(high, limit), recipe, shape, dtype)


def _diagonal_blocks(gram: Tensor, size: int) -> Tensor:
    """Return the blocks of `size` columns on the diagonal of a matrix, [blocks, size, size]; zeros where it ends."""
    full = pad(gram, (0, -len(gram) % size, 0, -len(gram) % size))
    count = len(full) // size
    return full.view(count, size, count, size)[range(count), :, range(count)]


def _errors(w: Tensor, grid: Grid, sums: Tensor) -> Tensor:
    """Return the squared error of the products of each block, [n, blocks of k]."""
    d = grid.values(grid.codes(w)) - w
    blocks = pad(d, (0, -d.shape[1] % sums.shape[1])).view(len(d), len(sums), -1).transpose(0, 1)
    return ((blocks @ sums) * blocks).sum(-1).T
