"""Families with recurrent layers: data for the parity tests, one row each."""

from __future__ import annotations

from typing import Any

from models.cases import EXPERTS, SMALL, Case

GDN: dict[str, Any] = SMALL | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}
GDN_EXPERTS = GDN | EXPERTS | {"shared_expert_intermediate_size": 24}
CONV: dict[str, Any] = SMALL | {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}

RECURRENT = (
    Case("qwen3_next", "qwen3_next", GDN_EXPERTS, (70, 1, 13)),
    Case("qwen3_5_text", "qwen3_5_text", GDN, (3, 66)),
    Case("qwen3_5_moe_text", "qwen3_5_moe_text", GDN_EXPERTS, (21, 2, 16)),
    Case("olmo_hybrid", "olmo_hybrid", GDN, (21, 16)),
    Case("olmo_hybrid-signs", "olmo_hybrid", GDN | {"linear_allow_neg_eigval": True}, (21, 16)),
    Case("lfm2", "lfm2", CONV, (2, 21, 1)),
    Case("lfm2-bias", "lfm2", CONV | {"conv_bias": True}, (21, 16)),
    Case("lfm2_moe", "lfm2_moe", CONV | EXPERTS | {"num_dense_layers": 1}, (21, 16)),
)
