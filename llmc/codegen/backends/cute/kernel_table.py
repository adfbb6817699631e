"""The CuTe kernels by name."""

from __future__ import annotations

from llmc.codegen.kernel_table import kernel_table

KERNELS = kernel_table("llmc.codegen.backends.cute", "cute", {"flash_attention": "flash_attention"})
