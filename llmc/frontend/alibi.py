"""Model families whose attention has a bias by distance (ALiBi): they are traced as the op `alibi_attention`.

Their models hand a tensor of biases to each layer. Here, each attention module has the slopes of its heads as a buffer,
taken from transformers' own function, and its forward is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from llmc.diagnostics import Diagnostic

SLOPES = "alibi_slopes"  # buffer of an attention module: float32 [heads]
BLOOM_TRAINED_TOKENS = 2048  # tokens that BLOOM models were trained on, which their configs need not name

# Keys of MPT's attn_config that transformers ignores, and the values with which its model is the published one.
MPT_IGNORES: Mapping[str, Any] = MappingProxyType(
    {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False}
)


@dataclass(frozen=True)
class Family:
    """How the attention class of a model type computes: forward(module, hidden_states, ...), slopes(config) [heads]."""

    attention: str
    forward: Callable[..., tuple[Tensor, None]]
    slopes: Callable[[Any], Tensor]


def applies(config: Any) -> bool:
    """Whether a model of this config has ALiBi, in a form that is supported."""
    return config.model_type in FAMILIES and (config.model_type != "falcon" or bool(config.alibi))


def check_config(config: Any) -> None:
    """Raise Diagnostic E305 for an MPT whose attn_config sets an option that transformers ignores."""
    if config.model_type != "mpt":
        return
    for key, value in MPT_IGNORES.items():
        if (actual := getattr(config.attn_config, key)) != value:
            cause = f"config.json: attn_config.{key} is {actual!r}, which transformers' MPT ignores"
            raise Diagnostic("E305", cause, f"use a model with attn_config.{key}: {value!r}")


def limit(config: Any) -> int | None:
    """Return the maximum length of a sequence for families whose configs have a key of their own for it, else None."""
    if config.model_type == "mpt":
        return int(config.max_seq_len)
    if config.model_type == "bloom":
        return int(getattr(config, "seq_length", None) or BLOOM_TRAINED_TOKENS)
    return None


def patch(model: Any) -> Mapping[str, Tensor]:
    """Replace the forward of the attention modules of a model that has ALiBi; return the slopes by buffer name."""
    if not applies(model.config):
        return {}
    family = FAMILIES[model.config.model_type]
    slopes = family.slopes(model.config)
    computed = {}
    for path, module in model.named_modules():
        if family.attention in (base.__name__ for base in type(module).__mro__):
            module.register_buffer(SLOPES, torch.empty_like(slopes, device="meta"), persistent=False)
            module.forward = partial(family.forward, module)
            computed[f"{path}.{SLOPES}"] = slopes
        elif hasattr(module, "use_alibi"):
            module.use_alibi = False  # Falcon would add the biases to its mask
    return computed


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of q, k, v [1, T, heads, D] -> [1, T, heads * D]."""
    heads_first = [x.transpose(1, 2) for x in (query, key, value)]
    out = torch.ops.llmc.alibi_attention(*heads_first, getattr(module, SLOPES), module.layer_idx, scale)
    return out.flatten(2)


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    fused = module.query_key_value(hidden_states)
    q, k, v = fused.view(*fused.shape[:2], module.num_heads, 3, module.head_dim).unbind(3)
    return residual + module.dense(_attention(module, q, k, v, module.inv_norm_factor)), None


def _falcon(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    q, k, v = module._split_heads(module.query_key_value(hidden_states))
    return module.dense(_attention(module, q, k, v, module.inv_norm_factor)), None


def _mpt(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = fused.view(*fused.shape[:2], 3, module.n_heads, module.head_dim).unbind(2)
    return module.out_proj(_attention(module, q, k, v, module.softmax_scale)), None


def _slopes(config: Any) -> Tensor:
    """Return the slopes, which are the biases at position 1."""
    return build_alibi_tensor(torch.ones(1, 2), config.num_attention_heads, torch.float32)[:, 0, 1]


def _falcon_slopes(config: Any) -> Tensor:
    """Return the slopes of Falcon, which scales logits together with their biases."""
    return _slopes(config) / (config.hidden_size // config.num_attention_heads) ** 0.5


def _mpt_slopes(config: Any) -> Tensor:
    """Return the slopes of MPT, which counts positions from the last one, 0, back to -1."""
    return -build_mpt_alibi_tensor(config.num_attention_heads, 2)[:, 0, 0]


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bloom": Family("BloomAttention", _bloom, _slopes),
        "falcon": Family("FalconAttention", _falcon, _falcon_slopes),
        "mpt": Family("MptAttention", _mpt, _mpt_slopes),
    }
)
