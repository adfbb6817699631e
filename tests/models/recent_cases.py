"""Further families, which the front end compiles by general rules or by one row of a table: data for the parity tests.

Most read images or audio; of these, the language half is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from draw import SEED
from models.cases import (
    EXPERTS,
    MLA,
    MLA_EXPERTS,
    ROUTED,
    SEEN,
    SMALL,
    SPARSE,
    TINY_VISION,
    UNLISTED,
    WINDOWED,
    Case,
    axes,
)

VISION: dict[str, Any] = TINY_VISION["vision_config"]
LATENT = MLA | EXPERTS | MLA_EXPERTS
AUDIO = {
    "d_model": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 64,
    "downsample_hidden_size": 8,
}  # fmt: skip
SAM = VISION | {"mlp_dim": 16, "output_channels": 16}
GEMMA4 = next(c for c in UNLISTED if c.name == "gemma4_text").config
GEMMA4_VISION = VISION | {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8}
# Rotary parameters of each kind of layer, with axes whose frequencies are stored in another order.
COMPASS = SMALL | {
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), axes(3, 3, 2)["rope_parameters"]),
}
# Sparse attention that selects blocks of keys.
BLOCKS = {
    "layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 8, "index_topk_blocks": 8,
    "index_n_heads": 2, "index_head_dim": 8,
}  # fmt: skip
STEP = {"swiglu_limits": [0.0, 0.5], "mlp_layer_types": ["dense", "sparse"]}
# Two of five experts return what they read.
LONGCAT = {
    "num_layers": 1, "expert_ffn_hidden_size": 24, "ffn_hidden_size": 48, "n_routed_experts": 3, "zero_expert_num": 2,
    "moe_topk": 3,
}  # fmt: skip
CONFORMER = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "dim_head": 8, "output_dim": 8, "input_dim": 8}
GRANITE_SPEECH = {
    "text_config": SMALL | {"model_type": "granite"},
    "encoder_config": CONFORMER,
    "projector_config": {
        "model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "encoder_hidden_size": 16,
    },
}  # fmt: skip
# Its forward takes positions among other keyword arguments only.
SOUND_CODES = {"num_filters": 8, "depths": [1, 1], "downsampling_ratios": [2]}
VIBEVOICE = {
    "text_config": SMALL,
    "acoustic_tokenizer_encoder_config": SOUND_CODES,
    "semantic_tokenizer_encoder_config": SOUND_CODES,
}
LAYERS_THAT_SEE = SMALL | {"num_hidden_layers": 3, "cross_attention_layers": [1]}
MLLAMA_VISION = {
    "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 16, "intermediate_layers_indices": [0],
}  # fmt: skip
EMU3_IMAGES = {
    "base_channels": 32, "embed_dim": 8, "num_res_blocks": 1, "attn_resolutions": [], "codebook_size": 16,
    "channel_multiplier": [1, 1],
}  # fmt: skip
HUNYUAN = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 1.0, "alpha": 1e3, "mrope_section": [2, 2, 2, 2]}
PERCEIVED = {
    "model_args": {"embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": (28, 28), "ref_feat_shape": (2, 2)}
}
PHI4_AUDIO = {
    "hidden_size": 16, "num_blocks": 1, "num_attention_heads": 2, "intermediate_size": 16, "ext_pw_out_channel": 16,
    "nemo_conv_channels": 16,
}  # fmt: skip
OCR2_VISION = {"sam_config": SAM | {"downsample_channels": [16, 16]}, "encoder_config": SMALL | {"hidden_size": 16}}

RECENT = (
    *(
        Case(name, name, {"text_config": SMALL, **TINY_VISION})
        for name in (
            "aya_vision",
            "cohere2_vision",
            "deepseek_vl",
            "exaone4_5",
            "fast_vlm",
            "gemma4_unified",
            "got_ocr2",
            "idefics2",
            "idefics3",
            "janus",
            "lighton_ocr",
            "llava_next",
            "llava_next_video",
            "llava_onevision",
            "muse_glimmer",
            "ovis2",
            "pp_chart2table",
            "qianfan_ocr",
            "smolvlm",
            "video_llava",
            "vipllava",
        )
    ),
    *(
        Case(name, name, {"text_config": SMALL | {"head_dim": 16} | axes(2, 3, 3), "vision_config": SEEN})
        for name in ("cosmos3_edge", "glm46v", "glm_ocr", "glmga", "paddleocr_vl")
    ),
    Case("cohere_compass_text", "cohere_compass_text", COMPASS),
    Case(
        "deepseek_ocr2",
        "deepseek_ocr2",
        {"text_config": SMALL | ROUTED | {"mlp_layer_types": ["dense", "sparse"]}, "vision_config": OCR2_VISION},
    ),
    Case(
        "deepseek_vl_hybrid", "deepseek_vl_hybrid", {"text_config": SMALL, "high_res_vision_config": SAM, **TINY_VISION}
    ),
    Case(
        "emu3",
        "emu3",
        {"text_config": SMALL, "vq_config": EMU3_IMAGES, "vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    ),
    Case("gemma4", "gemma4", {"text_config": GEMMA4, "vision_config": GEMMA4_VISION}),
    Case(
        "hunyuan_vl",
        "hunyuan_vl",
        {"text_config": SMALL | {"head_dim": 16, "rope_parameters": HUNYUAN}, "vision_config": SEEN},
    ),
    Case("hy_v4", "hy_v4", LATENT | SPARSE, trace={"max_positions": 64}),
    Case("kimi_k25", "kimi_k25", {"text_config": LATENT | {"model_type": "deepseek_v3"}, "vision_config": VISION}),
    Case("longcat_flash", "longcat_flash", MLA | LONGCAT),
    Case("minimax_m3-sparse", "minimax_m3_vl_text", WINDOWED | ROUTED | BLOCKS, trace={"max_positions": 64}),
    Case(
        "minimax_m3_vl",
        "minimax_m3_vl",
        {"text_config": WINDOWED | ROUTED | BLOCKS, **TINY_VISION},
        trace={"max_positions": 64},
    ),
    Case("mistral4", "mistral4", LATENT),
    Case("mllama", "mllama", {"text_config": LAYERS_THAT_SEE, "vision_config": VISION | MLLAMA_VISION}),
    Case("openai-gpt", "openai-gpt", {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    Case("perception_lm", "perception_lm", {"text_config": SMALL, "vision_config": PERCEIVED}),
    Case("phi4_multimodal", "phi4_multimodal", SMALL | {"vision_config": VISION, "audio_config": PHI4_AUDIO}),
    Case(
        "qwen2_5_omni_thinker",
        "qwen2_5_omni_thinker",
        {"text_config": SMALL | axes(4, 2, 2), "vision_config": SEEN, "audio_config": AUDIO},
    ),
    Case(
        "qwen3_omni_moe_thinker",
        "qwen3_omni_moe_thinker",
        {
            "text_config": SMALL | EXPERTS | {"head_dim": 16} | axes(4, 2, 2),
            "vision_config": SEEN,
            "audio_config": AUDIO,
        },
    ),
    *(
        Case(name, name, {"text_config": SMALL | {"head_dim": 16}, "audio_config": AUDIO})
        for name in (
            "audioflamingo3",
            "fun_asr_nano",
            "glmasr",
            "qwen2_audio",
            "qwen3_asr",
            "voxtral",
        )
    ),
    Case(
        "musicflamingo",
        "musicflamingo",
        {"text_config": SMALL | {"head_dim": 16}, "audio_config": AUDIO | {"model_type": "audioflamingo3_encoder"}},
    ),
    *(Case(name, name, GRANITE_SPEECH) for name in ("granite_speech", "granite_speech_plus")),
    Case("vibevoice_asr", "vibevoice_asr", VIBEVOICE),
    Case("step3p7", "step3p7", {"text_config": WINDOWED | ROUTED | STEP, "vision_config": VISION}),
    Case(
        "video_llama_3",
        "video_llama_3",
        {
            "text_config": SMALL | {"model_type": "qwen2"},
            "vision_config": VISION | {"model_type": "video_llama_3_vision"},
        },
    ),
    Case("minicpmv4_6", "minicpmv4_6", {"text_config": SMALL | {"model_type": "qwen3"}, "vision_config": VISION}),
)


def recent(count: int) -> Sequence[Case]:
    """Return some of these families, drawn from the run's seed."""
    return Random(SEED).sample(RECENT, count)
