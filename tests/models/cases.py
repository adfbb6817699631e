"""Small random configurations of real architectures: data for the parity tests, one row each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from draw import SEED

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """An architecture with a config. lengths: of the sequences that are packed into one flat batch.

    attention: transformers' implementation to compare with. Falcon's eager one adds ALiBi twice.
    """

    name: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (21, 16)
    trace: dict[str, Any] = field(default_factory=dict)
    attention: str = "eager"


def rope(kind: str, **kw: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **kw}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LONG = rope(
    "longrope",
    factor=4.0,
    original_max_position_embeddings=64,
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[2.0 + 0.5 * i for i in range(8)],
)
# As Phi-3.5-MoE is published: two factors of the tables, which differ from the one that longrope computes.
MSCALES = rope(
    "longrope",
    original_max_position_embeddings=64,
    short_factor=[1.0 + 0.1 * i for i in range(8)],
    long_factor=[2.0 + 0.5 * i for i in range(8)],
    short_mscale=1.24,
    long_mscale=1.3,
)

GPT = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# Keys and values from a latent; keys are wider than values.
MLA = SMALL | {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
MLA_EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}

# Of a model that reads images, the language model is compiled.
TINY_VISION = {
    "mm_tokens_per_image": 4,
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
}

# Of some, rotary tables have axes of time, height and width, and the vision tower counts its layers as its depth.
SEEN = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64, "patch_size": 14}


def axes(*sections: int, **kw: Any) -> dict[str, Any]:
    """Rotary parameters of which each axis has some of the frequencies."""
    return rope("default", mrope_section=list(sections), **kw)


# The architectures that must agree.
LISTED = (
    Case("llama", "llama", SMALL | LLAMA3, (77, 20)),
    Case("llama-tied", "llama", SMALL | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    Case("qwen2", "qwen2", SMALL),
    Case("qwen3", "qwen3", SMALL | {"head_dim": 24}),
    Case("mistral", "mistral", SMALL | {"sliding_window": 8}),
    Case("gemma2", "gemma2", SMALL | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 20}),
    Case("gpt2", "gpt2", GPT | {"eos_token_id": 2}),
)

# Others that come by data alone.
UNLISTED = (
    Case("qwen2-window", "qwen2", SMALL | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    Case("phi3", "phi3", SMALL),
    Case("olmo2", "olmo2", SMALL),
    Case("gpt_neox", "gpt_neox", SMALL | {"rotary_pct": 0.5}),
    Case("gpt_neox-serial", "gpt_neox", SMALL | {"use_parallel_residual": False}),
    Case("stablelm", "stablelm", SMALL | {"qk_layernorm": False}),
    Case(
        "granite",
        "granite",
        SMALL
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.5},
    ),
    Case("smollm3", "smollm3", SMALL | {"no_rope_layers": [1, 0]}),
    Case("starcoder2", "starcoder2", SMALL | {"sliding_window": 8}),
    Case("cohere", "cohere", SMALL),
    Case("glm4", "glm4", SMALL | {"head_dim": 16}),
    Case("gemma", "gemma", SMALL | {"head_dim": 16}),
    Case("gemma3_text", "gemma3_text", SMALL | {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 8}),
    Case("gemma3", "gemma3", {"text_config": SMALL | {"head_dim": 16, "sliding_window": 8}, **TINY_VISION}),
    Case("phi", "phi", SMALL),
    Case(
        "opt",
        "opt",
        {
            "vocab_size": 320,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 64,
        },
    ),
    *(
        Case(name, name, SMALL | {"head_dim": 16})
        for name in (
            "olmo",
            "glm",
            "nemotron",
            "persimmon",
            "ernie4_5",
            "hunyuan_v1_dense",
            "helium",
            "seed_oss",
            "arcee",
            "apertus",
            "ministral3",
        )
    ),
    *(Case(name, name, SMALL | {"head_dim": 16, "sliding_window": 8}) for name in ("cohere2", "exaone4", "olmo3")),
    Case("gpt_bigcode", "gpt_bigcode", GPT),
    Case("biogpt", "biogpt", SMALL),
    Case("mixtral", "mixtral", SMALL | {"num_local_experts": 4}),
    Case("granitemoe", "granitemoe", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Case("phimoe", "phimoe", SMALL | {"num_local_experts": 4}),
    Case("olmoe", "olmoe", SMALL | {"num_experts": 4, "num_experts_per_tok": 2}),
    Case("diffllama", "diffllama", SMALL),
    *(Case(name, name, MLA) for name in ("minicpm3", "youtu")),
    *(Case(name, name, MLA | EXPERTS | MLA_EXPERTS) for name in ("deepseek_v3", "glm4_moe_lite")),
    Case("afmoe", "afmoe", SMALL | EXPERTS | {"head_dim": 16, "sliding_window": 8, "num_dense_layers": 1}),
    Case(
        "gemma4_text",
        "gemma4_text",
        SMALL
        | {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_kv_shared_layers": 0,
            "sliding_window": 8,
        }
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320},
    ),
    Case("gpt_oss", "gpt_oss", SMALL | {"head_dim": 16, "num_local_experts": 4, "sliding_window": 8}),
    Case(
        "qwen3_moe",
        "qwen3_moe",
        SMALL | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
)

# Families that nobody had tried when the front end was written, and what came of them: data alone, of which the parity
# tests draw some, the table in docs/parity.md all.
ORIGINAL = {"original_max_position_embeddings": 64}
YARN = rope("yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.7)
FALCON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
SPARSE = {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 16, "mlp_layer_types": ["dense", "sparse"]}
XGLM = {
    "vocab_size": 320, "d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip
ARIA = SMALL | {"moe_num_experts": 4, "moe_topk": 2}
ARIA_VISION = TINY_VISION["vision_config"] | {"model_type": "idefics3_vision"}
CLIPPED = {"clip_qkv": 0.5, "softmax_scale": 0.2}
MPT = {"vocab_size": 320, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}
ROUTED = EXPERTS | {"num_local_experts": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
WINDOWED = SMALL | {"head_dim": 16, "sliding_window": 8}
# Layers that rotate and attend in chunks, and layers that do neither and scale queries by their positions.
LLAMA4 = SMALL | {
    "head_dim": 24,
    "intermediate_size": 24,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 64,
    "floor_scale": 8,
}
# Experts for text, and experts for images that no text reaches.
ERNIE = SMALL | axes(3, 3, 2) | {
    "head_dim": 16, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [24, 12], "moe_num_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
HEARS = {"hidden_size": 16, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2, "vocab_size": 8}
GEMMA3N = SMALL | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.6, 0.6, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
    "laurel_rank": 8,
    "final_logit_softcapping": 30.0,
}
FURTHER = (
    *(
        Case(name, name, WINDOWED)
        for name in (
            "cwm",
            "gemma4_unified_text",
            "granite_swa",
            "hrm_text",
            "hyperclovax",
            "jais2",
            "ministral",
            "modernbert-decoder",
            "nanochat",
            "vaultgemma",
        )
    ),
    *(
        Case(name, name, WINDOWED | ROUTED)
        for name in (
            "cohere2_moe",
            "ernie4_5_moe",
            "exaone_moe",
            "flex_olmo",
            "glm4_moe",
            "granitemoe_swa",
            "granitemoeshared",
            "hunyuan_v1_moe",
            "hy_v3",
            "laguna",
            "mellum",
            "minimax_m2",
            "minimax_m3_vl_text",
            "qwen2_moe",
            "solar_open",
        )
    ),
    Case("axk1", "axk1", MLA | EXPERTS | MLA_EXPERTS | {"n_routed_experts": 4}),
    Case(
        "dots1",
        "dots1",
        SMALL | ROUTED | {"n_shared_experts": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1},
    ),
    Case("mimo_v2_flash", "mimo_v2_flash", WINDOWED | ROUTED | {"v_head_dim": 12}),
    Case("deepseek_v2", "deepseek_v2", MLA | EXPERTS | MLA_EXPERTS | {"topk_method": "greedy"}),
    Case("falcon", "falcon", FALCON),
    Case("falcon-new", "falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    Case("gptj", "gptj", GPT | {"rotary_dim": 8}),
    Case("gpt-sw3", "gpt-sw3", GPT),
    Case(
        "gpt_neo",
        "gpt_neo",
        FALCON
        | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8}
        | {"intermediate_size": 96},
    ),
    Case("gpt_neox_japanese", "gpt_neox_japanese", FALCON | {"intermediate_multiple_size": 2}),
    Case("codegen", "codegen", GPT | {"n_ctx": 256, "rotary_dim": 8}),
    Case("bitnet", "bitnet", SMALL),
    Case("ctrl", "ctrl", {"vocab_size": 320, "n_embd": 64, "dff": 96, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    Case("phi3-longrope-short", "phi3", SMALL | LONG | ORIGINAL, (37,), {"max_positions": 64}),
    Case("phi3-longrope-long", "phi3", SMALL | LONG | ORIGINAL, (77,), {"max_positions": 256}),
    Case("deepseek_v3-yarn", "deepseek_v3", MLA | EXPERTS | MLA_EXPERTS | YARN, (77,)),
    Case(
        "granitemoehybrid",
        "granitemoehybrid",
        SMALL
        | {"layer_types": ["attention", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "num_local_experts": 0}
        | {"shared_intermediate_size": 96, "position_embedding_type": "rope"},
    ),
    Case("gpt_oss-yarn", "gpt_oss", WINDOWED | {"num_local_experts": 4} | YARN, (77,)),
    Case("fuyu", "fuyu", {"text_config": SMALL | {"model_type": "persimmon"}}),
    Case("gemma3n_text", "gemma3n_text", GEMMA3N),
    Case("gemma3n", "gemma3n", {"text_config": GEMMA3N, "vision_config": {"hidden_size": 16}, "audio_config": HEARS}),
    Case(
        "mistral3",
        "mistral3",
        {"text_config": SMALL | {"model_type": "mistral", "head_dim": 24, "sliding_window": None}, **TINY_VISION},
    ),
    Case("internvl", "internvl", {"text_config": SMALL | {"model_type": "qwen3", "head_dim": 24}, **TINY_VISION}),
    Case("llava", "llava", {"text_config": SMALL | {"model_type": "llama"} | LLAMA3, **TINY_VISION}),
    Case("qwen2_vl", "qwen2_vl", {"text_config": SMALL | axes(4, 2, 2), "vision_config": SEEN | {"embed_dim": 16}}),
    Case("qwen2_5_vl", "qwen2_5_vl", {"text_config": SMALL | axes(4, 2, 2), "vision_config": SEEN}),
    Case("qwen3_vl", "qwen3_vl", {"text_config": SMALL | {"head_dim": 24} | axes(4, 4, 4), "vision_config": SEEN}),
    Case(
        "qwen3_vl_moe",
        "qwen3_vl_moe",
        {"text_config": SMALL | EXPERTS | {"head_dim": 16} | axes(4, 2, 2), "vision_config": SEEN},
    ),
    Case(
        "glm4v",
        "glm4v",
        {"text_config": SMALL | axes(2, 1, 1, partial_rotary_factor=0.5), "vision_config": SEEN},
    ),
    Case(
        "glm4v_moe",
        "glm4v_moe",
        {
            "text_config": SMALL
            | ROUTED
            | {"head_dim": 16, "first_k_dense_replace": 1}
            | axes(2, 1, 1, partial_rotary_factor=0.5),
            "vision_config": SEEN,
        },
    ),
    Case("ernie4_5_vl_moe", "ernie4_5_vl_moe", {"text_config": ERNIE, "vision_config": SEEN}),
    Case("llama4_text", "llama4_text", LLAMA4, trace={"max_positions": 64}),
    Case(
        "llama4",
        "llama4",
        {"text_config": LLAMA4 | {"num_experts_per_tok": 2}, **TINY_VISION},
        trace={"max_positions": 64},
    ),
    Case("xglm", "xglm", XGLM),
    Case("aria_text", "aria_text", ARIA | {"head_dim": 16}),
    Case("aria", "aria", {"text_config": ARIA | {"model_type": "aria_text"}, "vision_config": ARIA_VISION}),
    *(Case(name, name, MLA | EXPERTS | MLA_EXPERTS | SPARSE) for name in ("deepseek_v32", "glm_moe_dsa", "axk2")),
    Case("bloom", "bloom", {"vocab_size": 320, "hidden_size": 60, "n_layer": 2, "n_head": 6}),
    Case("mpt", "mpt", MPT),
    Case("mpt-clipped", "mpt", MPT | {"n_heads": 6, "d_model": 48, "attn_config": CLIPPED}),
    Case("falcon-alibi", "falcon", FALCON | {"alibi": True, "multi_query": False}, attention="sdpa"),
    Case("falcon-alibi-one-key", "falcon", FALCON | {"alibi": True, "parallel_attn": False}, attention="sdpa"),
    Case(
        "dbrx",
        "dbrx",
        {
            "vocab_size": 320,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.3, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
)

# Rope types, on llama. longrope's two sets of frequencies: short while max_positions fits the original length.
ROPES = (
    Case("rope-linear", "llama", SMALL | rope("linear", factor=4.0), (77,)),
    Case("rope-dynamic", "llama", SMALL | rope("dynamic", factor=4.0), (77,)),
    Case("rope-yarn", "llama", SMALL | rope("yarn", factor=8.0, original_max_position_embeddings=32), (77,)),
    Case("rope-longrope-short", "llama", SMALL | LONG, (37,), {"max_positions": 64}),
    Case("rope-longrope-long", "llama", SMALL | LONG, (77,), {"max_positions": 256}),
    Case("rope-phimoe", "phimoe", SMALL | {"num_local_experts": 4} | MSCALES, (37,), {"max_positions": 64}),
)


def further(count: int) -> Sequence[Case]:
    """Return some of the further families, drawn from the run's seed."""
    return Random(SEED).sample(FURTHER, count)


def sample(count: int, without: str = "") -> Sequence[Case]:
    """Return some of the cases that are not listed, drawn from the run's seed, without one of them."""
    return Random(SEED).sample([c for c in UNLISTED + ROPES if c.name != without], count)
