"""Test cases of kernels: the examples of ops, and nodes written as text with odd shapes, broadcasts and dtypes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from kernels.harness import Case

from llmc.codegen.kernel import Kernel
from llmc.ir.dtype import DTYPES
from llmc.ir.example import example_graph, named_operands, node_drawing, op_example
from llmc.ir.graph import Graph
from llmc.ir.interp import bind_symbols, run
from llmc.ir.ops import OPS, ops_of, quantize
from llmc.ir.text import parse
from llmc.targets.target import Target

# The sizes of the symbols in the texts below.
SIZES = {"T": 11, "R": 3}
# Never launched (`pack` replaces them, `lift-weights` takes them), or laid out for one level (test_cpu_linear.py).
PACKED_FIRST = (
    "linear", "linear_map", "pack_panel", "packed_linear", "quantized_linear", "pack_codes", "packed_quantized_linear",
    "pack_nibbles", "packed_nibbles_linear", "pack_fragments", "packed_fragments_linear", "norm_quantized_linear",
    "norm_fragments_linear", "fragments_moe_up", "fragments_moe_down",
)  # fmt: skip
UNPAGED = ("latent_attention", "causal_conv", "linear_recurrence")  # `page-attention` replaces it
# Of several ranks (tests/codegen/test_collectives.py).
COLLECTIVES = ("all_reduce", "all_gather")
# Only in the graph of the stored tensors, which the compiler evaluates (llmc/ir/weight_eval.py), or lowered before.
DECODING = tuple(op.name for op in ops_of(quantize) if op.name != "take_columns")
# The matrix units multiply bf16 pairs and keep probabilities as bf16; a normed head is rounded before it is rotated.
ROUGH = (
    "cpu/linear",
    "cpu/attention",
    "cpu/alibi_attention",
    "cpu/latent_attention",
    "triton/decode_attention",
    "triton/prefill_attention",
    "triton/mixed_attention",
    "triton/attention_parts",
    "triton/latent_decode",
    "triton/latent_prefill",
    "triton/packed_attention",
    "triton/prefill_attention",
    "triton/packed_attention",
    "triton/rope_append",
)
GPU_ONLY = (
    # Ops that only passes of the GPU pipelines make (test_triton_*.py); there are no CPU kernels for them.
    "rope_append", "paged_attention_split", "paged_attention_parts", "paged_attention_single",
    "paged_latent_attention_split",
    "attention_combine", "norm_linear", "row_begin", "all_reduce_add", "all_reduce_norm",
    "row_block_max",
    "row_sample_blocks", "row_finish", "linear_split", "linear_combine", "block_scaled_linear", "round_groups",
    "scaled_moe_up", "scaled_moe_down", "moe_combine", "topk_map", "topk_route", "moe_gather_up",
    "norm_moe_gather_up", "moe_gather_down", "chunk_factors", "chunk_recurrence", "chunk_recurrence_draft",
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """One node as text: "operand types -> op {attributes} : result types".

    Operands are drawn from the op's declaration; integers are below `ints` if it is not 0.
    """

    types: str
    call: str
    results: str
    ints: int = 0
    scale: float = 1.0

    def graph(self) -> Graph:
        types = [t.strip() for t in self.types.split(";") if t.strip()]
        ins = ", ".join(f"%x{i}: {t}" for i, t in enumerate(types))
        op, _, attrs = self.call.partition(" ")
        args = ", ".join(f"%x{i}" for i in range(len(types)))
        outs = ", ".join(f"%y{i}" for i in range(self.results.count("[")))
        syms = "".join(f"sym {s} in [1, 64]\n" for s in SIZES)
        body = f"  {outs} = {op}({args}) {attrs or '{}'} : {self.results}\n  return {outs}\n"
        return parse(f"{syms}graph @main({ins}) {{\n{body}}}\n", OPS).graphs["main"]

    def inputs(self, g: Graph, rng: np.random.Generator) -> list[np.ndarray]:
        (n,) = g.nodes
        d = node_drawing(n, SIZES, None, rng)
        out = []
        for (name, _), v in zip(named_operands(n), n.operands, strict=True):
            kind, shape = DTYPES[v.type.dtype].kind, tuple(int(s.subs(SIZES).const or 0) for s in v.type.shape)
            x = rng.integers(0, self.ints, shape) if kind == "i" and self.ints else d.draw(name, shape, v.type.dtype)
            out.append(x * self.scale if kind == "f" else x)
        return out


# gpt_oss's experts, with limits that drawn values reach.
CLAMPED = "mul(add(max(min(a1, 0.7), -0.7), 1.0), mul(min(a0, 0.7), sigmoid(mul(min(a0, 0.7), 1.702))))"
SQUARED = "mul(max(a0, 0.0), max(a0, 0.0))"  # nemotron_h's experts, which have no gate
SOFTMAX = "div(exp(sub(a0, row_max(a0))), row_sum(exp(sub(a0, row_max(a0)))))"
NORM = "mul(mul(a0, rsqrt(add(row_mean(mul(a0, a0)), 1e-06))), add(a1, 1.0))"
# Products of experts: op, columns, rows, stack (with scales, zero points and bias), attributes.
EXPERTS = (
    ("moe", 37, 14, "f32[5, 14, 37]", ""),
    ("moe", 64, 6, "bf16[5, 6, 64]; f32[5, 6]", ""),
    ("quantized_moe", 133, 14, "i8[5, 14, 133]; f32[5, 14, 1]", "block=[1, 0]"),
    ("quantized_moe", 133, 14, "i8[5, 14, 133]; f16[5, 14, 1]; bf16[5, 14]", 'block=[1, 0], act="i8", act_block=64'),
    ("quantized_moe", 200, 6, "i8[5, 6, 200]; f32[5, 6, 2]", 'block=[1, 128], act="i8", act_block=128'),
    ("quantized_moe", 96, 6, "u8[5, 6, 96]; f32[5, 6, 1]", 'block=[1, 0], zero_point=128, act="i8", act_block=32'),
    ("quantized_moe", 192, 6, "u8[5, 6, 96]; bf16[5, 3, 6]",
     'block=[1, 64], zero_point=8, bits=4, half=32, act="i8", act_block=64'),
    ("quantized_moe", 192, 6, "u8[5, 6, 96]; f32[5, 6, 6]; u8[5, 6, 6]; f32[5, 6]",
     'block=[1, 32], zeros=true, bits=4, half=32, act="i8", act_block=32'),
    ("quantized_moe", 128, 6, "u8[5, 6, 64]; bf16[5, 4, 6]; bf16[5, 6]",
     'block=[1, 32], values="e2m1", bits=4, half=32, act="i8", act_block=32'),
    ("quantized_moe", 70, 6, "u8[5, 6, 70]; bf16[5, 6, 5]", 'block=[1, 16], values="e2m1", bits=4'),
    ("quantized_moe", 128, 6, "u8[5, 6, 64]; f32[5, 2, 6]; f32[5, 2, 6]", "block=[1, 64], zeros=true, bits=4, half=32"),
    ("quantized_moe", 75, 14, "f8e4m3[5, 14, 75]; f32[5, 2, 3]", "block=[8, 32]"),
    ("quantized_moe", 75, 14, "f8e5m2[5, 14, 75]; f32[5, 1, 1]; f32[5, 14]", "block=[0, 0]"),
    ("quantized_moe", 41, 6, "u8[5, 6, 41]; bf16[5, 6, 5]; u8[5, 6, 5]", "block=[1, 9], zeros=true, bits=3"),
)  # fmt: skip


# First products of experts without a gate.
UNGATED = tuple(
    Text(
        f"f32[T, {k}]; i32[2*T]; i32[6]; {stack}", f'{op}_up {{k=2, {rest}body="{SQUARED}"}}', "f32[2*T, 7]", scale=0.1
    )
    for op, k, stack, rest in (
        ("moe", 37, "bf16[5, 7, 37]; f32[5, 7]", ""),
        ("quantized_moe", 133, "i8[5, 7, 133]; f32[5, 7, 1]", 'block=[1, 0], act="i8", act_block=64, '),
        (
            "quantized_moe",
            192,
            "u8[5, 7, 96]; bf16[5, 3, 7]; u8[5, 3, 7]",
            "block=[1, 64], zeros=true, bits=4, half=32, ",
        ),
    )
)


def _with_weights(stack: str) -> str:
    """The operands of moe_down: the weights of the choices follow codes and scales."""
    parts = stack.split("; ")
    scaled = 2 if len(parts) > 1 and parts[1].count(",") == 2 else 1
    return "; ".join([*parts[:scaled], "bf16[T, 2]", *parts[scaled:]])


TEXTS = (
    Text("bf16[T, 67]; bf16[67]", "rms_norm {eps=1e-06}", "bf16[T, 67]"),
    Text("f32[T, 5, 33]; bf16[33]", "rms_norm {eps=1e-05}", "f32[T, 5, 33]"),
    Text("bf16[T, 96]; f32[96]; f32[96]", "layer_norm {eps=1e-05}", "bf16[T, 96]"),
    Text("f16[R, 1]", "softmax {axis=-1}", "f16[R, 1]"),
    Text("f32[4, T, 19]", "softmax {axis=2}", "f32[4, T, 19]", scale=20),
    Text("f32[4, T, 19]", "softmax {axis=1}", "f32[4, T, 19]"),
    Text("bf16[T, 70]; bf16[T, 70]", 'fused {body=["mul(mul(a0, sigmoid(a0)), a1)"], dtypes=["bf16"]}', "bf16[T, 70]"),
    Text("f32[T, 1]; bf16[7, 1, 9]", 'fused {body=["add(a0, a1)"], dtypes=["f32"]}', "f32[7, T, 9]"),
    Text(
        "f32[T, 45]; f32[45]",
        f'fused {{body=["add(a0, 1.0)", "{NORM}"], dtypes=["f32", "bf16"]}}',
        "f32[T, 45], bf16[T, 45]",
    ),
    Text(
        "f32[T, 21]", f'fused {{body=["{SOFTMAX}", "row_mean(a0)"], dtypes=["bf16", "f32"]}}', "bf16[T, 21], f32[T, 1]"
    ),
    Text(
        "f32[3, 4]; f32[4]", 'fused {body=["add(a0, a1)", "mul(a1, 2.0)"], dtypes=["f32", "f32"]}', "f32[3, 4], f32[4]"
    ),
    Text(
        "f32[T, 9]; f32[T, 1]",
        'fused {body=["add(a0, row_sum(a1))", "mul(a0, row_sum(row_sum(a0)))"], dtypes=["f32", "f32"]}',
        "f32[T, 9], f32[T, 9]",
    ),
    Text("f32[1]", 'fused {body=["sub(row_max(a0), row_sum(a0))"], dtypes=["f32"]}', "f32[1]"),
    Text("f32[T, 8]; bool[T, 1]", 'fused {body=["select(a1, a0, -inf)"], dtypes=["f32"]}', "f32[T, 8]"),
    Text(
        "f32[300]; f32[]", 'fused {body=["lt(a0, a1)", "pow(a0, 3.0)"], dtypes=["bool", "f32"]}', "bool[300], f32[300]"
    ),
    Text("i64[T, 9]; i64[9]", "mul", "i64[T, 9]", ints=2**40),
    Text("i32[T]; i32[]", "sub", "i32[T]", ints=2**30),
    Text("i32[T, 1]; i64[1, 7]", "le", "bool[T, 7]", ints=5),
    Text("bool[T, 7]; i32[T, 7]; i32[7]", "where", "i32[T, 7]", ints=99),
    Text("i32[T, 7]", "abs", "i32[T, 7]"),
    Text("bf16[9]; i32[9]", "mul", "bf16[9]"),
    Text("f32[T, 37]", 'cast {dtype="bf16"}', "bf16[T, 37]", scale=1e30),
    Text("bf16[T, 37]", 'cast {dtype="f16"}', "f16[T, 37]", scale=1e-6),
    Text("f16[T, 37]", 'cast {dtype="f32"}', "f32[T, 37]", scale=1e4),
    Text("f32[T, 3]", 'cast {dtype="i32"}', "i32[T, 3]", scale=1e6),
    Text("i64[T, 3]", 'cast {dtype="f32"}', "f32[T, 3]", ints=2**20),
    Text("i32[T, 3]", 'cast {dtype="bool"}', "bool[T, 3]"),
    Text("bool[T, 3]", 'cast {dtype="i64"}', "i64[T, 3]"),
    Text("i32[T, 1]", "broadcast {shape=[4, T, 3]}", "i32[4, T, 3]"),
    Text("bf16[T, 5, 6, 7]", "transpose {perm=[1, 0, 2, 3]}", "bf16[5, T, 6, 7]"),
    Text("f32[5, T, 3]", "transpose {perm=[2, 1, 0]}", "f32[3, T, 5]"),
    Text("bool[1, T, 1, 6]", "transpose {perm=[3, 0, 1, 2]}", "bool[6, 1, T, 1]"),
    Text("i64[T, 10]", "slice {axis=1, start=1, stop=9, step=3}", "i64[T, 3]"),
    Text("bf16[T, 6]", "slice {axis=0, start=T-1, stop=T}", "bf16[1, 6]"),
    Text("bf16[2, T, 33]", "slice {axis=-1, start=16, stop=33}", "bf16[2, T, 17]"),
    Text("f32[T, 3]; f32[T, 5]; f32[T, 1]", "concat {axis=1}", "f32[T, 9]"),
    Text("bf16[T, 3]; bf16[R, 3]", "concat {axis=0}", "bf16[T+R, 3]"),
    Text("bf16[9, 33]; i32[T]", "take", "bf16[T, 33]"),
    Text("i32[9]; i64[2, R]", "take", "i32[2, R]"),
    Text("bf16[9, 33]; i32[T]", "take_part {start=4}", "bf16[T, 33]", ints=27),
    Text("bf16[3, 17, 4, 2]; i32[T]", "packed_take {k=33}", "bf16[T, 33]", ints=12),
    Text("bf16[3, 17, 4, 2]; i32[T]", "packed_take_part {k=33, start=7}", "bf16[T, 33]", ints=40),
    Text("f32[2, 5, 8, 1]; i64[2, R]", "packed_take_part {k=5, start=5*R}", "f32[2, R, 5]", ints=90),
    Text("state bf16[4, 8, 33]; i32[T]", "page_take", "bf16[T, 33]"),
    Text("state bf16[4, 8, 33]; bf16[T, 33]; i32[T]", "page_put", "state bf16[4, 8, 33]"),
    Text("state f32[4, 8, 16]; f32[1, 16]; i32[1]", "page_put", "state f32[4, 8, 16]"),
    Text("bf16[T, 33]; i32[57]", "take_columns", "bf16[T, 57]"),
    Text("f32[2, R, 9]; i64[4]", "take_columns", "f32[2, R, 4]"),
    Text("bf16[5]; i32[300]", "take_columns", "bf16[300]"),
    Text("f32[4, 9, 5]; i32[4, T, 5]", "gather {axis=1}", "f32[4, T, 5]"),
    Text("f32[T, 9]", "reshape {shape=[3, T, 3]}", "f32[3, T, 3]"),
    Text("", 'iota {size=T, dtype="i32"}', "i32[T]"),
    Text("", 'iota {size=6, dtype="bf16"}', "bf16[6]"),
    Text("", 'constant {value=-inf, dtype="bf16"}', "bf16[]"),
    Text("", 'constant {value=1099511627776.0, dtype="i64"}', "i64[]"),
    Text("i32[T, 5, 4]", "sum {axis=1, keepdim=true}", "i32[T, 1, 4]", ints=1000),
    Text("bf16[T, 70]", "mean {axis=-1}", "bf16[T]"),
    Text("f32[T, 9]", "amax {axis=0}", "f32[9]"),
    Text("f32[2, T, 75]", "amax {axis=2}", "f32[2, T]"),
    Text("bf16[2, T, 75]", "amin {axis=-1, keepdim=true}", "bf16[2, T, 1]"),
    Text("f32[75]", "sum {axis=0}", "f32[]"),
    Text("bf16[T, 3]", "sum {axis=0}", "bf16[3]"),
    Text("i64[T, 9]", "amin {axis=-1, keepdim=true}", "i64[T, 1]", ints=50),
    Text("f32[R, 400]", "argmax {axis=-1}", "i64[R]"),
    Text("i32[T, 9]", "argmax {axis=0, keepdim=true}", "i64[1, 9]"),
    Text("i32[3, T]", "cumsum {axis=1}", "i32[3, T]", ints=9),
    Text("bf16[T, 40]", "topk {k=7}", "bf16[T, 7], i64[T, 7]"),
    Text("bf16[R, 700]", "topk {k=20}", "bf16[R, 20], i64[R, 20]"),
    Text("f32[R, 2000]", "topk {k=3}", "f32[R, 3], i64[R, 3]"),
    Text("bf16[R, 640]; i32[R]", "row_logprobs", "f32[R], i32[R], i32[R, 20], f32[R, 20]"),
    Text("f32[2, 7, 21]; f32[2, 21, 41]", "matmul", "f32[2, 7, 41]"),
    Text("bf16[T, 33]; bf16[33, 5]", "matmul", "bf16[T, 5]"),
    Text("bf16[T, 3, 33]; bf16[3, 33, 41]", "head_matmul", "bf16[T, 3, 41]"),
    Text("f32[R, 5, 16]; bf16[5, 16, 70]", "head_matmul", "f32[R, 5, 70]"),
    *(
        Text(f"bf16[T, {k}]; i32[2*T]; i32[6]; {stack}", f"{op}_up {{k=2, {rest}}}", f"bf16[2*T, {m // 2}]", scale=0.1)
        for op, k, m, stack, rest in EXPERTS
    ),
    *(
        Text(
            f"f32[2*T, {k}]; i32[2*T]; i32[6]; {_with_weights(stack)}",
            f"{op}_down {{{rest}}}",
            f"f32[T, 2, {m}]",
            scale=0.1,
        )
        for op, k, m, stack, rest in EXPERTS
    ),
    Text("f32[T, 20]; i32[T, 2]; f32[T, 2]; f32[5, 14, 20]; f32[5, 20, 7]", "moe", "f32[T, 20]"),
    Text(
        "bf16[T, 33]; i64[T, 3]; f32[T, 3]; bf16[4, 10, 33]; bf16[4, 33, 5]",
        'moe {body="mul(max(a0, 0.0), a1)"}',
        "bf16[T, 33]",
    ),
    Text(
        "bf16[T, 33]; i64[T, 3]; f32[T, 3]; bf16[4, 10, 33]; bf16[4, 33, 5]; bf16[4, 10]; bf16[4, 33]",
        f'moe {{body="{CLAMPED}"}}',
        "bf16[T, 33]",
    ),
    Text(
        "bf16[T, 33]; i64[T, 3]; f32[T, 3]; bf16[4, 5, 33]; bf16[4, 33, 5]; bf16[4, 5]; bf16[4, 33]",
        f'moe {{body="{SQUARED}"}}',
        "bf16[T, 33]",
    ),
    Text("f32[T, 4, 10]; f32[T, 2, 10]; f32[T, 2, 6]; i32[T]", "attention {layer=0, scale=0.3}", "f32[T, 4, 6]"),
    Text(
        "bf16[T, 4, 18]; bf16[T, 1, 18]; bf16[T, 1, 18]; i64[T]",
        "attention {layer=0, scale=0.3, causal=false, softcap=5.0}",
        "bf16[T, 4, 18]",
        ints=2,
    ),
    Text(
        "state bf16[4, 2, 2, 4, 12]; f32[1, 2, 12]; f32[1, 2, 12]; i32[1]",
        "kv_append",
        "state bf16[4, 2, 2, 4, 12]",
    ),
    Text("bf16[T, 3, 24]; f32[T, 8]; f32[T, 8]", "rope", "bf16[T, 3, 24]"),
    Text("f32[T, 2, 34]; f32[T, 17]; f32[T, 17]", "rope {interleaved=true}", "f32[T, 2, 34]"),
    Text("f32[20]; i32[T]", 'rope_tables {scaling=1.5, dtype="bf16"}', "bf16[T, 20], bf16[T, 20]", ints=5000),
)


def of_ops(kernels: list[Kernel], target: Target) -> Iterator[Case]:
    """Every op's own example, in each float dtype, on every kernel that takes it, under every schedule."""
    rng = np.random.default_rng(0)
    for name, op in OPS.items():
        for dtype in ("f32", "bf16"):
            arrays, attrs = op_example(op, rng)
            g = example_graph(op, arrays, attrs, dtype).graphs["main"]
            yield from _cases(f"{name}-{dtype}", g, arrays, kernels, target)


def of_texts(kernels: list[Kernel], target: Target) -> Iterator[Case]:
    """Yield the texts above, each with operands drawn from its own seed."""
    for i, t in enumerate(TEXTS):
        g = t.graph()
        inputs = t.inputs(g, np.random.default_rng(i))
        yield from _cases(f"{t.call.split()[0]}-{i}", g, inputs, kernels, target)


def _random_body(rng: random.Random, count: int, depth: int) -> str:
    """An expression over a0 .. a{count-1} whose values stay moderate."""
    if depth == 0 or rng.random() < 0.1:
        return f"a{rng.randrange(count)}"
    part = [_random_body(rng, count, depth - 1) for _ in range(3)]
    return rng.choice(
        [
            f"add({part[0]}, {part[1]})",
            f"sub({part[0]}, {part[1]})",
            f"mul(sigmoid({part[0]}), {part[1]})",
            f"max({part[0]}, {part[1]})",
            f"tanh({part[0]})",
            f"exp(min({part[0]}, 1.0))",
            f"select(gt({part[0]}, {part[1]}), {part[2]}, 0.5)",
            f"row_mean({part[0]})",
            f"row_max({part[0]})",
            f"sub({part[0]}, row_max({part[1]}))",
            f"div({part[0]}, add(row_sum(abs({part[1]})), 1.0))",
        ]
    )


def of_random(kernels: list[Kernel], target: Target, count: int = 40) -> Iterator[Case]:
    """Random `fused` groups over randomly broadcast operands."""
    for seed in range(count):
        rng = random.Random(seed)
        space = ["T", "3", rng.choice(["1", "8", "19", "70"])]
        types = []
        for i in range(rng.randint(1, 3)):
            dims = [d if i == 0 or rng.random() < 0.7 else "1" for d in space]
            types.append(f"{rng.choice(['f32', 'bf16'])}[{', '.join(dims[rng.randint(0, 2) if i else 0 :])}]")
        bodies = [f"add(a0, {_random_body(rng, len(types), 4)})" for _ in range(rng.randint(1, 2))]
        dtypes = [rng.choice(["f32", "bf16"]) for _ in bodies]
        quoted = [", ".join(f'"{x}"' for x in part) for part in (bodies, dtypes)]
        results = ", ".join(f"{d}[{', '.join(space)}]" for d in dtypes)
        t = Text("; ".join(types), f"fused {{body=[{quoted[0]}], dtypes=[{quoted[1]}]}}", results)
        g = t.graph()
        yield from _cases(f"random-{seed}", g, t.inputs(g, np.random.default_rng(seed)), kernels, target)


def _cases(name: str, g: Graph, inputs: list[np.ndarray], kernels: list[Kernel], target: Target) -> Iterator[Case]:
    (node,) = g.nodes
    claiming = [k for k in kernels if k.claims(node) and k.reject(node, target) is None]
    # Terms as large as the largest result may cancel in another one: 2 ** -22 of it is four roundings to float32.
    wanted = run(g, inputs, bind_symbols(g, inputs, SIZES)) if claiming else []
    floats = [np.abs(w[np.isfinite(w)]).max(initial=0.0) for w in wanted if w.dtype.kind == "f"]
    cancelled = 2.0**-22 * max(floats, default=0.0)
    for k in claiming:
        atol = (
            cancelled + 2e-2 if k.name in ROUGH and any(v.type.dtype == "bf16" for v in g.inputs) else cancelled + 2e-5
        )
        for i, schedule in enumerate(k.schedules(node, target)):
            yield Case(f"{name}-{k.name}-{i}", g, k, schedule, inputs, rtol=2e-5, atol=atol, sizes=SIZES)
