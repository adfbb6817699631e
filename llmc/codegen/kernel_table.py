"""The built-in kernels of each back end by name, from which a kernel is imported when its name is first looked up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _kernels(backend: str, prefix: str, **modules: str) -> Mapping[str, str]:
    """Return the kernels of a back end as "module:object" texts, by name.

    `modules` maps each module of the back end to its kernels in one text; the object of the kernel "PREFIX/row_mask" is
    ROW_MASK.
    """
    package = f"llmc.codegen.backends.{backend}"
    names = [(module, name) for module, kernels in modules.items() for name in kernels.split()]
    return MappingProxyType({f"{prefix}/{name}": f"{package}.{module}:{name.upper()}" for module, name in names})


CPU = _kernels(
    "cpp",
    "cpu",
    row_kernels="rows elements",
    linear="linear",
    quantized_linear="quantized_linear",
    attention="attention alibi_attention latent_attention",
    shape="copy transpose slice concat take page_take page_put packed_take take_columns gather iota",
    reduce="reduce",
    state="rope rope_tables kv_append state pooling draft sample",
    recurrent="row_conv row_recurrence row_log",
    reference="matmul head_matmul packed_attention packed_alibi_attention moe",
    experts="moe_route experts",
    collectives="all_reduce all_gather",
)
TRITON = _kernels(
    "triton",
    "triton",
    collectives="all_reduce all_reduce_norm all_gather",
    decode_attention="decode_attention attention_combine single_token_attention",
    latent_attention="latent_decode latent_prefill",
    gemm_tma="gemm_tma gemm_tma_splitk",
    matmul="matmul head_matmul",
    moe="moe_route moe_combine moe_up moe_down",
    gathered_moe="moe_gather_up moe_gather_down",
    quantized_moe="quantized_moe_up quantized_moe_down",
    scaled_moe="scaled_moe_up scaled_moe_down",
    gemv="norm_gemv gemv",
    prefill_attention="prefill_attention packed_attention mixed_attention attention_parts join_parts",
    reduce="reduce argmax cumsum softmax topk",
    topk_map="topk_map topk_route",
    rope="rope_append rope rope_tables kv_append",
    row_kernels="rows",
    round_groups="round_groups",
    sample="row_penalize row_mask row_block_max row_sample_blocks row_finish row_sample row_logprobs",
    shape="copy concat take page_take page_put packed_take take_columns gather iota",
    row_state="row_spans row_begin row_ids row_slots row_last row_commit row_first row_reach row_advance "
    "row_accept row_propose row_rewind row_extend row_mean",
    recurrent="row_conv chunk_factors row_recurrence row_log",
    quantized_gemv="quantized_gemv",
    quantized_gemm="quantized_gemm",
    scaled_gemm="scaled_gemm scaled_gemm_tma scaled_gemm_small",
    gemm_small="gemm_small gemm gemm_splitk splitk_combine",
)
CUDA = _kernels(
    "cuda",
    "cuda",
    decode_attention="decode_attention",
    gemm_tiles="gemm_tiles",
    gemm_wgmma="gemm_wgmma",
    grouped_codes="grouped_codes",
    grouped_wgmma="grouped_wgmma",
    quantized_tiles="quantized_tiles",
    quantized_wgmma="quantized_wgmma",
    skinny_gemm="skinny_fixed skinny_gemm",
    skinny_slices="skinny_slices",
    skinny_wgmma="skinny_wgmma skinny_wgmma_bf16",
)
CUTE = _kernels("cute", "cute", flash_attention="flash_attention")
FLASHINFER = _kernels("flashinfer", "flashinfer", xqa="xqa")
NCCL = _kernels("nccl", "nccl", collectives="all_reduce all_gather")
