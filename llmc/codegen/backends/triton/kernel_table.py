"""The Triton kernels by name. A kernel's module is imported when its name is first looked up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_HERE = "llmc.codegen.backends.triton"
KERNELS: Mapping[str, str] = MappingProxyType(
    {
        "triton/decode_attention": f"{_HERE}.decode_attention:DECODE_ATTENTION",
        "triton/attention_combine": f"{_HERE}.decode_attention:ATTENTION_COMBINE",
        "triton/row_logprobs": f"{_HERE}.logprobs:LOGPROBS",
        "triton/gemm_tma": f"{_HERE}.gemm_tma:GEMM_TMA",
        "triton/gemm_tma_splitk": f"{_HERE}.gemm_tma:GEMM_TMA_SPLITK",
        "triton/matmul": f"{_HERE}.matmul:MATMUL",
        "triton/moe_route": f"{_HERE}.moe:ROUTE",
        "triton/moe_up": f"{_HERE}.moe:UP",
        "triton/moe_down": f"{_HERE}.moe:DOWN",
        "triton/norm_gemv": f"{_HERE}.gemv:NORM_GEMV",
        "triton/prefill_attention": f"{_HERE}.prefill_attention:PREFILL_ATTENTION",
        "triton/packed_attention": f"{_HERE}.prefill_attention:PACKED_ATTENTION",
        "triton/reduce": f"{_HERE}.reduce:REDUCE",
        "triton/argmax": f"{_HERE}.reduce:ARGMAX",
        "triton/cumsum": f"{_HERE}.reduce:CUMSUM",
        "triton/softmax": f"{_HERE}.reduce:SOFTMAX",
        "triton/topk": f"{_HERE}.reduce:TOPK",
        "triton/rope_append": f"{_HERE}.rope:ROPE_APPEND",
        "triton/rope": f"{_HERE}.rope:ROPE",
        "triton/rope_tables": f"{_HERE}.rope:ROPE_TABLES",
        "triton/kv_append": f"{_HERE}.rope:KV_APPEND",
        "triton/rows": f"{_HERE}.row_kernels:ROWS",
        "triton/round_groups": f"{_HERE}.round_groups:ROUND_GROUPS",
        "triton/row_penalize": f"{_HERE}.sample:PENALIZE",
        "triton/row_mask": f"{_HERE}.sample:MASK",
        "triton/row_block_max": f"{_HERE}.sample:BLOCK_MAX",
        "triton/row_sample_blocks": f"{_HERE}.sample:SAMPLE_BLOCKS",
        "triton/row_finish": f"{_HERE}.sample:FINISH",
        "triton/row_sample": f"{_HERE}.sample:SAMPLE",
        "triton/copy": f"{_HERE}.shape:COPY",
        "triton/concat": f"{_HERE}.shape:CONCAT",
        "triton/take": f"{_HERE}.shape:TAKE",
        "triton/packed_take": f"{_HERE}.shape:PACKED_TAKE",
        "triton/take_columns": f"{_HERE}.shape:TAKE_COLUMNS",
        "triton/gather": f"{_HERE}.shape:GATHER",
        "triton/iota": f"{_HERE}.shape:IOTA",
        "triton/row_spans": f"{_HERE}.row_state:SPANS",
        "triton/row_begin": f"{_HERE}.row_state:BEGIN",
        "triton/row_tokens": f"{_HERE}.row_state:OF_TOKEN",
        "triton/row_last": f"{_HERE}.row_state:LAST",
        "triton/row_commit": f"{_HERE}.row_state:COMMIT",
        "triton/single_token_attention": f"{_HERE}.single_token_attention:SINGLE_TOKEN_ATTENTION",
        "triton/gemm_splitk": f"{_HERE}.gemm_splitk:GEMM_SPLITK",
        "triton/splitk_combine": f"{_HERE}.gemm_splitk:SPLITK_COMBINE",
        "triton/gemv": f"{_HERE}.gemv:GEMV",
        "triton/quantized_gemv": f"{_HERE}.quantized_gemv:QUANTIZED_GEMV",
        "triton/quantized_gemm": f"{_HERE}.quantized_gemm:QUANTIZED_GEMM",
        "triton/scaled_gemm": f"{_HERE}.scaled_gemm:SCALED_GEMM",
        "triton/scaled_gemm_tma": f"{_HERE}.scaled_gemm:SCALED_GEMM_TMA",
        "triton/scaled_gemm_small": f"{_HERE}.scaled_gemm:SCALED_GEMM_SMALL",
        "triton/gemm_small": f"{_HERE}.gemm_small:GEMM_SMALL",
        "triton/gemm": f"{_HERE}.gemm_small:GEMM",
    }
)
