"""Checks that the generated parts of docs/ are current; `python tests/test_docs.py` regenerates them."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llmc.frontend.model_folder import TESTED
from llmc.ir.dtype import DTYPES
from llmc.ir.example import op_example
from llmc.ir.opdef import REQUIRED, Attr, OpDef
from llmc.ir.ops import GROUPS, OPS, ops_of
from llmc.ir.scalar import BINARY, REDUCTIONS, UNARY
from llmc.ir.text import show_attr

DOCS = Path(__file__).resolve().parent.parent / "docs"
HEAD = f"""\
# Ops

This page describes all ops, for developers who read stages of a compile or write passes and kernels.
`python tests/test_docs.py` generates it from the declarations in `llmc/ir/ops`. `llmc ops NAME` prints one op, also of
an installed extension, and `llmc ops --json` prints all as data. [ir.md](ir.md) explains the text form.

- **Signature**: the type rule, such as `(x: f[*b, k], w: fq[n, k]) -> x[*b, n]`
  ([syntax](extending.md#signatures-of-ops)).
- **Cost**: flops and bytes as expressions of the sizes ([syntax](extending.md#costs)). If no bytes are given, each
  operand and result is counted once, except states.
- **Generated**: kernels are generated from the op's scalar expression per element (or row), and the op can be fused
  with its neighbours.
- **Compared with**: the function with which the tests compare the op's reference.

Bodies (of `fused`, `linear_map` and others) are expressions of scalar primitives over their operands `a0, a1, ...`:
{", ".join(UNARY)};
{", ".join(BINARY)}; select(a, b, c), which is b if a, else c; over the last axis {", ".join(REDUCTIONS)}.
"""


def kind(a: Attr) -> str:
    """The type of an attribute in words."""
    names = {"Dim": "size", "float": "number", "int": "integer", "str": "text", "bool": "boolean"}
    if isinstance(a.type, type):
        return names[a.type.__name__]
    return f"list of {names[a.type.__args__[0].__name__]}s"


def generated(op: OpDef) -> str:
    """How kernels are generated from the op's expression; "" if it has none."""
    if op.scalar is None:
        return ""
    attrs = op.normal_attrs(op_example(op, np.random.default_rng(0))[1])
    text = str(op.scalar(attrs))
    if attrs:
        return "row by row" if "row_" in text else "element by element"
    return f"`{text}`"


def lines_of(op: OpDef) -> Iterator[str]:
    """One op as Markdown."""
    yield f"### {op.name}\n\n`{op.signature}`\n\n{' '.join(op.doc.split())}\n"
    for name, a in op.attrs.items():
        default = "required" if a.default is REQUIRED else f"default `{show_attr(a.default)}`"
        yield f"- `{name}`: {kind(a)}, {default}"
    yield f"- cost: `{op.flops}` flops" + (f", `{op.bytes}` bytes" if op.bytes else "")
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
    for module in GROUPS:
        name = module.__name__.rpartition(".")[2]
        links = ", ".join(f"[{op.name}](#{op.name})" for op in ops_of(module))
        out.append(f"## {name}\n\n{inspect.getdoc(module)}\n\n{links}\n")
        out += (line for op in ops_of(module) for line in lines_of(op))
    return "\n".join(out)


def list_of_tested_types() -> str:
    """The list of tested model types in docs/models.md, between its marks."""
    begin, end = (f"<!-- {text} tested model types -->" for text in ("written by tests/test_docs.py:", "end of"))
    names = ", ".join(f"`{name}`" for name in sorted(TESTED))
    return "\n".join([begin, "", *textwrap.wrap(names + ".", 120, break_on_hyphens=False), "", end])


def with_tested_types(page: str) -> str:
    """Return docs/models.md with the current list of tested model types."""
    begin, _, _ = list_of_tested_types().partition("\n")
    return page[: page.index(begin)] + list_of_tested_types() + "\n"


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


def test_the_readme_has_the_number_of_tested_model_types() -> None:
    assert f"[{len(TESTED)} model types](docs/models.md)" in (DOCS.parent / "README.md").read_text()


def test_the_list_of_tested_model_types_is_current() -> None:
    page = (DOCS / "models.md").read_text()
    assert page == with_tested_types(page), "run: python tests/test_docs.py"
    assert all(f"`{name}`" in page for name in TESTED)


if __name__ == "__main__":
    (DOCS / "ops.md").write_text(reference())
    models = DOCS / "models.md"
    models.write_text(with_tested_types(models.read_text()))
