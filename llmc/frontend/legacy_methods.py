"""Replacements for methods of transformers' modules that cannot be traced.

The original methods make tensors of Python numbers, which have no values on the meta device; depend on the number of
tokens; or compute attention, or a recurrence, in elementary ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from llmc.frontend.attention_interface import MaskTag


def patch(model: torch.nn.Module) -> None:
    """Replace the methods of the modules whose class is in the table."""
    for module in model.modules():
        for name, make in METHODS.get(type(module).__name__, {}).items():
            setattr(module, name, make(module))


def _sparse(mlp: Any) -> Callable[[Tensor], Tensor]:
    """Return an activation: gates below a quantile of the normal distribution of their mean and deviation become 0."""
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


def _every_key(indexer: Any) -> Callable[..., MaskTag]:
    """Return a selector of all keys: no sequence has more than the index_topk that are selected (`config_limits`)."""
    return lambda *_, **__: MaskTag()


def _xglm_positions(module: Any) -> Callable[..., Tensor]:
    """Return a lookup of positions in a table that is as long as the longest sequence."""
    return lambda position_ids, *_: module.weights[position_ids + module.offset]


def _xglm_attention(module: Any) -> Callable[..., tuple[Tensor, None]]:
    """Return an attention whose queries are scaled before the product."""

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        projected = (p(hidden_states) for p in (module.q_proj, module.k_proj, module.v_proj))
        q, k, v = (x.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2) for x in projected)
        out = torch.ops.llmc.attention(q * module.scaling, k, v, module.layer_idx, 1.0, 0, 0.0, None)
        return module.out_proj(out.flatten(2)), None

    return forward


def _lightning(module: Any) -> Callable[..., tuple[Tensor, None]]:
    """Return a linear attention with a fixed rate of decay per head; query, key and value of a head are adjacent."""

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        heads, size = module.num_attention_heads, module.head_dim
        projected = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (heads, 3 * size))
        rates = module.slope_rate.float().flatten().expand(*hidden_states.shape[:2], heads)
        out = torch.ops.llmc.linear_recurrence(*projected.split(size, -1), -rates)
        gate = torch.sigmoid(module.output_gate(hidden_states))
        return module.out_proj(gate * module.norm(out.flatten(2))), None

    return forward


METHODS: Mapping[str, Mapping[str, Callable[[Any], Callable[..., Any]]]] = MappingProxyType(
    {
        "AXK2Indexer": {"forward": _every_key},
        "DeepseekV32Indexer": {"forward": _every_key},
        "GlmMoeDsaIndexer": {"forward": _every_key},
        "HYV4Indexer": {"forward": _every_key},
        "MiniMaxLightningAttention": {"forward": _lightning},
        "MiniMaxM3VLIndexer": {"forward": _every_key},
        "Gemma3nTextMLP": {"_gaussian_topk": _sparse},
        "XGLMAttention": {"forward": _xglm_attention},
        "XGLMSinusoidalPositionalEmbedding": {"forward": _xglm_positions},
    }
)
