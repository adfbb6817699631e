"""docs/errors.md and the sources name the same codes, and every error has a remedy."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from llmc_runtime.format.errors import LlmcError, as_llmc_error

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
CODE = re.compile(r"E\d{3}\Z")
ROOMS = ("llmc", "runtime/llmc_runtime")


@cache
def nodes() -> tuple[tuple[str, ast.AST], ...]:
    """(file, node) of every call and constant of the sources."""
    listed = subprocess.run(["git", "ls-files", "-z", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split("\0") if not listed.returncode else []
    found = [ROOT / n for n in names if n] or [p for room in ROOMS for p in (ROOT / room).rglob("*.py")]
    return tuple(
        (str(path.relative_to(ROOT)), n)
        for path in found if path.suffix == ".py" and path.is_file()
        for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, (ast.Call, ast.Constant))
    )  # fmt: skip


def test_the_page_names_the_codes_of_the_sources() -> None:
    rows = re.findall(r"^\| (E\d{3}) \| (.+) \| (.+) \|$", PAGE.read_text(), re.M)
    codes = [code for code, _, _ in rows]
    assert codes == sorted(set(codes)), "every code once, in order"
    used = {
        n.value for _, n in nodes()
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and CODE.match(n.value)
    }  # fmt: skip
    assert not used - set(codes), f"give each a row in {PAGE.name}: {sorted(used - set(codes))}"
    assert not set(codes) - used, f"no source has: {sorted(set(codes) - used)}"


def test_every_error_has_a_remedy() -> None:
    bare = []
    for name, n in nodes():
        if not isinstance(n, ast.Call) or getattr(n.func, "id", "") not in ("LlmcError", "Diagnostic"):
            continue
        given = n.args[2:3] or [k.value for k in n.keywords if k.arg == "remedy"]
        if n.args and (not given or (isinstance(given[0], ast.Constant) and not given[0].value)):
            bare.append(f"{name}:{n.lineno}")
    assert not bare, bare


@pytest.mark.parametrize("size", [10, 10_000, 1_000_000])
def test_an_error_has_at_most_five_lines_for_any_cause(size: int) -> None:
    """Line ends, control characters, marks of direction and halves of surrogate pairs come from names in files."""
    odd = "\x1b[2J\n\r\u202e\ud800\u2028" * size
    text = str(LlmcError("E103", f"first {odd} last", f"then {odd}"))
    assert len(text.splitlines()) <= 5 and len(text) < 12_000 and text.startswith("LLMC-E103: first ")
    assert all(c.isprintable() or c == "\n" for c in text) and "\n  Try: then" in text


def test_other_errors_are_reported_with_a_code() -> None:
    assert as_llmc_error(MemoryError()).code == "E203"
    result = as_llmc_error(PermissionError(13, "Permission denied", "x/y"))
    assert (result.code, result.of_environment) == ("E100", True) and "x/y" in result.cause
    try:
        [][1]
    except IndexError as e:
        assert (
            as_llmc_error(e).code == "E000"
            and "IndexError" in str(as_llmc_error(e))
            and "test_codes.py" in str(as_llmc_error(e))
        )
