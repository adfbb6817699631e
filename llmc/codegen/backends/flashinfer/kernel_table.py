"""The kernels of FlashInfer by name."""

from __future__ import annotations

from llmc.codegen.kernel_table import kernel_table

KERNELS = kernel_table("llmc.codegen.backends.flashinfer", "flashinfer", {"xqa": "xqa"})
