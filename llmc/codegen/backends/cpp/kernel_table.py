"""The CPU kernels by name. A kernel's module is imported when its name is first looked up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_HERE = "llmc.codegen.backends.cpp"
KERNELS: Mapping[str, str] = MappingProxyType(
    {
        "cpu/rows": f"{_HERE}.row_kernels:ROWS",
        "cpu/elements": f"{_HERE}.row_kernels:ELEMENTS",
        "cpu/linear": f"{_HERE}.linear:LINEAR",
        "cpu/quantized_linear": f"{_HERE}.quantized_linear:QUANTIZED_LINEAR",
        "cpu/attention": f"{_HERE}.attention:ATTENTION",
        "cpu/alibi_attention": f"{_HERE}.attention:ALIBI_ATTENTION",
        "cpu/latent_attention": f"{_HERE}.attention:LATENT_ATTENTION",
        "cpu/copy": f"{_HERE}.shape:COPY",
        "cpu/transpose": f"{_HERE}.shape:TRANSPOSE",
        "cpu/slice": f"{_HERE}.shape:SLICE",
        "cpu/concat": f"{_HERE}.shape:CONCAT",
        "cpu/take": f"{_HERE}.shape:TAKE",
        "cpu/page_take": f"{_HERE}.shape:PAGE_TAKE",
        "cpu/page_put": f"{_HERE}.shape:PAGE_PUT",
        "cpu/packed_take": f"{_HERE}.shape:PACKED_TAKE",
        "cpu/take_columns": f"{_HERE}.shape:TAKE_COLUMNS",
        "cpu/gather": f"{_HERE}.shape:GATHER",
        "cpu/iota": f"{_HERE}.shape:IOTA",
        "cpu/reduce": f"{_HERE}.reduce:REDUCE",
        "cpu/rope": f"{_HERE}.state:ROPE",
        "cpu/rope_tables": f"{_HERE}.state:ROPE_TABLES",
        "cpu/kv_append": f"{_HERE}.state:KV_APPEND",
        "cpu/row_conv": f"{_HERE}.recurrent:CONV",
        "cpu/row_recurrence": f"{_HERE}.recurrent:RECURRENCE",
        "cpu/row_log": f"{_HERE}.recurrent:LOG",
        "cpu/state": f"{_HERE}.state:STATES",
        "cpu/pooling": f"{_HERE}.state:POOLING",
        "cpu/draft": f"{_HERE}.state:DRAFTS",
        "cpu/sample": f"{_HERE}.state:SAMPLING",
        "cpu/matmul": f"{_HERE}.reference:MATMUL",
        "cpu/head_matmul": f"{_HERE}.reference:HEAD_MATMUL",
        "cpu/packed_attention": f"{_HERE}.reference:ATTENTION",
        "cpu/packed_alibi_attention": f"{_HERE}.reference:ALIBI_ATTENTION",
        "cpu/moe": f"{_HERE}.reference:MOE",
        "cpu/moe_route": f"{_HERE}.experts:ROUTE",
        "cpu/experts": f"{_HERE}.experts:EXPERTS",
        "cpu/all_reduce": f"{_HERE}.collectives:ALL_REDUCE",
        "cpu/all_gather": f"{_HERE}.collectives:ALL_GATHER",
    }
)
