"""Commands, and the Makefile, print what they do before slow imports and installs, also in a pipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODEL = "examples/demo-model"
MARK = "torch is imported"
STUB = f"""import os, sys
print({MARK!r}, file=sys.stderr, flush=True)
os._exit(9)
"""
COMMANDS = (
    (f"compile {MODEL} -o OUT --no-reuse", f"  open ... {MODEL}"),
    (f"compile {MODEL} --dry-run", f"  open ... {MODEL}"),
    (f"roofline {MODEL}", f"  trace ... {MODEL} (imports torch and transformers)"),
    (f"tune {MODEL} -o OUT", f"compiling {MODEL} without weights (imports torch and transformers)"),
    (f"quantize {MODEL} OUT --scheme int8", f"  quantize ... {MODEL}"),
    (f"run {MODEL} --prompt a --cache OUT", f"llmc: {MODEL} is not compiled yet"),
)


@pytest.mark.parametrize(("command", "first"), COMMANDS, ids=[c.split()[0] for c, _ in COMMANDS])
def test_the_first_line_comes_before_slow_imports(command: str, first: str, tmp_path: Path) -> None:
    stub = tmp_path / "stub" / "torch"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text(STUB)
    path = os.pathsep.join(map(str, (stub.parent, ROOT, ROOT / "runtime")))
    words = command.replace("OUT", str(tmp_path / "out")).split()
    argv = [sys.executable, "-c", "import sys; from llmc.cli import main; sys.exit(main(sys.argv[1:]))", *words]
    done = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert lines[0].replace(f"{ROOT}/", "").startswith(first), done.stderr
    assert MARK in lines, done.stderr


def test_an_artifact_is_named_before_it_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from llmc_runtime.cli import main_run

    from llmc.cli import main

    (tmp_path / "manifest.json").write_text("{")
    for words in (["verify"], ["eval"], ["report"], ["pack"]):
        more = {"eval": [MODEL], "pack": [MODEL]}.get(words[0], [])
        assert main([*words, str(tmp_path), *more]) != 0
        assert capsys.readouterr().err.splitlines()[0] == f"  {words[0]} ... {tmp_path}"
    assert main_run([str(tmp_path), "--prompt", "a"]) != 0
    assert capsys.readouterr().err.splitlines()[0] == f"llmc: opening {tmp_path}"


def test_make_says_what_it_installs_and_lets_pip_say_it_too() -> None:
    recipes = re.split(r"\n(?=[^\t\n])", (ROOT / "Makefile").read_text())
    installs = [r for r in recipes if re.search(r"^\t.*(\$\(PIP\)|pip install|npm ci)", r, re.M)]
    assert len(installs) >= 5
    for recipe in installs:
        lines = [line for line in recipe.splitlines() if line.startswith("\t")]
        slow = next(i for i, line in enumerate(lines) if re.search(r"\$\(PIP\)|pip install|npm ci", line))
        assert any('@echo "make: ' in line for line in lines[:slow]), recipe
    assert not re.findall(r"(?:pip install|^PIP :=).* (?:-q+|--quiet|--silent)\b.*", "\n".join(recipes), re.M)
