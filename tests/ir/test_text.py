"""Dims, expressions and modules parse back to what was printed; errors of invalid text and graphs name the place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.diagnostics import Diagnostic
from llmc.ir.digest import digest, node_digest
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Builder, Graph, Module
from llmc.ir.ops import OPS
from llmc.ir.qformat import QFormat, parse_qformat
from llmc.ir.scalar import ARITY, E, parse_expr
from llmc.ir.text import parse, show
from llmc.ir.types import Type, parse_type, tensor
from llmc.ir.verify import verify

leaf = st.one_of(st.integers(-50, 50).map(D), st.sampled_from("TRNP").map(D))
dims = st.recursive(
    leaf,
    lambda d: st.one_of(
        st.tuples(d, d).map(lambda p: p[0] + p[1]),
        st.tuples(d, d).map(lambda p: p[0] * p[1]),
        st.tuples(d, st.integers(1, 9)).map(lambda p: p[0].ceildiv(p[1])),
    ),
    max_leaves=6,
)
sizes = st.fixed_dictionaries({s: st.integers(1, 40) for s in "TRNP"})


@given(dims, sizes)
def test_dim_text_and_value(d: Dim, env: dict[str, int]) -> None:
    assert D(str(d)) == d
    value = d.subs(env).const
    lo, hi = d.bounds(dict.fromkeys(env, (1, 40)))
    assert value is not None and lo <= value <= hi


@given(dims, dims, st.integers(1, 9), sizes)
def test_dim_arithmetic(a: Dim, b: Dim, n: int, env: dict[str, int]) -> None:
    x, y = a.subs(env).const, b.subs(env).const
    assert (a + b).subs(env).const == x + y
    assert (a - b).subs(env).const == x - y
    assert (a * b).subs(env).const == x * y
    assert a.ceildiv(n).subs(env).const == -(-x // n)
    if a.divisible(n):
        assert x % n == 0
    if (q := (a * n).divide(n)) is not None:
        assert q == a


@pytest.mark.parametrize("text", ["", "T+", "3..2", "ceil(T)", "ceil(T, R)", "(T", "T T", "T/2"])
def test_bad_dim(text: str) -> None:
    with pytest.raises(ValueError):
        D(text)


exprs = st.recursive(
    st.one_of(st.integers(0, 3).map(lambda i: E("arg", (i,))), st.floats(-9, 9).map(lambda f: E("const", (f,)))),
    lambda e: st.sampled_from(sorted(dict(ARITY))).flatmap(
        lambda fn: st.tuples(*[e] * dict(ARITY)[fn]).map(lambda args: E(fn, args))
    ),
    max_leaves=8,
)


@given(exprs)
def test_expression_text(e: E) -> None:
    assert parse_expr(str(e)) == e


UNARY = ("neg", "silu", "square", "exp")
BINARY = ("add", "mul", "sub", "maximum")


@st.composite
def modules(draw: st.DrawFn) -> Module:
    m = Module({}, {"T": (1, 64)})
    g = m.graphs["main"] = Graph("main", ranges=draw(st.sampled_from([{}, {"T": (2, 9)}])))
    values = [
        g.input(f"model.w.{i}" if i else "x", tensor(draw(st.sampled_from(["f32", "bf16"])), "T", 4), i > 0)
        for i in range(3)
    ]
    for i in range(draw(st.integers(0, 8))):
        b = Builder(g, OPS, loc=draw(st.sampled_from(["", "model.layers.0.mlp"])))
        name = draw(st.sampled_from([*UNARY, *BINARY, "slice", "cast", "constant"]))
        x = values[draw(st.integers(0, len(values) - 1))]
        if name in UNARY:
            v = getattr(b, name)(x)
        elif name in BINARY:
            same = [y for y in values if y.type.shape == x.type.shape]
            v = getattr(b, name)(x, draw(st.sampled_from(same)))
        elif name == "slice":
            v = b.slice(x, axis=0, start=0, stop=x.type.shape[0]) if x.type.rank else b.neg(x)
        elif name == "cast":
            v = b.cast(x, dtype=draw(st.sampled_from(["f32", "i32", "bf16"])))
            v = b.cast(v, dtype="f32")
        else:
            v = b.constant(draw(st.floats(allow_nan=False)), "f32")
        v.name = draw(st.sampled_from(["", "", "h", "x", f"v{i}"]))
        values.append(v)
    g.outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    return m


@given(modules())
def test_module_text(m: Module) -> None:
    text = show(m)
    back = parse(text, OPS)
    verify(back)
    assert show(back) == text
    assert digest(back.graphs["main"]) == digest(m.graphs["main"])
    assert show(m.clone()) == text


def test_digest_ignores_names_and_sees_attributes() -> None:
    text = "graph @g(%x: f32[4]) {\n %y = rms_norm(%x, %x) {eps=1e-05} : f32[4]  // a.b\n return %y\n}\n"
    a, b = (parse(t, OPS).graphs["g"] for t in (text, text.replace("%y", "%z").replace("a.b", "c")))
    other = parse(text.replace("1e-05", "1e-06"), OPS).graphs["g"]
    assert digest(a) == digest(b) != digest(other)
    first, second = next(iter(a.nodes)), next(iter(other.nodes))
    assert node_digest(first) != node_digest(second)


def test_quantised_type_is_data() -> None:
    f = QFormat("w4g128", "u4", (1, 128), "f16", "8", logical="bf16")
    assert parse_qformat(str(f)) == f
    t = parse_type("w4g128[11008, 4096]", {"w4g128": f})
    assert isinstance(t, Type) and t.format is f and t.dtype == "bf16" and str(t) == "w4g128[11008, 4096]"
    assert t.nbytes == 11008 * 4096 // 2 + 11008 * 32 * 2
    assert f.parts(t.shape)["scale"] == ("f16", (D(11008), D(32)))
    book = QFormat("nf4", "u4", (1, 64), "f32", table=(-1.0, 0.0, 1.0))
    assert parse_qformat(str(book)) == book
    body = "graph @g(%x: bf16[3, 256], %w: weight w4g128[8, 256]) {\n  %y = linear(%x, %w) : bf16[3, 8]\n"
    text = f"{f}\n{body}  return %y\n}}\n"
    assert show(parse(text, OPS)).split() == text.split()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("%y = nope(%x) : f32[4]", "unknown op 'nope'"),
        ("%y = neg(%z) : f32[4]", "%z is not defined before its use"),
        ("%y = neg(%x) : f32[5]", "the type rule gives f32[4], the text declares f32[5]"),
        ("%y = neg(%x) {a=1} : f32[4]", "neg has no attribute 'a'"),
        ("%y = mean(%x) : f32[]", "mean needs the attribute 'axis'"),
        ("%y = add(%x) : f32[4]", "add takes 2 operands, not 1"),
        ("%y = linear(%x, %x) : f32[4]", "linear: operand w: f32[4] does not fit fq[n, k]: wrong rank"),
        ("%y = neg(%x) : w9[4]", "'w9' is neither a dtype nor a format"),
        ("what", "cannot read"),
    ],
)
def test_refused_text(body: str, why: str) -> None:
    with pytest.raises(Diagnostic) as e:
        parse(f"graph @g(%x: f32[4]) {{\n  {body}\n  return %x\n}}\n", OPS)
    assert why in str(e.value) and "line 2" in str(e.value)


def test_stale_state_is_refused() -> None:
    m = Module({}, {"T": (1, 8), "P": (1, 8)})
    g = m.graphs["g"] = Graph("g")
    kv = g.input("kv", parse_type("state f32[P, 2, 2, 4, 8]"))
    k, slots = g.input("k", tensor("f32", "T", 2, 8)), g.input("slots", tensor("i32", "T"))
    b = Builder(g, OPS)
    first = b.kv_append(kv, k, k, slots)
    g.outputs = [first]
    verify(m)
    g.outputs = [b.kv_append(kv, k, k, slots), first]
    with pytest.raises(Diagnostic, match="%kv was overwritten by kv_append"):
        verify(m)


def test_broken_graphs_are_refused() -> None:
    m = parse("graph @g(%x: f32[4]) {\n %y = neg(%x) : f32[4]\n %z = exp(%y) : f32[4]\n return %z\n}\n", OPS)
    g = m.graphs["g"]
    last = g.nodes.tail
    assert last is not None
    g.move_before(last, g.nodes.head)
    with pytest.raises(Diagnostic, match=r"exp \(no loc\): %y is used before it is computed"):
        verify(m)
    last.operands[0].name = ""  # as a pass leaves new values
    with pytest.raises(Diagnostic, match=r"the result of neg \(no loc\) is used before it is computed"):
        verify(m)
    g.move_before(last, None)
    g.inputs[0].uses.clear()
    with pytest.raises(Diagnostic, match="use list"):
        verify(m)


def test_graph_editing_keeps_use_lists() -> None:
    m = parse("graph @g(%x: f32[4]) {\n %y = neg(%x) : f32[4]\n %z = add(%y, %y) : f32[4]\n return %z, %y\n}\n", OPS)
    g = m.graphs["g"]
    y = g.nodes.head.result
    g.replace(y, Builder(g, OPS, before=y.node).exp(g.inputs[0]))
    verify(m)
    assert not g.is_used(y.node)
    g.erase(y.node)
    verify(m)
    assert len(g.nodes) == 2 and np.size(g.outputs) == 2
