"""One node or more for every Triton kernel, at the sizes of Llama-3.1-8B, Qwen3-30B-A3B and DeepSeek-V3. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kernels.cases import Text
from kernels.real_recurrent import RECURRENT
from kernels.real_sampling import KV, PAGES, SAMPLING, V

LATENTS = "state bf16[4096, 16, 576]"
HIDDEN = "state bf16[4096, 16, 4096]"
SILU = "mul(mul(a0, sigmoid(a0)), a1)"
NORM = "mul(mul(a0, rsqrt(add(row_mean(mul(a0, a0)), 1e-06))), a1)"
ADDED_NORM = "mul(mul(add(a0, a1), rsqrt(add(row_mean(mul(add(a0, a1), add(a0, a1))), 1e-06))), a2)"
HEADS = 'rope_append {heads=32, dtype="bf16", eps=1e-06}'
EXPERTS = "weight bf16[128, 1536, 2048]"
SOFTMAX, SHARES = "div(exp(sub(a0, row_max(a0))), row_sum(exp(sub(a0, row_max(a0)))))", "div(a0, row_sum(a0))"

_ATTENTION = {
    "decode_attention": (
        Text(
            f"bf16[R, 32, 128]; {KV}; {PAGES}; i32[R]; i32[R+1]; i32[R]", "paged_attention {scale=0.088}",
            "bf16[R, 32, 128]",
        ),
        Text(
            f"bf16[R, 32, 128]; {KV}; {PAGES}; i32[R]; i32[R]", "paged_attention_split {scale=0.088, splits=16}",
            "f32[R, 32, 16, 128], f32[R, 32, 16]",
        ),
    ),
    "attention_parts": (
        Text(
            f"bf16[R, 32, 128]; {KV}; {PAGES}; i32[R]; i32[R]",
            "paged_attention_parts {scale=0.088, splits=16, part=512}", "f32[R, 32, 16, 128], f32[R, 32, 16]",
        ),
    ),
    "join_parts": (
        Text("f32[R, 32, 16, 128]; f32[R, 32, 16]", 'attention_combine {dtype="bf16"}', "bf16[R, 32, 128]"),
    ),
    "attention_combine": (
        Text("f32[R, 32, 16, 128]; f32[R, 32, 16]", 'attention_combine {dtype="bf16"}', "bf16[R, 32, 128]"),
    ),
    "prefill_attention": (
        Text(
            f"bf16[T, 32, 128]; {KV}; {PAGES}; i32[R]; i32[R+1]; i32[T]", "paged_attention {scale=0.088}",
            "bf16[T, 32, 128]",
        ),
        Text(
            f"bf16[T, 32, 128]; {KV}; {PAGES}; i32[R]; i32[R+1]; i32[T]; f32[32]",
            "paged_alibi_attention {scale=0.088}", "bf16[T, 32, 128]",
        ),
    ),
    "mixed_attention": (
        Text(
            f"bf16[T, 32, 128]; {KV}; {PAGES}; i32[R]; i32[R+1]; i32[T]", "paged_attention {scale=0.088}",
            "bf16[T, 32, 128]",
        ),
    ),
    "latent_decode": (
        Text(
            f"bf16[R, 128, 512]; bf16[R, 128, 64]; {LATENTS}; {PAGES}; i32[R]; i32[R]",
            "paged_latent_attention_split {scale=0.072, splits=4}", "f32[R, 128, 4, 512], f32[R, 128, 4]",
        ),
    ),
    "latent_prefill": (
        Text(
            f"bf16[T, 128, 512]; bf16[T, 128, 64]; {LATENTS}; {PAGES}; i32[R]; i32[R+1]; i32[T]",
            "paged_latent_attention {scale=0.072}", "bf16[T, 128, 512]",
        ),
    ),
    "single_token_attention": (
        Text(
            f"bf16[T, 32, 128]; {KV}; {PAGES}; i32[R]; i32[R+1]; i32[T]; bf16[T, 32, 128]",
            "paged_attention_single {scale=0.088}", "bf16[T, 32, 128]",
        ),
    ),
    "gemm_splitk": (
        Text("bf16[R, 14336]; weight bf16[4096, 14336]", "linear_split {splits=2}", "f32[2, R, 4096]"),
    ),
    "gemm_tma_splitk": (
        Text("bf16[R, 14336]; weight bf16[4096, 14336]", "linear_split {splits=2}", "f32[2, R, 4096]"),
    ),
    "splitk_combine": (
        Text(
            "f32[2, R, 4096]; bf16[R, 4096]", 'linear_combine {body="add(a1, a0)", dtype="bf16"}', "bf16[R, 4096]"
        ),
    ),
    "packed_attention": (
        Text(
            "bf16[T, 32, 128]; bf16[T, 8, 128]; bf16[T, 8, 128]; i32[T]", "attention {layer=0, scale=0.088}",
            "bf16[T, 32, 128]",
        ),
        Text(
            "bf16[T, 32, 128]; bf16[T, 8, 128]; bf16[T, 8, 128]; i32[T]; f32[32]",
            "alibi_attention {layer=0, scale=0.088}", "bf16[T, 32, 128]",
        ),
    ),
    "rope_append": (
        Text(
            f"bf16[T, 6144]; {KV}; i32[T]; f32[T, 64]; f32[T, 64]; weight bf16[128]; weight bf16[128]", HEADS,
            f"bf16[T, 32, 128], {KV}",
        ),
    ),
    "rope": (Text("bf16[T, 32, 128]; f32[T, 64]; f32[T, 64]", "rope", "bf16[T, 32, 128]"),),
    "rope_tables": (
        Text("weight f32[64]; i32[T]", 'rope_tables {scaling=1.0, dtype="f32"}', "f32[T, 64], f32[T, 64]"),
    ),
    "kv_append": (Text(f"{KV}; bf16[T, 8, 128]; bf16[T, 8, 128]; i32[T]", "kv_append", KV),),
}  # fmt: skip

_SCALED = (
    Text(
        "f8e4m3[T, 4096]; weight f8e4m3[28672, 4096]; f32[T, 32]; weight f32[224, 32]",
        f'block_scaled_linear {{block=[128, 128], parts=2, body="{SILU}", dtype="bf16"}}', "bf16[T, 14336]",
    ),
    Text(
        "f8e4m3[T, 14336]; weight f8e4m3[4096, 14336]; f32[T, 112]; weight f32[32, 112]; bf16[T, 4096]",
        'block_scaled_linear {block=[128, 128], body="add(a1, a0)", dtype="bf16"}', "bf16[T, 4096]",
    ),
)  # fmt: skip

_PRODUCTS = {
    "gemm_tma": (
        Text("bf16[T, 4096]; weight bf16[28672, 4096]", f'linear_map {{parts=2, body="{SILU}"}}', "bf16[T, 14336]"),
        Text("f16[T, 4096]; weight f16[6144, 4096]", "linear", "f16[T, 6144]"),
        Text(
            "bf16[T, 14336]; weight bf16[4096, 14336]; bf16[T, 4096]", 'linear_map {parts=1, body="add(a1, a0)"}',
            "bf16[T, 4096]",
        ),
    ),
    "gemv": (
        Text("bf16[1, 4096]; weight bf16[28672, 4096]", f'linear_map {{parts=2, body="{SILU}"}}', "bf16[1, 14336]"),
        Text(f"bf16[R, 4096]; weight bf16[{V}, 4096]", 'linear_map {parts=1, body="a0", dtype="f32"}', f"f32[R, {V}]"),
    ),
    "norm_gemv": (
        Text(
            "bf16[1, 4096]; weight bf16[28672, 4096]; weight bf16[4096]",
            f'norm_linear {{eps=1e-06, parts=2, body="{SILU}"}}', "bf16[1, 14336]",
        ),
    ),
    "gemm_small": (
        Text("bf16[R, 4096]; weight bf16[28672, 4096]", f'linear_map {{parts=2, body="{SILU}"}}', "bf16[R, 14336]"),
    ),
    "gemm": (
        Text(
            "bf16[T, 14336]; weight bf16[4096, 14336]; bf16[T, 4096]", 'linear_map {parts=1, body="add(a0, a1)"}',
            "bf16[T, 4096]",
        ),
    ),
    "quantized_gemv": (
        Text(
            "bf16[1, 4096]; weight u8[28672, 2048]; weight bf16[32, 28672]",
            f'packed_nibbles_linear {{half=64, block=[1, 128], zero_point=8, parts=2, body="{SILU}"}}',
            "bf16[1, 14336]",
        ),
        Text(
            "bf16[R, 4096]; weight i8[6144, 4096]; weight f32[6144, 1]", "quantized_linear {block=[1, 0]}",
            "bf16[R, 6144]",
        ),
    ),
    "quantized_gemm": (
        Text(
            "bf16[R, 4096]; weight u8[28672, 2048]; weight bf16[32, 28672]",
            f'packed_nibbles_linear {{half=64, block=[1, 128], zero_point=8, parts=2, body="{SILU}"}}',
            "bf16[R, 14336]",
        ),
        Text(
            "bf16[T, 4096]; weight u8[6144, 2048]; weight f16[64, 6144]; weight u8[64, 6144]",
            "packed_nibbles_linear {half=64, block=[1, 64], zeros=true}", "bf16[T, 6144]",
        ),
        Text(
            "bf16[T, 4096]; weight i8[6144, 4096]; weight f32[6144, 1]", "quantized_linear {block=[1, 0]}",
            "bf16[T, 6144]",
        ),
    ),
    "scaled_gemm_small": (
        Text(
            "f8e4m3[R, 4096]; weight f8e4m3[28672, 4096]; f32[R, 32]; weight f32[224, 32]",
            f'block_scaled_linear {{block=[128, 128], parts=2, body="{SILU}", dtype="bf16"}}', "bf16[R, 14336]",
        ),
        Text(
            "f8e4m3[R, 4096]; weight f8e4m3[6144, 4096]; f32[R, 32]; weight f32[6144, 32]",
            'block_scaled_linear {block=[1, 128], dtype="bf16"}', "bf16[R, 6144]",
        ),
    ),
    "scaled_gemm": _SCALED,
    "scaled_gemm_tma": _SCALED,
    "take_columns": (Text("bf16[T, 4096]; i32[4096]", "take_columns", "bf16[T, 4096]"),),
    "matmul": (Text("bf16[8, T, 128]; bf16[8, 128, T]", "matmul", "bf16[8, T, T]"),),
    "quantized_moe_up": (
        Text(
            "bf16[T, 2048]; i32[8*T]; i32[129]; weight u8[128, 1536, 1024]; weight bf16[128, 16, 1536]",
            "quantized_moe_up {k=8, block=[1, 128], zero_point=8, bits=4, half=64}", "bf16[8*T, 768]",
        ),
        Text(
            "bf16[T, 2880]; i32[4*T]; i32[33]; weight u8[32, 5760, 1440]; weight bf16[32, 90, 5760];"
            " weight bf16[32, 5760]",
            'quantized_moe_up {k=4, block=[1, 32], values="e2m1", bits=4, half=32}', "bf16[4*T, 2880]",
        ),
    ),
    "quantized_moe_down": (
        Text(
            "bf16[8*T, 768]; i32[8*T]; i32[129]; weight i8[128, 2048, 768]; weight f32[128, 2048, 1]; f32[T, 8]",
            "quantized_moe_down {block=[1, 0]}", "f32[T, 8, 2048]",
        ),
        Text(
            "f16[8*T, 768]; i32[8*T]; i32[129]; weight u8[128, 2048, 384]; weight f16[128, 6, 2048];"
            " f32[T, 8]; weight u8[128, 6, 2048]",
            "quantized_moe_down {block=[1, 128], zeros=true, bits=4, half=64}", "f32[T, 8, 2048]",
        ),
    ),
    "scaled_moe_up": (
        Text(
            "i8[T, 2048]; i32[8*T]; i32[129]; weight i8[128, 1536, 2048]; weight f32[128, 1536, 1]; f32[T, 1]",
            'scaled_moe_up {k=8, block=[1, 0], dtype="bf16"}', "bf16[8*T, 768]",
        ),
        Text(
            "f8e4m3[T, 2048]; i32[8*T]; i32[129]; weight f8e4m3[128, 1536, 2048]; weight f32[128, 12, 16]; f32[T, 16]",
            'scaled_moe_up {k=8, block=[128, 128], dtype="bf16"}', "bf16[8*T, 768]",
        ),
    ),
    "scaled_moe_down": (
        Text(
            "f8e4m3[8*T, 768]; i32[8*T]; i32[129]; weight f8e4m3[128, 2048, 768]; weight f32[128, 2048, 1];"
            " f32[8*T, 1]; f32[T, 8]", "scaled_moe_down {block=[1, 0]}", "f32[T, 8, 2048]",
        ),
        Text(
            "f8e4m3[8*T, 768]; i32[8*T]; i32[129]; weight f8e4m3[128, 2048, 768]; weight f32[128, 16, 6]; f32[8*T, 6];"
            " f32[T, 8]", "scaled_moe_down {block=[128, 128]}", "f32[T, 8, 2048]",
        ),
    ),
    "topk_map": (
        Text("f32[T, 128]", f'topk_map {{k=8, before="{SOFTMAX}", after="{SHARES}"}}', "f32[T, 8], i32[T, 8]"),
        Text("bf16[T, 32]", f'topk_map {{k=4, after="{SOFTMAX}"}}', "bf16[T, 4], i32[T, 4]"),
    ),
    "topk_route": (
        Text(
            "f32[1, 128]", f'topk_route {{k=8, before="{SOFTMAX}", after="{SHARES}", dtype="bf16"}}',
            "bf16[1, 8], i32[8], i32[129]",
        ),
    ),
    "moe_gather_up": (
        Text(
            "bf16[1, 2048]; i32[1, 8]; weight bf16[128, 1536, 2048]; weight bf16[2048]",
            "norm_moe_gather_up {eps=1e-06}", "bf16[8, 768]",
        ),
        Text(
            "bf16[1, 2880]; i32[1, 4]; weight bf16[32, 5760, 2880]; weight bf16[32, 5760]", "moe_gather_up",
            "bf16[4, 2880]",
        ),
    ),
    "moe_gather_down": (
        Text(
            "bf16[8, 768]; i32[1, 8]; weight bf16[128, 2048, 768]; bf16[1, 8]; bf16[1, 2048]", "moe_gather_down",
            "bf16[1, 2048]",
        ),
        Text(
            "bf16[2, 14336]; i32[1, 2]; weight bf16[8, 4096, 14336]; bf16[1, 2]; bf16[1, 4096]", "moe_gather_down",
            "bf16[1, 4096]",
        ),
    ),
    "moe_combine": (
        Text("bf16[T, 8, 2048]; bf16[T, 2048]", "moe_combine", "bf16[T, 2048]"),
        Text("f32[T, 4, 2880]", 'moe_combine {dtype="bf16"}', "bf16[T, 2880]"),
    ),
    "moe_route": (Text("i32[T, 8]", "moe_route {experts=128}", "i32[8*T], i32[129]"),),
    "moe_up": (Text(f"bf16[T, 2048]; i32[8*T]; i32[129]; {EXPERTS}", "moe_up {k=8}", "bf16[8*T, 768]"),),
    "moe_down": (
        Text(
            "bf16[8*T, 768]; i32[8*T]; i32[129]; weight bf16[128, 2048, 768]; f32[T, 8]", "moe_down",
            "f32[T, 8, 2048]",
        ),
    ),
}  # fmt: skip

_ROWS = {
    "rows": (
        Text(
            "bf16[T, 4096]; bf16[T, 4096]; weight bf16[4096]",
            f'fused {{body=["add(a0, a1)", "{ADDED_NORM}"], dtypes=["bf16", "bf16"]}}',
            "bf16[T, 4096], bf16[T, 4096]",
        ),
    ),
    "round_groups": (
        Text(
            "bf16[T, 4096]; weight bf16[4096]",
            f'round_groups {{body="{NORM}", dtype="f8e4m3", group=128}}', "f8e4m3[T, 4096], f32[T, 32]",
        ),
        Text("bf16[T, 14336]", 'round_groups {body="a0", dtype="f8e4m3", group=128}', "f8e4m3[T, 14336], f32[T, 112]"),
    ),
    "reduce": (Text("f32[T, 8, 2048]", "sum {axis=1}", "f32[T, 2048]"),),
    "argmax": (Text(f"f32[R, {V}]", "argmax {axis=-1}", "i64[R]"),),
    "cumsum": (Text("i32[T, 128]", "cumsum {axis=1}", "i32[T, 128]"),),
    "softmax": (Text("bf16[8, T, 4096]", "softmax {axis=1}", "bf16[8, T, 4096]"),),
    "topk": (Text("bf16[T, 128]", "topk {k=8}", "bf16[T, 8], i64[T, 8]"),),
    "copy": (Text("bf16[T, 32, 128]", "transpose {perm=[1, 0, 2]}", "bf16[32, T, 128]"),),
    "concat": (Text("bf16[T, 32, 64]; bf16[T, 32, 128]", "concat {axis=2}", "bf16[T, 32, 192]"),),
    "head_matmul": (
        Text("bf16[T, 128, 128]; weight bf16[128, 128, 512]", "head_matmul", "bf16[T, 128, 512]"),
        Text("bf16[T, 128, 512]; weight bf16[128, 512, 128]", "head_matmul", "bf16[T, 128, 128]"),
    ),
    "page_take": (Text(f"{HIDDEN}; i32[T]", "page_take", "bf16[T, 4096]"),),
    "page_put": (Text(f"{HIDDEN}; bf16[T, 4096]; i32[T]", "page_put", HIDDEN),),
    "take": (
        Text(f"weight bf16[{V}, 4096]; i32[T]", "take", "bf16[T, 4096]"),
        Text(f"weight bf16[{V // 2}, 4096]; i32[T]", f"take_part {{start={V // 2}}}", "bf16[T, 4096]"),
    ),
    "packed_take": (
        Text("weight bf16[8016, 2048, 16, 2]; i32[T]", "packed_take {k=4096}", "bf16[T, 4096]"),
        Text("weight bf16[4008, 2048, 16, 2]; i32[T]", "packed_take_part {k=4096, start=64128}", "bf16[T, 4096]"),
    ),
    "gather": (Text("f32[T, 128]; i64[T, 8]", "gather {axis=1}", "f32[T, 8]"),),
    "iota": (Text("", 'iota {size=T, dtype="i32"}', "i32[T]"),),
}  # fmt: skip

_COLLECTIVES = {
    "all_reduce": (
        Text("bf16[T, 4096]; bf16[T, 4096]", "all_reduce_add {ranks=2}", "bf16[T, 4096]"),
        Text("bf16[T, 4096]", "all_reduce {ranks=4}", "bf16[T, 4096]"),
        Text("f32[T, 5]", "all_reduce {ranks=3}", "f32[T, 5]"),
    ),
    "all_reduce_norm": (
        Text(
            "bf16[T, 4096]; bf16[4096]; bf16[T, 4096]",
            "all_reduce_norm {eps=1e-05, ranks=2}",
            "bf16[T, 4096], bf16[T, 4096]",
        ),
        Text("bf16[T, 7168]; f32[7168]", "all_reduce_norm {eps=1e-06, ranks=4}", "bf16[T, 7168], bf16[T, 7168]"),
        Text("f32[T, 5]; f32[5]; f32[T, 5]", "all_reduce_norm {eps=1e-06, ranks=3}", "f32[T, 5], f32[T, 5]"),
    ),
    "all_gather": (Text(f"f32[R, {V // 2}]", "all_gather {axis=1, ranks=2}", f"f32[R, {V}]"),),
}

# Name of the kernel -> its nodes.
REAL: Mapping[str, tuple[Text, ...]] = MappingProxyType(
    {
        f"triton/{name}": texts
        for part in (_ATTENTION, _PRODUCTS, _ROWS, SAMPLING, RECURRENT, _COLLECTIVES)
        for name, texts in part.items()
    }
)
