"""GPTQ (arXiv 2210.17323): rounds a weight column by column, and adjusts the remaining columns to offset each error.

The scales of all groups are computed from the original weight. Columns are rounded in descending order of the energy of
their inputs. Groups remain consecutive columns, so that a checkpoint needs no g_idx.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmc.diagnostics import Diagnostic
from llmc.quant.make.recipes import Recipe
from llmc.quant.make.rounding import Quantised, grid_of

BLOCK_COLUMNS = 128  # columns whose errors are collected before the rest is corrected
DAMP = 0.01  # damping, as a share of the mean of the diagonal


def gptq(w: Tensor, gram: Tensor, recipe: Recipe, dtype: torch.dtype, name: str) -> Quantised:
    """Quantise a float32 weight [n, k], given the sum of x xT of its inputs; scales are stored as `dtype`."""
    grid = grid_of(w, recipe, dtype)
    diagonal = gram.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True)
    scale = grid.spread(grid.scale)[:, order]
    zero = torch.zeros_like(scale) if grid.zero is None else grid.spread(grid.zero)[:, order]
    factor = _factor(gram[order][:, order], name)
    rest = w[:, order].clone()
    codes = torch.empty_like(rest)
    lo, hi = recipe.range
    for begin in range(0, w.shape[1], BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, w.shape[1])
        errors = torch.empty(len(w), end - begin)
        for j in range(begin, end):
            column = rest[:, j]
            codes[:, j] = (column / scale[:, j] + zero[:, j]).round().clamp(lo, hi)
            error = (column - (codes[:, j] - zero[:, j]) * scale[:, j]) / factor[j, j]
            rest[:, j:end] -= error[:, None] * factor[j, j:end]
            errors[:, j - begin] = error
        rest[:, end:] -= errors @ factor[begin:end, end:]
    in_order = torch.empty_like(codes)
    in_order[:, order] = codes
    return Quantised(grid, in_order.to(torch.int8))


def _factor(gram: Tensor, name: str) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped matrix; raises Diagnostic E355 if there is none."""
    mean = gram.diagonal().mean()
    damp = DAMP
    while damp < 1 and mean.isfinite() and mean > 0:
        lower, failed = torch.linalg.cholesky_ex(gram + torch.eye(len(gram)) * (damp * mean))
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damp *= 10
    cause = f"the inputs of {name} are zero, not finite or too alike to calibrate it"
    raise Diagnostic("E355", cause, "use more and more varied text, or --ignore this module")
