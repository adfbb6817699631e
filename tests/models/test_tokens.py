"""Only attention mixes tokens: graphs in which another op does are refused with an error that names it."""

from __future__ import annotations

import pytest

from llmc.diagnostics import Diagnostic
from llmc.frontend.trace_model import check_tokens
from llmc.ir.dim import D
from llmc.ir.graph import Builder, Graph
from llmc.ir.ops import OPS
from llmc.ir.types import tensor

APART = {
    "norm": lambda b, x, last: b.rms_norm(x, b.broadcast(b.constant(1.0, "f32"), shape=[8]), eps=1e-6),
    "within a token": lambda b, x, last: b.cumsum(b.slice(x, axis=1, start=0, stop=4, step=1), axis=-1),
    "heads": lambda b, x, last: b.transpose(b.reshape(x, shape=[D("T"), 2, 4]), perm=(1, 0, 2)),
    "unit axis": lambda b, x, last: b.reshape(x, shape=[1, D("T"), 8]),
    "experts": lambda b, x, last: b.reshape(x, shape=[D("T") * 2, 4]),
    "last": lambda b, x, last: b.take(x, last),
}
JOINED = {
    "mean": lambda b, x, last: b.mean(x, axis=0, keepdim=True),
    "softmax": lambda b, x, last: b.softmax(b.transpose(x, perm=(1, 0)), axis=-1),
    "cumsum": lambda b, x, last: b.cumsum(x, axis=0),
    "slice": lambda b, x, last: b.slice(x, axis=0, start=1, stop=D("T"), step=1),
    "concat": lambda b, x, last: b.concat(x, x, axis=0),
    "matmul": lambda b, x, last: b.matmul(x, b.transpose(x, perm=(1, 0))),
    "iota": lambda b, x, last: b.iota(size=D("T"), dtype="i32"),
    "reshape": lambda b, x, last: b.reshape(b.transpose(x, perm=(1, 0)), shape=[D("T") * 8]),
    "take": lambda b, x, last: b.take(x, b.cast(b.argmax(x, axis=-1, keepdim=False), dtype="i32")),
}


def graph(rule: object) -> Graph:
    g = Graph("main")
    x, last = g.input("x", tensor("f32", "T", 8)), g.input("last", tensor("i32", "R"))
    b = Builder(g, OPS, loc="model.layers.3")
    g.outputs = [rule(b, x, last)]  # type: ignore[operator]
    return g


@pytest.mark.parametrize("name", APART)
def test_apart(name: str) -> None:
    check_tokens(graph(APART[name]), "X")


@pytest.mark.parametrize("name", JOINED)
def test_joined(name: str) -> None:
    with pytest.raises(Diagnostic, match=rf"E305: model.layers.3: X joins tokens .*: {name} ") as e:
        check_tokens(graph(JOINED[name]), "X")
    assert len(str(e.value).splitlines()) == 2
