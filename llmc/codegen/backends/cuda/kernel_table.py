"""The names of the CUDA C++ kernels and where they live; nothing is imported until a name is read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

KERNELS: Mapping[str, str] = MappingProxyType({"cuda/gemm_wgmma": "llmc.codegen.backends.cuda.gemm_wgmma:GEMM_WGMMA"})
