"""One body over every op: shapes, text round trip, cost, and agreement with its torch oracle."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draw import generator

from llmc.ir.cost import node_cost
from llmc.ir.dtype import DTYPES
from llmc.ir.example import example_graph, op_example
from llmc.ir.graph import Graph
from llmc.ir.interp import run
from llmc.ir.opdef import op
from llmc.ir.ops import OPS
from llmc.ir.ops.packed_quantized import unpack_codes
from llmc.ir.ops.quantize import FLOAT_CODES
from llmc.ir.scalar import evaluate, parse_expr
from llmc.ir.signature import Mismatch
from llmc.ir.text import parse, show
from llmc.ir.types import state, tensor
from llmc.ir.verify import verify
from llmc.ir.weight_eval import Blocks

torch = pytest.importorskip("torch")

# How an op's attributes are spelled as the oracle's keywords.
KEYWORDS = {"axis": "dim", "keepdim": "keepdim", "perm": "dims", "eps": "eps", "k": "k"}


def call_oracle(name: str, arrays: list[Any], attrs: dict[str, Any]) -> list[np.ndarray]:
    module, _, attribute = name.rpartition(".")
    fn = getattr(importlib.import_module(module), attribute)
    args = [torch.as_tensor(np.asarray(a)) for a in arrays]
    kwargs = {KEYWORDS[k]: v for k, v in attrs.items()}
    if attribute == "embedding":
        args = args if name == "torch.embedding" else args[::-1]
    if attribute in ("rms_norm", "layer_norm"):
        args.insert(1, args[0].shape[-1:])
    if attribute == "gather":
        args = [args[0], kwargs.pop("dim"), args[1]]
    out = fn(*args, **kwargs)
    return [t.numpy() for t in (out if isinstance(out, tuple) else (out,))]


@pytest.mark.parametrize("name", OPS)
def test_op(name: str) -> None:
    op = OPS[name]
    rng = generator()
    arrays, attrs = op_example(op, rng)
    m = example_graph(op, arrays, attrs)
    g = m.graphs["main"]
    verify(m)
    text = show(m)
    assert show(parse(text, OPS)) == text

    out = run(g, arrays)
    assert [o.shape for o in out] == [tuple(d.const for d in v.type.shape) for v in g.outputs]
    minus_infinite = (
        "row_mask",
        "row_block_max",
        "paged_attention_split",
        "paged_attention_parts",
        "paged_latent_attention_split",
    )  # of masked ids, of padding rows
    assert all(np.isfinite(o).all() or name in minus_infinite for o in out)

    flops, moved = node_cost(next(iter(g.nodes)))
    assert flops.const is not None and moved.const is not None and moved.const >= 0
    assert op.doc, "every op says what it computes"

    if op.oracle:
        exact = run(g, arrays, exact=True)
        wide = [np.float64(a) if np.asarray(a).dtype.kind == "f" else a for a in arrays]
        for got, want in zip(exact, call_oracle(op.oracle, wide, attrs), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_every_float_op_has_an_oracle_or_a_reason() -> None:
    """Ops without a torch counterpart are ours: states, rows, rotary embedding, attention, experts, groups."""
    ours = {"constant", "cast", "iota", "fused", "broadcast", "reshape", "slice", "concat", "matmul", "linear_map"}
    ours |= {"rope", "rope_tables", "attention", "paged_attention", "moe", "kv_append", "gelu_tanh", "page_put"}
    ours |= {"page_take", "head_matmul"}
    ours |= {"causal_conv", "linear_recurrence", "chunk_factors", "chunk_recurrence", "chunk_recurrence_draft"}
    ours |= {"alibi_attention", "paged_alibi_attention"}
    ours |= {"latent_attention", "paged_latent_attention", "paged_latent_attention_split"}
    ours |= {"rope_append", "norm_linear", "paged_attention_split", "paged_attention_parts", "attention_combine"}
    ours |= {"paged_attention_single", "unpack_bits", "take_columns", "bitcast", "dequantize"}
    ours |= {
        "moe_route",
        "moe_up",
        "moe_down",
        "moe_combine",
        "moe_gather_up",
        "norm_moe_gather_up",
        "moe_gather_down",
        "topk_map",
        "topk_route",
        "linear_split",
        "linear_combine",
    }
    ours |= {"quantized_linear", "quantized_moe_up", "quantized_moe_down", "scaled_moe_up", "scaled_moe_down"}
    ours |= {"fragments_moe_up", "fragments_moe_down"}
    ours |= {"block_scaled_linear", "round_groups", "norm_quantized_linear", "norm_fragments_linear"}
    ours |= {"quantize", "quantize_scale", "quantize_code", "assemble", "argsort", "fnuz_codes"}
    ours |= {"all_reduce", "all_reduce_add", "all_reduce_norm", "all_gather", "take_part"}
    without = {n for n, o in OPS.items() if not o.oracle and not n.startswith("row_")}
    assert without - ours == {n for n in without if n.startswith(("pack", "packed"))}


def test_gelu_tanh_agrees_with_torch() -> None:
    x = np.linspace(-4, 4, 33)
    want = torch.nn.functional.gelu(torch.as_tensor(x), approximate="tanh").numpy()
    np.testing.assert_allclose(OPS["gelu_tanh"].ref(x), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [n for n, o in OPS.items() if o.scalar and o.attrs])
def test_row_expression_is_the_reference(name: str) -> None:
    from llmc.ir.ops.common import NUMPY

    op = OPS[name]
    arrays, attrs = op_example(op, generator())
    if name == "softmax":
        attrs = {"axis": -1}
    e = op.scalar(op.normal_attrs(attrs))
    assert parse_expr(str(e)) == e
    np.testing.assert_allclose(evaluate(e, NUMPY, arrays), op.ref(*arrays, **attrs), rtol=1e-4, atol=1e-5)


def test_attention_agrees_with_torch() -> None:
    rng = generator()
    q, k, v = (rng.standard_normal((9, h, 8)) for h in (4, 2, 2))
    got = OPS["attention"].ref(q, k, v, np.arange(9), layer=0, scale=0.3)
    t = [torch.as_tensor(np.repeat(x, 4 // x.shape[1], 1).transpose(1, 0, 2)) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*t, is_causal=True, scale=0.3).numpy()
    np.testing.assert_allclose(got, want.transpose(1, 0, 2), rtol=1e-9, atol=1e-12)


def test_paged_attention_is_attention_over_pages() -> None:
    rng = generator()
    q, k, v = (rng.standard_normal((7, h, 8)) for h in (4, 2, 2))
    kv = rng.standard_normal((5, 2, 2, 3, 8))
    pages = np.array([[0, 0, 0], [4, 1, 3]], np.int32)
    slots = pages[1, np.arange(7) // 3] * 3 + np.arange(7) % 3
    kv = OPS["kv_append"].ref(kv, k, v, slots)
    rows, starts = np.array([1], np.int32), np.array([0, 7], np.int32)
    got = OPS["paged_attention"].ref(q, kv, pages, rows, starts, np.arange(7), scale=0.3, window=4, softcap=5.0)
    want = OPS["attention"].ref(q, k, v, np.arange(7), layer=0, scale=0.3, window=4, softcap=5.0)
    np.testing.assert_allclose(got, want, rtol=1e-9)


def test_latent_attention_is_attention_with_one_key_head() -> None:
    """Over a prompt, over pages, and in parts; and the parts of a row, combined, are its attention."""
    rng = generator()
    q, rotary, k = rng.standard_normal((7, 4, 8)), rng.standard_normal((7, 4, 3)), rng.standard_normal((7, 11))
    want = OPS["attention"].ref(
        np.concatenate([q, rotary], 2), k[:, None], k[:, None, :8], np.arange(7), layer=0, scale=0.3
    )
    got = OPS["latent_attention"].ref(q, rotary, k, np.arange(7), layer=0, scale=0.3)
    np.testing.assert_allclose(got, want, rtol=1e-9)
    pages = np.array([[0, 0, 0], [4, 1, 3]], np.int32)
    slots = pages[1, np.arange(7) // 3] * 3 + np.arange(7) % 3
    pool = OPS["page_put"].ref(np.full((5, 3, 11), np.nan), k, slots)
    rows, starts = np.array([1], np.int32), np.array([0, 7], np.int32)
    paged = OPS["paged_latent_attention"].ref(q, rotary, pool, pages, rows, starts, np.arange(7), scale=0.3)
    np.testing.assert_allclose(paged, want, rtol=1e-9)
    each = np.full(7, 1, np.int32)
    for splits in (1, 2, 5):
        parts = OPS["paged_latent_attention_split"].ref(
            q, rotary, pool, pages, each, np.arange(7), scale=0.3, splits=splits
        )
        np.testing.assert_allclose(OPS["attention_combine"].ref(*parts, dtype="f32"), want, rtol=1e-9)


def pooled(dtype: str, scaled: bool) -> Graph:
    """An append to a pool of the dtype."""
    g = Graph("main")
    kv, k = g.input("kv", state(dtype, 2, 2, 2, 2, 4)), g.input("k", tensor("f32", 3, 2, 4))
    scales = [g.input("scales", tensor("f32", 4))] if scaled else []
    g.outputs = list(g.add(OPS["kv_append"], [kv, k, k, g.input("slots", tensor("i32", 3)), *scales]).results)
    return g


def test_scales_exist_only_with_pools_of_8_bit_floats() -> None:
    assert pooled("bf16", False).outputs and pooled("f8e4m3", True).outputs
    with pytest.raises(Mismatch, match="takes 4 operands, not 5"):
        pooled("bf16", True)
    with pytest.raises(Mismatch, match="takes 5 operands, not 4"):
        pooled("f8e4m3", False)


def test_pools_of_8_bit_floats_saturate() -> None:
    k = np.array([[[1.0, -500, 1e6, 0.3]] * 2] * 3, np.float32)
    (kv,) = run(pooled("f8e4m3", True), [np.zeros((2, 2, 2, 2, 4)), k, np.array([1, 0.5, 2, 1000]), np.arange(3)])
    assert kv[0, 0, 0, 0].tolist() == [1, -448, 448, 0.3125]  # a key of the first head
    assert kv[0, 0, 1, 0].tolist() == [2, -448, 448, 0.625]
    assert kv[0, 1, 1, 0].tolist() == [2**-9 * round(0.001 * 2**9), -0.5, 448, 0.0]  # a value of the second
    assert np.isfinite(kv).all() and not kv[1, :, :, 1].any()
    (kv,) = run(pooled("f8e4m3fnuz", True), [np.zeros((2, 2, 2, 2, 4)), k, np.array([1, 0.5, 2, 1000]), np.arange(3)])
    assert kv[0, 0, 0, 0].tolist() == [1, -240, 240, 0.3125] and np.isfinite(kv).all()


def test_fnuz_codes_are_the_halves_of_all_codes() -> None:
    """All 256, computed whole and, as weights are, by rows: bits stay, except those of NaN and of -0."""
    g = Graph("weights")
    x = g.input("x", tensor("f8e4m3", 16, 16), weight=True)
    g.outputs = [g.add(OPS["fnuz_codes"], [x]).result]
    octets = np.arange(256, dtype=np.uint8).reshape(16, 16)
    stored = octets.view(DTYPES["f8e4m3"].np)
    (whole,) = run(g, [stored.astype(np.float32)])
    np.testing.assert_array_equal(whole, stored.astype(np.float32) / 2)
    rows = Blocks(g, SimpleNamespace(read=lambda name, rows: stored[rows])).rows(g.outputs[0], 3, 16)
    np.testing.assert_array_equal(rows.view(DTYPES["f8e4m3fnuz"].np).astype(np.float32), whole[3:])
    changed = {int(a): int(b) for a, b in zip(octets[3:].ravel(), rows.ravel(), strict=True) if a != b}
    assert changed == {0x7F: 0x80, 0x80: 0, 0xFF: 0x80}
    assert all(DTYPES[dtype].largest == largest for dtype, largest in FLOAT_CODES.items())


def test_rows_of_one_token_are_what_the_others_attention_leaves_out() -> None:
    rng = generator()
    q, kv = rng.standard_normal((11, 4, 8)), rng.standard_normal((9, 2, 2, 3, 8))
    pages = rng.permutation(9).reshape(3, 3)
    rows, starts = np.array([1, 0, -1, 2], np.int32), np.array([0, 1, 7, 8, 9], np.int32)
    positions = np.array([6, 0, 1, 2, 3, 4, 5, 0, 8, -1, -1])
    given = (q, kv, pages, rows, starts, positions)
    attrs = {"scale": 0.3, "window": 4, "softcap": 5.0}
    many = OPS["paged_attention"].ref(*given, **attrs, least=2)
    assert not many[[0, 7, 8, 9, 10]].any() and many[1:7].all()
    got = OPS["paged_attention_single"].ref(*given, many, **attrs)
    np.testing.assert_array_equal(got, OPS["paged_attention"].ref(*given, **attrs))
    kept = OPS["paged_attention_single"].ref(*given, np.full_like(q, 3.0), **attrs)
    assert (kept[[1, 2, 3, 4, 5, 6, 7, 9, 10]] == 3.0).all() and (kept[[0, 8]] != 3.0).all()


@pytest.mark.parametrize(("dtype", "bits"), [("u8", 4), ("u8", 8), ("i8", 8)])
def test_packed_codes_are_the_codes(dtype: str, bits: int) -> None:
    low, high = (-128, 128) if dtype == "i8" else (0, 1 << bits)
    code = generator().integers(low, high, (5, 41)).astype(np.int8 if dtype == "i8" else np.uint8)
    packed = OPS["pack_codes"].ref(code, bits=bits)
    assert packed.shape == (5, 64 * bits // 8) and packed.dtype == (np.uint8 if bits == 4 else np.int8)
    want = code.astype(int) - (128 if (dtype, bits) == ("u8", 8) else 0)
    np.testing.assert_array_equal(unpack_codes(packed, bits, 41).astype(int), want)
    assert not unpack_codes(packed, bits, 64)[:, 41:].any()


def test_interpreter_rounds_at_op_boundaries() -> None:
    m = parse("graph @g(%x: bf16[3]) {\n %y = add(%x, %x) : bf16[3]\n return %y\n}\n", OPS)
    (y,) = run(m.graphs["g"], [np.array([1.001, 1 / 3, 3.14159])])
    assert np.array_equal(y, np.float32([2.0, 0.66796875, 6.28125]))


def test_traits_follow_from_declarations() -> None:
    """Which axes an op works along, and whether it is row-wise or elementwise, also for ops of other packages."""

    @op("(x: f[*b, m, k], w: f[k]) -> x[*b, m, k]")
    def both(x: Any, w: Any) -> Any:
        """Mix the last two axes."""
        return x

    @op("(x: f[*s], w: f[d]) -> x[*s]")
    def flip(x: Any, w: Any) -> Any:
        """Mix elements without saying along which axis."""
        return x

    @op("(x: f[*s], y: f[*s]) -> x[*s]", elementwise=True)
    def joined(x: Any, y: Any) -> Any:
        """Combine elements at the same place."""
        return x + y

    assert both.row_wise and both.axes({}) == (-2, -1)
    assert [both.leading(slot) for slot in both.operands] == ["*b", None]
    assert not flip.row_wise and not flip.elementwise and flip.axes({}) == ()
    assert joined.elementwise and not joined.row_wise
    assert OPS["matmul"].axes({}) == OPS["rms_norm"].axes({}) == (-1,) and OPS["sum"].axes({"axis": 1}) == (1,)
    by_rows = {"topk", "topk_map", "linear", "matmul", "rms_norm", "layer_norm", "take_columns", "dequantize"}
    by_rows |= {"quantize", "quantize_code", "assemble"}
    assert {name for name, one in OPS.items() if one.row_wise} == by_rows
    assert {name for name, one in OPS.items() if one.elementwise} == {"cast"}


@pytest.mark.parametrize("more", [{"flops": "4*z*d"}, {"bytes": "z*bytes_x"}, {"flops": "bytes_w"}])
def test_a_cost_with_an_unknown_name_is_refused_when_the_op_is_declared(more: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="known names: bytes_x, d, n, out, scale"):

        @op("(x: f[n, d]) -> x[n, d]", **more)
        def mine(x: Any, *, scale: int) -> Any:
            """An op."""
            return x


@pytest.mark.parametrize(
    ("signature", "fault"),
    [
        ("(x: f[n, d], starts: i[r+1]) -> x[r, d]", r"r\+1 of operand starts uses r, which no size before it binds"),
        ("(x: f[n], y f[n]) -> x[n]", "'y' is not an operand or a result"),
        ("(x: f[n]) x[n]", "has no ->"),
    ],
)
def test_a_malformed_signature_is_refused_when_the_op_is_declared(signature: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        op(signature, flops="0")
