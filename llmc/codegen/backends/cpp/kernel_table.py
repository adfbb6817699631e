"""The CPU kernels by name."""

from __future__ import annotations

from llmc.codegen.kernel_table import kernel_table

KERNELS = kernel_table(
    "llmc.codegen.backends.cpp",
    "cpu",
    {
        "row_kernels": "rows elements",
        "linear": "linear",
        "quantized_linear": "quantized_linear",
        "attention": "attention alibi_attention latent_attention",
        "shape": "copy transpose slice concat take page_take page_put packed_take take_columns gather iota",
        "reduce": "reduce",
        "state": "rope rope_tables kv_append state pooling draft sample",
        "recurrent": "row_conv row_recurrence row_log",
        "reference": "matmul head_matmul packed_attention packed_alibi_attention moe",
        "experts": "moe_route experts",
        "collectives": "all_reduce all_gather",
    },
)
