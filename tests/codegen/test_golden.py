"""Golden files of a few kernels and of a step unit, so that changes of generated code show up as diffs.

After an intended change: LLMC_GOLDEN=write python -m pytest tests/codegen/test_golden.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmc.codegen.backends.cpp.cpp_kernel import without_headers
from llmc.codegen.backends.cpp.step_unit import LaunchTable, StepTable, step_unit
from llmc.codegen.select import Select
from llmc.extension import load
from llmc.ir.dim import D
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.passes.base import Ctx

GOLDEN = Path(__file__).parent / "golden"
NODES = {
    "rms_norm": ("%x: bf16[T, 896], %w: weight bf16[896]", "rms_norm(%x, %w) {eps=1e-06} : bf16[T, 896]"),
    "softmax": ("%x: f32[4, T, 100]", "softmax(%x) : f32[4, T, 100]"),
    "scale": ("%x: bf16[T, 14, 64], %y: f32[T, 1, 64]", "mul(%x, %y) : f32[T, 14, 64]"),
    "positions": ("%x: i64[T], %y: i64[]", "le(%x, %y) : bool[T]"),
    "transpose": ("%x: bf16[T, 14, 64]", "transpose(%x) {perm=[1, 0, 2]} : bf16[14, T, 64]"),
    "sample": (
        "%l: f32[R, 320], %r: i32[R], %s: i32[R+1], %n: i32[T], %t: state i32[8, 64], %f: state f32[8, 8],"
        " %i: state i32[8, 8]",
        "row_sample(%l, %r, %s, %n, %t, %f, %i) : i32[R]",
    ),
    "product": (
        "%x: bf16[T, 66], %w: weight bf16[5, 33, 32, 2], %b: f32[70], %r: bf16[T, 70]",
        'packed_linear(%x, %w, %b, %r) {n=70, parts=2, body="add(mul(mul(a0, sigmoid(a0)), add(a1, a2)), a3)"}'
        " : bf16[T, 70]",
    ),
    "attention": (
        "%q: bf16[T, 14, 64], %kv: state bf16[P, 2, 2, 16, 64], %p: state i32[8, 64], %r: i32[R], %s: i32[R+1],"
        " %n: i32[T], %z: f32[14]",
        "paged_attention(%q, %kv, %p, %r, %s, %n, %z) {scale=0.125, window=128} : bf16[T, 14, 64]",
    ),
}


def source(name: str) -> str:
    inputs, node = NODES[name]
    symbols = "sym T in [1, 64]\nsym R in [1, 8]\nsym P in [1, 99]\n"
    m = parse(f"{symbols}graph @main({inputs}) {{\n  %out = {node}\n  return %out\n}}", OPS)
    kernels, t = load().kernels, load().target("cpu:x86-64-v4")
    Select().run(m, Ctx(OPS, t, kernels))
    (n,) = m.graphs["main"].nodes
    return kernels[n.choice["kernel"]].emit(n, {k: v for k, v in n.choice.items() if k != "kernel"}, t).text


def unit() -> str:
    launches = (
        LaunchTable((0, 2), (D("T"), D("ceil(2*T, 16)*4+1")), True),
        LaunchTable((1, 3), (), False),
        LaunchTable((2, 3, 4), (D("T"), D("ceil(2*T, 16)*4+1")), True),
    )
    return step_unit([StepTable("step", ("T", "R", "P"), launches, 1000)])


@pytest.mark.parametrize("name", [*NODES, "step"])
def test_source(name: str) -> None:
    text = without_headers(unit() if name == "step" else source(name))
    path = GOLDEN / f"{name}.cpp"
    if os.environ.get("LLMC_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} changed; to accept it: LLMC_GOLDEN=write, and read git diff"


def test_sources_are_self_contained() -> None:
    for name in NODES:
        assert '#include "' not in source(name)
    assert '#include "' not in unit()
