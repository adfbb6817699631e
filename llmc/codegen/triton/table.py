"""The names of the Triton kernels and where they live; nothing is imported until a name is read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_HERE = "llmc.codegen.triton"
KERNELS: Mapping[str, str] = MappingProxyType(
    {
        "triton/decode": f"{_HERE}.attention:DECODE",
        "triton/combine": f"{_HERE}.attention:COMBINE",
        "triton/row_logprobs": f"{_HERE}.logprobs:LOGPROBS",
        "triton/mapped": f"{_HERE}.mapped:MAPPED",
        "triton/mapped_parts": f"{_HERE}.mapped:MAPPED_PARTS",
        "triton/matmul": f"{_HERE}.matmul:MATMUL",
        "triton/moe_route": f"{_HERE}.moe:ROUTE",
        "triton/moe_up": f"{_HERE}.moe:UP",
        "triton/moe_down": f"{_HERE}.moe:DOWN",
        "triton/norm_stream": f"{_HERE}.norm_stream:NORM_STREAM",
        "triton/prefill": f"{_HERE}.prefill:PREFILL",
        "triton/prompt": f"{_HERE}.prefill:PROMPT",
        "triton/fold": f"{_HERE}.reduce:FOLD",
        "triton/argmax": f"{_HERE}.reduce:ARGMAX",
        "triton/cumsum": f"{_HERE}.reduce:CUMSUM",
        "triton/softmax": f"{_HERE}.reduce:SOFTMAX",
        "triton/topk": f"{_HERE}.reduce:TOPK",
        "triton/rope_append": f"{_HERE}.rope:ROPE_APPEND",
        "triton/rope": f"{_HERE}.rope:ROPE",
        "triton/rope_tables": f"{_HERE}.rope:ROPE_TABLES",
        "triton/kv_append": f"{_HERE}.rope:KV_APPEND",
        "triton/rows": f"{_HERE}.rows:ROWS",
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
        "triton/gather": f"{_HERE}.shape:GATHER",
        "triton/iota": f"{_HERE}.shape:IOTA",
        "triton/row_spans": f"{_HERE}.state:SPANS",
        "triton/row_begin": f"{_HERE}.state:BEGIN",
        "triton/row_tokens": f"{_HERE}.state:OF_TOKEN",
        "triton/row_last": f"{_HERE}.state:LAST",
        "triton/row_commit": f"{_HERE}.state:COMMIT",
        "triton/single": f"{_HERE}.single:SINGLE",
        "triton/parts": f"{_HERE}.split:PARTS",
        "triton/linear_combine": f"{_HERE}.split:SUM",
        "triton/stream": f"{_HERE}.stream:STREAM",
        "triton/tile": f"{_HERE}.tile:TILE",
        "triton/gemm": f"{_HERE}.tile:GEMM",
    }
)
