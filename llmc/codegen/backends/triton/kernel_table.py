"""The Triton kernels by name."""

from __future__ import annotations

from llmc.codegen.kernel_table import kernel_table

KERNELS = kernel_table(
    "llmc.codegen.backends.triton",
    "triton",
    {
        "collectives": "all_reduce all_reduce_norm all_gather",
        "decode_attention": "decode_attention attention_combine single_token_attention",
        "latent_attention": "latent_decode latent_prefill",
        "gemm_tma": "gemm_tma gemm_tma_splitk",
        "matmul": "matmul head_matmul",
        "moe": "moe_route moe_combine moe_up moe_down",
        "gathered_moe": "moe_gather_up moe_gather_down",
        "quantized_moe": "quantized_moe_up quantized_moe_down",
        "scaled_moe": "scaled_moe_up scaled_moe_down",
        "gemv": "norm_gemv gemv",
        "prefill_attention": "prefill_attention packed_attention mixed_attention attention_parts join_parts",
        "reduce": "reduce argmax cumsum softmax topk",
        "topk_map": "topk_map topk_route",
        "rope": "rope_append rope rope_tables kv_append",
        "row_kernels": "rows",
        "round_groups": "round_groups",
        "sample": "row_penalize row_mask row_block_max row_sample_blocks row_finish row_sample row_logprobs",
        "shape": "copy concat take page_take page_put packed_take take_columns gather iota",
        "row_state": "row_spans row_begin row_ids row_slots row_last row_commit row_first row_reach row_advance "
        "row_accept row_propose row_rewind row_extend row_mean",
        "recurrent": "row_conv chunk_factors row_recurrence row_log",
        "quantized_gemv": "quantized_gemv",
        "quantized_gemm": "quantized_gemm",
        "scaled_gemm": "scaled_gemm scaled_gemm_tma scaled_gemm_small",
        "gemm_small": "gemm_small gemm gemm_splitk splitk_combine",
    },
)
