"""Nodes of the Triton kernels of sampling and drafting, at the sizes of Llama-3.1-8B: see real_sizes."""

from __future__ import annotations

from kernels.cases import Text

V = 128256
B = -(-V // 1024)
ROWS = "i32[R]; i32[R+1]; i32[T]"
PARAMS = "state f32[256, 8]; state i32[256, 8]"
BIASES = "state i32[256, 1024]; state f32[256, 1024]"
SEEN = f"state i32[256, {V // 32}]; state i32[256, {V}]"
STATES = f"{PARAMS}; state i32[256, 32]; {SEEN}; {BIASES}; state i32[256, {V // 32}]"
KV, PAGES, TOKENS = "state bf16[4096, 2, 8, 16, 128]", "state i32[256, 2560]", "state i32[256, 40960]"
BLOCKS = f"f32[R, {B}]; i32[R, {B}]; f32[R, {B}]"

SAMPLING = {
    "row_penalize": (
        Text(
            f"bf16[R, {V}]; i32[R]; {PARAMS}; {SEEN}; {BIASES}", "row_penalize", f"f32[R, {V}]",
        ),
        Text(
            f"bf16[R, {V}]; i32[R]; {PARAMS}; {SEEN}; {BIASES}; i32[R+1]; i32[T]; {TOKENS}", "row_penalize",
            f"f32[R, {V}]",
        ),
    ),
    "row_mask": (
        Text(
            f"f32[R, {V}]; {ROWS}; state i32[256, 8]; state i32[256, 32]; state i32[256, {5 * V // 32}]", "row_mask",
            f"f32[R, {V}]",
        ),
    ),
    "row_sample": (Text(f"f32[R, {V}]; {ROWS}; {TOKENS}; {PARAMS}", "row_sample", "i32[R]"),),
    "row_block_max": (
        Text(f"bf16[R, {V}]; {ROWS}; {STATES}", "row_block_max {block=1024}", f"f32[R, {B}], i32[R, {B}], f32[R, {B}]"),
    ),
    "row_sample_blocks": (
        Text(f"bf16[R, {V}]; {ROWS}; {STATES}; {TOKENS}; {BLOCKS}", "row_sample_blocks {block=1024}", "i32[R]"),
    ),
    "row_finish": (
        Text(
            f"bf16[R, {V}]; {ROWS}; {STATES}; {TOKENS}; {BLOCKS}; state i32[256]; i32[R]", "row_finish {block=1024}",
            f"i32[R], f32[R], i32[R], i32[R, 20], f32[R, 20], {TOKENS}, state i32[256], state i32[256, {V}]",
        ),
    ),
    "row_logprobs": (
        Text(
            f"bf16[R, {V}]; i32[R]; i32[R]; state i32[256, 8]", "row_logprobs", "f32[R], i32[R], i32[R, 20], f32[R, 20]"
        ),
    ),
    "row_spans": (
        Text("i32[R]; i32[R]; state i32[256]", "row_spans {tokens=T}", "i32[R+1], i32[T], i32[T]"),
        Text("i32[1]; i32[1]; state i32[256]", "row_spans {tokens=1}", "i32[2], i32[1], i32[1]"),
    ),
    "row_begin": (
        Text(
            f"i32[R]; i32[R]; state i32[256]; {TOKENS}; {PAGES}", "row_begin {tokens=R, page=16}",
            "i32[R+1], i32[R], i32[R], i32[R], i32[R]",
        ),
    ),
    "row_ids": (Text(f"{TOKENS}; i32[T]; i32[T]", "row_ids", "i32[T]"),),
    "row_slots": (Text(f"{PAGES}; i32[T]; i32[T]", "row_slots {page=16}", "i32[T]"),),
    "row_last": (Text("i32[R+1]", "row_last", "i32[R]"),),
    "row_commit": (
        Text(
            f"{TOKENS}; state i32[256]; state i32[256, {V}]; {ROWS}; i32[R]; i32[R]", "row_commit",
            f"{TOKENS}, state i32[256], state i32[256, {V}]",
        ),
    ),
    "row_accept": (
        Text(
            f"{TOKENS}; state i32[256]; state i32[256, {V}]; {ROWS}; i32[R]; i32[R]", "row_accept {limit=4}",
            f"i32[R], {TOKENS}, state i32[256], state i32[256, {V}]",
        ),
    ),
    "row_propose": (
        Text(
            f"{TOKENS}; state i32[256, 4]; state i32[256]; i32[R]; i32[R+1]; i32[R]", "row_propose",
            f"i32[R], {TOKENS}, state i32[256, 4]",
        ),
    ),
    "row_rewind": (Text("state i32[256]; state i32[256]; i32[R]", "row_rewind", "state i32[256]"),),
    "row_first": (Text("i32[R+1]", "row_first", "i32[R]"),),
    "row_reach": (Text("i32[R+1]; i32[T]", "row_reach", "i32[T]"),),
    "row_mean": (Text("bf16[T, 1024]; i32[R+1]", "row_mean", "f32[R, 1024]"),),
    "row_advance": (Text("state i32[256]; i32[R]; i32[R+1]; i32[T]", "row_advance", "state i32[256]"),),
    "row_extend": (
        Text(
            f"{TOKENS}; state i32[256]; {ROWS}; i32[R]; i32[R]", "row_extend", f"{TOKENS}, state i32[256]"
        ),
    ),
}  # fmt: skip
