"""The public interface for extensions: documented by a generated table, and all that the examples import.

`python tests/test_public_interface.py` writes the table into docs/extending.md.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from llmc.extend import OPS, Ctx
from llmc.ir.interp import run
from llmc.ir.text import parse
from llmc.ir.verify import verify

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "extending.md"
MODULES = (
    "llmc.extend", "llmc.extend.cpp", "llmc.extend.triton", "llmc.extend.device_functions", "llmc.extend.cuda",
    "llmc.extend.quant", "llmc.testing", "llmc_runtime.call_formats", "llmc_runtime.drafts",
)  # fmt: skip
PROGRAMS = ("llmc_runtime",)  # what a program that runs models imports
EXAMPLES = [
    *(p for p in sorted(ROOT.glob("examples/**/*.py")) if "training" not in p.parts and "build" not in p.parts),
    ROOT / "tests" / "codegen" / "c_kernels.py",
    ROOT / "tests" / "codegen" / "c_toolchain.py",
]
BEGIN, END = "<!-- written by tests/test_public_interface.py: names -->\n", "<!-- end of names -->"


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a file imports from llmc, or from the tests of a checkout."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def internal(module: str, name: str) -> bool:
    """Whether an import is of llmc, or of its tests, and not public."""
    if module in MODULES or module in PROGRAMS:
        return name not in importlib.import_module(module).__all__
    return module.partition(".")[0] in ("llmc", "llmc_runtime", "kernels", "draw")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_import_public_names_only(path: Path) -> None:
    assert not [f"from {m} import {n}" for m, n in imported(path) if internal(m, n)]


def test_programs_in_pages_import_public_names_only(tmp_path: Path) -> None:
    file, found = tmp_path / "block.py", []
    for page in sorted(PAGE.parent.glob("*.md")):
        for block in re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text(), re.M | re.S):
            lines = [line for line in block.splitlines() if re.match(r"(from|import) ", line)]
            file.write_text("\n".join(lines).replace(", \\", ""))
            found += [f"{page.name}: from {m} import {n}" for m, n in imported(file) if internal(m, n)]
    assert not found


def test_the_check_finds_internal_imports(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "import numpy\nfrom llmc.ir.dim import Dim\nfrom llmc.extend import Dim, nothing\nimport llmc.cli\n"
    )
    assert [internal(m, n) for m, n in imported(file)] == [False, True, False, True, True]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there(module: str) -> None:
    public = importlib.import_module(module)
    assert len(public.__all__) == len(set(public.__all__))
    for name in public.__all__:
        assert getattr(public, name) is not None
    with pytest.raises(AttributeError):
        getattr(public, "no_such_name")  # noqa: B009


def summary(value: Any) -> str:
    """The first sentence of what documents a value."""
    doc = inspect.getdoc(getattr(value, "fn", value)) or ""
    if not callable(value) and not inspect.ismodule(value) and type(value).__module__ == "builtins":
        return f"`{value!r}`" if len(repr(value)) < 80 else "a table"
    first = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z)`\]])[.;:](?: |$)", first)[0].rstrip(".")


CONSTANTS = {
    "OPS": "op name to `OpDef`: the ops of llmc", "Schedule": "parameters of a kernel: names to JSON values",
    "CTYPES": "dtype to its name in C++", "FLOATS": "dtypes of floats that kernels compute with",
    "INTS": "dtypes of integers", "CODES": "dtypes of codes that can be factors of `tl.dot`",
}  # fmt: skip


def table() -> str:
    rows = []
    for module in MODULES:
        public = importlib.import_module(module)
        rows += ["", f"`{module}`:", "", "| name | description |", "|---|---|"]
        rows += [
            f"| `{n}` | {CONSTANTS.get(n) or summary(getattr(public, n))} |".replace("\n", " ") for n in public.__all__
        ]
    return "\n".join(rows) + "\n\n"


def test_the_table_is_that_of_the_code() -> None:
    text = PAGE.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == table(), "run: python tests/test_public_interface.py"


def test_the_pass_on_the_page_edits_a_graph() -> None:
    block = re.search(
        r"^```python\n(@dataclass\(frozen=True\)\nclass MirroredSub.*?)^```", PAGE.read_text(), re.M | re.S
    )
    assert block
    public = importlib.import_module("llmc.extend")
    names: dict[str, Any] = {name: getattr(public, name) for name in ("Ctx", "Graph", "Node", "Pass", "Value")}
    names |= {"dataclass": dataclass, "ClassVar": ClassVar}
    exec(compile(block[1], str(PAGE), "exec"), names)
    nodes = " %d = sub(%a, %b) : f32[4]\n %e = sub(%b, %a) : f32[4]\n"
    m = parse(f"graph @g(%a: f32[4], %b: f32[4]) {{\n{nodes} return %d, %e\n}}\n", OPS)
    assert names["MirroredSub"]().run(m, Ctx(OPS)) == 1
    verify(m)
    assert [n.op.name for n in m.graphs["g"].nodes] == ["sub", "neg"]
    a, b = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    difference, mirrored = run(m.graphs["g"], [a, b])
    assert (difference == a - b).all() and (mirrored == b - a).all()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
