"""Device functions and types for Triton templates of packages: dependent launches, online softmax, pages of KV.

A template imports them one by one and without `as`; their text becomes part of the kernel's.
"""

from llmc.codegen.backends.triton.kernels.dependent_launch import (
    launch_after_loads,
    wait_before_loads,
    wait_for_previous,
)
from llmc.codegen.backends.triton.kernels.online_softmax import (
    SoftmaxState,
    softmax_add_sink,
    softmax_lse,
    softmax_mean,
    softmax_start,
    softmax_tile,
)
from llmc.codegen.backends.triton.kernels.paged_kv import KeyPool, head_mask, key_offsets, load_keys_values, load_pages

__all__ = [
    "KeyPool",
    "SoftmaxState",
    "head_mask",
    "key_offsets",
    "launch_after_loads",
    "load_keys_values",
    "load_pages",
    "softmax_add_sink",
    "softmax_lse",
    "softmax_mean",
    "softmax_start",
    "softmax_tile",
    "wait_before_loads",
    "wait_for_previous",
]
