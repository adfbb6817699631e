"""Finds the scales of a KV cache of 8-bit floats: the largest key and value of each layer and KV head over texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache

from llmc.diagnostics import Diagnostic
from llmc.quant.make.recipes import BY_HEAD, F8_LARGEST


class KvRanges(DynamicCache):
    """Replaces a layer's KV cache: it returns keys and values to attention unchanged, and records the largest |x|.

    path: name of the attention module in the layer, "" until one has stored something. largest: of keys and of values,
    [KV heads] each.
    """

    def __init__(self) -> None:
        """Start with no ranges."""
        super().__init__()
        self.path = ""
        self.largest: tuple[Tensor, Tensor] | None = None
        self._inside = ""

    def watch(self, layer: Module) -> list[Any]:
        """Follow which module of the layer runs; return the hooks, to be removed."""
        modules = [(n, m) for n, m in layer.named_modules() if n and list(m.children())]
        return [m.register_forward_pre_hook(lambda _, args, n=n: self._enter(n)) for n, m in modules]

    def _enter(self, name: str) -> None:
        self._inside = name

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Take keys and values, [1, KV heads, T, size], and return them unchanged."""
        new = key_states.abs().amax((0, 2, 3)), value_states.abs().amax((0, 2, 3))
        old = self.largest or new
        self.largest = torch.maximum(old[0], new[0]), torch.maximum(old[1], new[1])
        self.path = self._inside
        return key_states, value_states

    def scales(self, layer: str, kind: str) -> dict[str, Tensor]:
        """Return `k_scale` and `v_scale` in float32, as compressed-tensors shapes them; {} if nothing was stored.

        kind: "layer" for one scale, "head" for one of each KV head. The scale is 1 if all values are zero. Raises
        Diagnostic E355 if keys or values are not finite.
        """
        scales = {}
        for name, operand, largest in zip(("k", "v"), ("keys", "values"), self.largest or (), strict=False):
            if not largest.isfinite().all():
                cause = f"{operand} of {layer}.{self.path} are not finite while the texts run"
                raise Diagnostic("E355", cause, "download the checkpoint again, or use other texts")
            top = largest[:, None, None] if kind == BY_HEAD else largest.max().reshape(1)
            scales[f"{name}_scale"] = torch.where(top > 0, top.float() / F8_LARGEST, 1.0)
        return scales
