"""Runs the notebooks in examples/notebooks unchanged (`make notebooks`). A program, not a test.

This program runs in an environment of its own, which has nbclient. It sees the packages of the environment whose path
is the first argument, and installs nothing there. Further arguments name notebooks.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"


def run(path: Path) -> None:
    """Run one notebook in its folder; CellExecutionError with the cell and its traceback if a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    start = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count):
            raise SystemExit(f"{path.name}: clear the outputs before you commit it")
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": FOLDER}}).execute()
    for output in (o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs):
        text = output.get("text", "")
        # A shell command that fails does not fail its cell.
        if "LLMC-E" in text or "command not found" in text or "Traceback" in text:
            raise SystemExit(f"{path.name}: {text}")
    print(f"{path.name}: {len(notebook.cells)} cells, {time.monotonic() - start:.0f} s", flush=True)


def main(venv: str, *names: str) -> None:
    """Make the packages of `venv`, and its commands, visible to the kernels of this environment; run the notebooks."""
    root, mine = FOLDER.parent.parent, sysconfig.get_path("purelib")
    packages = Path(venv).resolve() / Path(mine).relative_to(Path(sys.prefix))
    Path(mine, "llmc-venv.pth").write_text(f"{root}\n{root / 'runtime'}\n{packages}\n")
    bin_folder = Path(sys.prefix) / "bin"
    for command in ("llmc", "llmc-run", "llmc-serve"):
        link = bin_folder / command
        link.unlink(missing_ok=True)
        link.symlink_to(Path(venv).resolve() / "bin" / command)
    with tempfile.TemporaryDirectory() as scratch:  # whatever the notebooks write
        os.environ["IPYTHONDIR"] = os.environ["TMPDIR"] = scratch
        for path in sorted(FOLDER.glob("*.ipynb")):
            if not names or path.stem in names:
                run(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
