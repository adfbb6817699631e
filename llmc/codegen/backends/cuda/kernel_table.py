"""The CUDA C++ kernels by name. A kernel's module is imported when its name is first looked up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

KERNELS: Mapping[str, str] = MappingProxyType(
    {
        "cuda/decode_attention": "llmc.codegen.backends.cuda.decode_attention:DECODE_ATTENTION",
        "cuda/gemm_wgmma": "llmc.codegen.backends.cuda.gemm_wgmma:GEMM_WGMMA",
        "cuda/grouped_codes": "llmc.codegen.backends.cuda.grouped_codes:GROUPED_CODES",
        "cuda/grouped_wgmma": "llmc.codegen.backends.cuda.grouped_wgmma:GROUPED_WGMMA",
        "cuda/quantized_wgmma": "llmc.codegen.backends.cuda.quantized_wgmma:QUANTIZED_WGMMA",
        "cuda/skinny_fixed": "llmc.codegen.backends.cuda.skinny_gemm:SKINNY_FIXED",
        "cuda/skinny_gemm": "llmc.codegen.backends.cuda.skinny_gemm:SKINNY_GEMM",
        "cuda/skinny_slices": "llmc.codegen.backends.cuda.skinny_slices:SKINNY_SLICES",
        "cuda/skinny_wgmma": "llmc.codegen.backends.cuda.skinny_wgmma:SKINNY_WGMMA",
        "cuda/skinny_wgmma_bf16": "llmc.codegen.backends.cuda.skinny_wgmma:SKINNY_WGMMA_BF16",
    }
)
