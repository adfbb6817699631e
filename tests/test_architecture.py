"""The picture in docs/architecture.md, drawn from the code: `python tests/test_architecture.py` writes it.

Layers come from the import contracts in pyproject.toml, descriptions from the docstrings of the packages.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from functools import reduce
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"
ARTIFACT = (
    "manifest.json",
    "programs/*.json",
    "kernels/",
    "weights/*.safetensors",
    "tokenizer/",
    "ir/*.llir",
    "report/",
)
COLUMNS = {"llmc": (20, ROOT / "llmc"), "llmc_runtime": (640, ROOT / "runtime" / "llmc_runtime")}
WIDTH, BOX, MIDDLE = 1080, 420, (470, 140)  # of the picture, a row of a column, the artifact between the columns
LINE, PAD, GAP, CHARACTERS = 15, 9, 6, 60


@dataclass
class Row:
    """One layer: its packages with descriptions, and its single modules. `top` and `height` are in pixels."""

    packages: list[tuple[str, list[str]]]
    modules: list[str]
    top: int = 0

    @property
    def height(self) -> int:
        lines = sum(1 + len(text) for _, text in self.packages) + len(self.module_lines)
        return 2 * PAD + LINE * lines

    @property
    def module_lines(self) -> list[str]:
        return wrap(", ".join(self.modules), CHARACTERS)


def description(package: Path) -> list[str]:
    """The first sentence of a package's docstring, in lines."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    sentence = text.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".")
    return wrap(sentence, CHARACTERS)


def rows(package: str, folder: Path) -> list[Row]:
    """The layers of a package, the highest first, without names that do not exist yet (in parentheses)."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (c["layers"] for c in contracts if c["type"] == "layers" and c["containers"] == [package])
    found = []
    for layer in layers:
        names = [name.strip("()") for name in layer.replace("|", ":").split(" : ")]
        there = [name for name in names if (folder / name).is_dir() or (folder / f"{name}.py").is_file()]
        packages = [(name, description(folder / name)) for name in there if (folder / name).is_dir()]
        found.append(Row(packages, [name for name in there if not (folder / name).is_dir()]))
    return reduce(joined, found, [])


def joined(rows: list[Row], row: Row) -> list[Row]:
    """Adjacent layers that consist of modules only are drawn as one row."""
    if rows and not row.packages and not rows[-1].packages:
        return [*rows[:-1], Row([], rows[-1].modules + row.modules)]
    return [*rows, row] if row.packages or row.modules else rows


def text(x: int, y: int, words: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}"{style and f" class={chr(34)}{style}{chr(34)}"}>{escape(words)}</text>'


def column(title: str, x: int, layers: list[Row]) -> list[str]:
    """The rows of one package from top to bottom; sets their `top`."""
    out, y = [text(x, 24, title, "title")], 36
    for row in layers:
        row.top = y
        out.append(f'<rect x="{x}" y="{y}" width="{BOX}" height="{row.height}"/>')
        line = y + PAD + 11
        for name, words in row.packages:
            out.append(text(x + PAD, line, name, "name"))
            for i, part in enumerate(words):
                out.append(text(x + PAD, line + LINE * (i + 1), part))
            line += LINE * (1 + len(words))
        for i, part in enumerate(row.module_lines):
            out.append(text(x + PAD, line + LINE * i, part, "modules"))
        y += row.height + GAP
    return out


def arrow(x1: int, y1: int, x2: int, y2: int, style: str = "") -> str:
    return f'<path d="M{x1} {y1} L{x2} {y2}" marker-end="url(#head)"{style}/>'


def middle(of: dict[str, list[Row]]) -> list[str]:
    """The artifact, which the compiler writes and the runtime reads, and the package that both know."""

    def at(package: str, name: str) -> int:
        (row,) = (r for r in of[package] if name in r.modules or name in [n for n, _ in r.packages])
        return row.top + row.height // 2

    x, width = MIDDLE
    writer, reader, shared = at("llmc", "artifact"), at("llmc_runtime", "artifact"), at("llmc_runtime", "format")
    top = (writer + reader) // 2 - 80
    out = [f'<rect x="{x}" y="{top}" width="{width}" height="{40 + LINE * len(ARTIFACT)}" class="artifact"/>']
    out.append(text(x + PAD, top + 20, "model.llmc/", "name"))
    out += [text(x + PAD, top + 38 + LINE * i, name) for i, name in enumerate(ARTIFACT)]
    out += [arrow(20 + BOX, writer, x, top + 40), arrow(x + width, top + 60, COLUMNS["llmc_runtime"][0], reader)]
    last = of["llmc"][-1]
    out.append(text(x - 20, shared - 20, "llmc imports format"))
    start = last.top + last.height // 2
    out.append(arrow(20 + BOX, start, COLUMNS["llmc_runtime"][0], shared, ' stroke-dasharray="4 3"'))
    return out


def picture() -> str:
    layers = {package: rows(package, folder) for package, (_, folder) in COLUMNS.items()}
    parts = [line for package, (x, _) in COLUMNS.items() for line in column(package, x, layers[package])]
    height = max(row.top + row.height for column in layers.values() for row in column) + 20
    style = (
        "text{font:11px sans-serif;fill:#333} .title{font:bold 15px sans-serif} "
        ".name{font:bold 12px monospace;fill:#000} "
        ".modules{font:11px monospace} rect{fill:#f5f7fa;stroke:#8899aa} .artifact{fill:#fff6e0;stroke:#c9a227} "
        "path{stroke:#555;fill:none}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
            f"<style>{style}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 z" style="fill:#555"/></marker></defs>',
            '<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>',
            *parts,
            *middle(layers),
            "</svg>\n",
        ]
    )


def test_the_picture_is_that_of_the_code() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run: python tests/test_architecture.py"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
