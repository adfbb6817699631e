"""The CUDA C++ kernels by name."""

from __future__ import annotations

from llmc.codegen.kernel_table import kernel_table

KERNELS = kernel_table(
    "llmc.codegen.backends.cuda",
    "cuda",
    {
        "decode_attention": "decode_attention",
        "gemm_tiles": "gemm_tiles",
        "gemm_wgmma": "gemm_wgmma",
        "grouped_codes": "grouped_codes",
        "grouped_wgmma": "grouped_wgmma",
        "quantized_tiles": "quantized_tiles",
        "quantized_wgmma": "quantized_wgmma",
        "skinny_gemm": "skinny_fixed skinny_gemm",
        "skinny_slices": "skinny_slices",
        "skinny_wgmma": "skinny_wgmma skinny_wgmma_bf16",
    },
)
