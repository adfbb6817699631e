"""The tensors of a quantised weight as compressed-tensors stores them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmc.quant.make.rounding import Quantised


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes [n, k] of 4 or 8 bits along k into int32 words, least significant first, plus 2^(bits-1)."""
    raw = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    raw = pad(raw, (0, -codes.shape[1] % (32 // bits)))
    joined = raw[:, ::2] | raw[:, 1::2] << 4 if bits == 4 else raw
    flat = joined.reshape(-1).contiguous()  # a contiguous single row may have a stride that is not a multiple of a word
    return flat.view(torch.int32).reshape(len(joined), joined.shape[1] // 4)


def stored_parts(q: Quantised) -> dict[str, Tensor]:
    """Return the tensors of a weight by the last part of their names."""
    recipe = q.grid.recipe
    parts = {"weight_scale": q.grid.scale}
    if recipe.layout != "pack-quantized":
        return parts | {"weight": q.codes}
    parts |= {"weight_packed": pack(q.codes, recipe.bits), "weight_shape": torch.tensor(q.codes.shape)}
    if q.grid.zero is not None:
        parts["weight_zero_point"] = pack(q.grid.zero.T, recipe.bits).T.contiguous()
    return parts
