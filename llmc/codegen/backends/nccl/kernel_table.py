"""The NCCL collectives by name."""

from __future__ import annotations

from llmc.codegen.kernel_table import kernel_table

KERNELS = kernel_table("llmc.codegen.backends.nccl", "nccl", {"collectives": "all_reduce all_gather"})
