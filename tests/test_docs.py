"""The generated parts of docs/ are what the declarations say; `python tests/test_docs.py` writes them anew."""

from __future__ import annotations

from pathlib import Path

from llmc.ir.ops import OPS

IR = Path(__file__).resolve().parent.parent / "docs" / "ir.md"
MARK = "<!-- ops: written by tests/test_docs.py from the declarations -->\n"


def op_table() -> str:
    lines = ["| op | signature | what it computes |", "|---|---|---|"]
    for op in OPS.values():
        attrs = ", ".join(op.attrs)
        signature = f"`{op.signature}`" + (f" {{{attrs}}}" if attrs else "")
        lines.append(f"| {op.name} | {signature} | {' '.join(op.doc.split())} |".replace("|a|", "abs(a)"))
    return "\n".join(lines) + "\n"


def test_the_op_table_is_current() -> None:
    head, mark, table = IR.read_text().partition(MARK)
    assert mark and head and table == op_table(), "run: python tests/test_docs.py"


if __name__ == "__main__":
    IR.write_text(IR.read_text().partition(MARK)[0] + MARK + op_table())
