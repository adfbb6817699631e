"""Rendering of template kernels: the contents of a text, and invalid templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.codegen.backends.triton import template
from llmc.codegen.backends.triton.template import Template, literal

LEAF = '''"""A leaf."""

import triton
import triton.language as tl

BIAS = tl.constexpr(2)


# Above the function.
@triton.jit
def shift(x):
    """Add the bias."""
    return x + BIAS


@triton.jit
def unused(x):
    return x
'''
TOP = '''"""Two lines
of text."""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.leaf import shift


@triton.jit
def kernel(x_ptr, N: tl.constexpr, EPILOGUE: tl.constexpr = None):
    tl.store(x_ptr, shift(tl.load(x_ptr)))
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A templates folder of two modules."""
    (tmp_path / "leaf.py").write_text(LEAF)
    (tmp_path / "top.py").write_text(TOP)
    monkeypatch.setattr(template, "FOLDER", tmp_path)
    template.load.cache_clear()
    yield tmp_path
    template.load.cache_clear()


def test_a_text_has_what_the_function_needs_and_nothing_else(folder: Path) -> None:
    text = Template("top", "kernel").text()
    order = [
        "# A leaf.",
        "BIAS =",
        "# Above the function.\n@triton.jit\ndef shift",
        "Add the bias",
        "# Two lines\n# of",
    ]
    found = [text.index(x) for x in [*order, "def kernel"]]
    assert found == sorted(found)
    assert "unused" not in text
    assert "import" not in text


def test_a_package_brings_templates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may use ours and those of their own package; the modules themselves are never imported."""
    package = folder / "elsewhere"
    package.mkdir()
    (package / "__init__.py").write_text("")
    own = TOP.replace("import shift", "import shift\nfrom elsewhere.more import twice")
    own = own.replace("shift(tl.load(x_ptr))", "twice(shift(tl.load(x_ptr)))")
    (package / "top.py").write_text(own)
    (package / "more.py").write_text('"""More."""\nimport no_such_module\ndef twice(x):\n    return 2 * x\n')
    monkeypatch.syspath_prepend(str(folder))
    text = Template("elsewhere.top", "kernel").text()
    found = [text.index(x) for x in ("# kernels/leaf.py", "def shift", "# elsewhere.top\n# Two lines", "def kernel")]
    assert found == sorted(found) and "# elsewhere.more\n# More.\n\n\ndef twice" in text
    with pytest.raises(ValueError, match=r"elsewhere\.missing: there is no such module"):
        Template("elsewhere.missing", "kernel").text()
    (package / "top.py").write_text(own + "from other.package import name\n")
    template.load.cache_clear()
    with pytest.raises(ValueError, match="a template holds functions, classes of NamedTuple, constants and imports"):
        Template("elsewhere.top", "kernel").text()


def test_arguments_are_named_and_checked(folder: Path) -> None:
    kernel = Template("top", "kernel")
    assert kernel.call(N=3, x_ptr="x0") == "kernel(\n    x_ptr=x0,\n    N=3,\n)"
    with pytest.raises(ValueError, match=r"missing arguments \['x_ptr'\], unknown arguments \['M'\]"):
        kernel.call(N=3, M=4)


GROUPED = '''"""Grouped values."""

from typing import NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """A tile."""

    x_ptr: tl.tensor
    SIZE: tl.constexpr


@triton.jit
def store(tile: Tile):
    tl.store(tile.x_ptr + tl.arange(0, tile.SIZE), 0)


@triton.jit
def nothing():
    pass
'''


def test_classes_group_values(folder: Path) -> None:
    (folder / "grouped.py").write_text(GROUPED)
    text = Template("grouped", "store").text()
    assert text.startswith("from typing import NamedTuple\n\n\n")
    assert text.index("class Tile(NamedTuple):") < text.index("def store(tile: Tile):")
    assert "NamedTuple" not in Template("grouped", "nothing").text()
    tile = template.record("Tile", x_ptr="y0", SIZE=16)
    assert Template("grouped", "store").call(tile=tile) == "store(\n    tile=Tile(x_ptr=y0, SIZE=16),\n)"
    (folder / "other.py").write_text("class Tile:\n    pass\n")
    with pytest.raises(ValueError, match=r"other.py:1: a template holds functions, classes of NamedTuple"):
        Template("other", "Tile").text()


def test_literals() -> None:
    assert literal((1, "x0", None, True)) == "(1, x0, None, True)"
    assert [literal(x) for x in ((2,), (), 0.5)] == ["(2,)", "()", "0.5"]
    with pytest.raises(ValueError, match="no literal"):
        literal(float("inf"))


def test_refused_templates(folder: Path) -> None:
    (folder / "loop.py").write_text("for i in range(3):\n    pass\n")
    with pytest.raises(ValueError, match=r"loop.py:1: a template holds functions"):
        template.load("loop")
    (folder / "renames.py").write_text(f"from {template.PACKAGE}.leaf import shift as s\n")
    with pytest.raises(ValueError, match="without `as`"):
        template.load("renames")
    clash = "from {0}.leaf import shift\nfrom {0}.other import BIAS\n\ndef kernel(x):\n    return shift(x) + BIAS\n"
    (folder / "other.py").write_text("BIAS = 3\n")
    (folder / "clash.py").write_text(clash.format(template.PACKAGE))
    with pytest.raises(ValueError, match="two modules define BIAS"):
        Template("clash", "kernel").text()
