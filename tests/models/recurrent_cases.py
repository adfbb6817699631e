"""Families with recurrent layers: data for the parity tests, one row each."""

from __future__ import annotations

from typing import Any

from models.cases import EXPERTS, MLA, SEEN, SMALL, TINY_VISION, Case

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
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_expand": 2}
BAMBA = SMALL | MAMBA2 | {"num_hidden_layers": 3, "attn_layer_indices": [1]}
GRANITE = SMALL | MAMBA2 | {
    "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
    "shared_intermediate_size": 96,
}  # fmt: skip
NEMOTRON = SMALL | {
    "num_hidden_layers": 4, "hybrid_override_pattern": "M-*M", "mamba_num_heads": 8, "mamba_head_dim": 16,
    "ssm_state_size": 12, "n_groups": 2, "head_dim": 16,
}  # fmt: skip
NEMOTRON_EXPERTS = NEMOTRON | {
    "hybrid_override_pattern": "MEM*EM-", "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
ZAMBA2 = SMALL | {
    "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_ngroups": 2,
    "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_d_state": 12, "num_key_value_heads": 4, "num_mem_blocks": 1,
    "attention_head_dim": 32,
}  # fmt: skip
# As the larger ones are published: the shared attention rotates, and each of its uses has an adapter.
ROTATED = {"use_mem_rope": True, "use_shared_attention_adapter": True, "adapter_rank": 8}

LIGHTNING = SMALL | EXPERTS | {
    "num_hidden_layers": 4, "block_size": 8, "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
JAMBA = SMALL | {
    "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
    "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 12, "mamba_dt_rank": 8,
}  # fmt: skip
KIMI = MLA | {
    "q_lora_rank": None, "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 24, "linear_head_dim": 12, "linear_num_heads": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip

RECURRENT = (
    Case("qwen3_next", "qwen3_next", GDN_EXPERTS, (70, 1, 13)),
    Case("qwen3_5_text", "qwen3_5_text", GDN, (3, 66)),
    Case("qwen3_5_moe_text", "qwen3_5_moe_text", GDN_EXPERTS, (21, 2, 16)),
    Case("qwen3_5", "qwen3_5", {"text_config": GDN, "vision_config": SEEN}, (3, 36)),
    Case("qwen3_5_moe", "qwen3_5_moe", {"text_config": GDN_EXPERTS, "vision_config": SEEN}, (3, 36)),
    Case("olmo_hybrid", "olmo_hybrid", GDN, (21, 16)),
    Case("olmo_hybrid-signs", "olmo_hybrid", GDN | {"linear_allow_neg_eigval": True}, (21, 16)),
    Case("lfm2", "lfm2", CONV, (2, 21, 1)),
    Case("lfm2-bias", "lfm2", CONV | {"conv_bias": True}, (21, 16)),
    Case("lfm2_moe", "lfm2_moe", CONV | EXPERTS | {"num_dense_layers": 1}, (21, 16)),
    Case("lfm2_vl", "lfm2_vl", {"text_config": CONV | {"model_type": "lfm2"}, **TINY_VISION}, (21, 16)),
    Case("bamba", "bamba", BAMBA, (21, 16)),
    Case("falcon_h1", "falcon_h1", SMALL | MAMBA2 | {"mamba_d_ssm": 128}, (21, 16)),
    Case("granitemoehybrid-mamba", "granitemoehybrid", GRANITE, (21, 16)),
    Case("nemotron_h", "nemotron_h", NEMOTRON, (21, 16)),
    Case("nemotron_h-experts", "nemotron_h", NEMOTRON_EXPERTS, (21, 16)),
    Case("nemotron_h-latent", "nemotron_h", NEMOTRON_EXPERTS | {"moe_latent_size": 32}, (21, 16)),
    Case("zamba2", "zamba2", ZAMBA2, (21, 16)),
    Case("zamba2-rope", "zamba2", ZAMBA2 | ROTATED, (21, 16)),
    Case("minimax", "minimax", LIGHTNING, (21, 16)),
    Case("kimi_linear", "kimi_linear", KIMI, (70, 1, 13)),
    Case("jamba", "jamba", JAMBA, (21, 16)),
)
