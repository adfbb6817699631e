"""The generated parts of docs/ are what the declarations say; `python tests/test_docs.py` writes them anew."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llmc.ir.dtype import DTYPES
from llmc.ir.example import op_example
from llmc.ir.opdef import REQUIRED, Attr, OpDef
from llmc.ir.ops import OPS, op_set
from llmc.ir.scalar import BINARY, REDUCTIONS, UNARY
from llmc.ir.text import show_attr

DOCS = Path(__file__).resolve().parent.parent / "docs"
ROOMS = ("pointwise", "reduce", "shape", "linear", "packed", "norm", "rope", "attention", "moe", "state", "sample")
HEAD = f"""\
# Ops

Written by `python tests/test_docs.py` from the declarations in `llmc/ir/ops`; `llmc ops NAME` prints the same of one,
those of installed extensions included, and `llmc ops --json` everything as data. [ir.md](ir.md) explains the text form.

- **Signature**: `(x: f[*b, k], w: fq[n, k]) -> x[*b, n]` binds sizes by matching, `*b` any number of axes, and gives
  the results' types; `x[...]` as a result has `x`'s dtype. Dtype classes: `f` float, `fq` float or quantised, `i`
  integer, `b` boolean, `t` any. `xs*` is any number of operands, `s?` one that may be left out; `state` is memory
  that is written in place.
- **Price**: flops, and bytes that move at least once, as size text over the signature's names; `out` is the number of
  elements of the first result, `bytes_x` the size of one of x's. Where no bytes are given, every operand and result
  moves once, states excluded.
- **Generated**: kernels are made from the op's own scalar expression of each element (or row), and it fuses with its
  neighbours.
- **Compared with**: the function that the tests hold the op's reference against.

Bodies (of `fused`, `linear_map` and others) spell scalar primitives over their operands `a0, a1, ...`:
{", ".join(UNARY)};
{", ".join(BINARY)}; select(a, b, c), which is b where a, else c; over the last axis {", ".join(REDUCTIONS)}.
"""


def kind(a: Attr) -> str:
    """The type of an attribute, in words."""
    names = {"Dim": "size", "float": "number", "int": "integer", "str": "text", "bool": "boolean"}
    if isinstance(a.type, type):
        return names[a.type.__name__]
    return f"list of {names[a.type.__args__[0].__name__]}s"


def generated(op: OpDef) -> str:
    """How kernels are made of the op's expression; "" where it has none."""
    if op.scalar is None:
        return ""
    attrs = op.normal_attrs(op_example(op, np.random.default_rng(0))[1])
    text = str(op.scalar(attrs))
    if attrs:
        return "a row at a time" if "row_" in text else "an element at a time"
    return f"`{text}`"


def lines_of(op: OpDef) -> Iterator[str]:
    """One op as Markdown."""
    yield f"### {op.name}\n\n`{op.signature}`\n\n{' '.join(op.doc.split())}\n"
    for name, a in op.attrs.items():
        default = "required" if a.default is REQUIRED else f"`{show_attr(a.default)}` where it is left out"
        yield f"- `{name}`: {kind(a)}, {default}"
    yield f"- price: `{op.flops}` flops" + (f", `{op.bytes}` bytes" if op.bytes else "")
    if op.writes:
        yield f"- writes: {', '.join(op.writes)}"
    if how := generated(op):
        yield f"- generated: {how}"
    if op.oracle:
        yield f"- compared with: {op.oracle}"
    yield ""


def reference() -> str:
    """docs/ops.md."""
    out = [HEAD]
    modules = [importlib.import_module(f"llmc.ir.ops.{name}") for name in ROOMS]
    assert op_set(*(m.OPS for m in modules)) == OPS, "ROOMS lacks a module of llmc/ir/ops"
    for name, module in zip(ROOMS, modules, strict=True):
        links = ", ".join(f"[{op.name}](#{op.name})" for op in module.OPS)
        out.append(f"## {name}\n\n{inspect.getdoc(module)}\n\n{links}\n")
        out += (line for op in module.OPS for line in lines_of(op))
    return "\n".join(out)


def test_the_op_reference_is_current() -> None:
    assert (DOCS / "ops.md").read_text() == reference(), "run: python tests/test_docs.py"


def test_the_reference_names_everything_that_a_declaration_has() -> None:
    text = reference()
    for op in OPS.values():
        part = re.search(rf"^### {op.name}\n(.*?)(?=^##|\Z)", text, re.S | re.M)
        assert part and op.signature in part[1] and " ".join(op.doc.split()) in part[1]
        assert all(f"- `{name}`: " in part[1] for name in op.attrs)


def test_the_text_form_names_every_dtype() -> None:
    line = next(s for s in (DOCS / "ir.md").read_text().splitlines() if "dtypes:" in s)
    assert set(line.partition("dtypes:")[2].strip(" |").split()) == set(DTYPES)


if __name__ == "__main__":
    (DOCS / "ops.md").write_text(reference())
