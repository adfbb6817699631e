"""Runs the commands and programs of the documentation in a scratch folder that looks like a checkout.

A fenced block runs if its first line is one of these:

    ```console run              every "$ " line is a command; the other lines must be in its output, in this order;
                                "..." matches anything
    ```console run exit=1       the last command ends with this exit code
    ```console run slow         left out of samples
    ```console serves           a server: it is interrupted as soon as it is ready, and has a free port
    ```python run               a program
    ```python of=PATH           the text is a part of that file of the repository

`python tests/pages.py [PAGE ...]` runs pages whole, the slow blocks, too; without arguments all of them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_cache import with_kernels

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = tuple(sorted([*DOCS.glob("tutorial-*.md"), *DOCS.glob("howto-*.md"), ROOT / "README.md"]))
RUN = frozenset({"run", "serves"})
READY = " at http://"  # in the line that a server prints once it accepts requests
PACKAGES = ("pass", "fused-op", "target", "cuda-kernel", "call-format", "draft-method", "attention", "quant-scheme")
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.S | re.M)
LIMIT = 600.0


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the line where it begins."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def word(self, name: str) -> str:
        """Return the value of a word such as exit=1; "" if the block does not have it."""
        return next((w.partition("=")[2] for w in self.words if w.startswith(name + "=")), "")

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """(command, the lines that it must print); a command goes on in the next line after a backslash."""
        for part in re.split(r"^\$ ", self.text.replace("\\\n", " "), flags=re.M)[1:]:
            command, *lines = part.rstrip().splitlines()
            yield command, lines


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for m in FENCE.finditer(text):
        line = text.count("\n", 0, m.start()) + 1
        yield Block(page, line, m[1], tuple(m[2].split()), m[3])


def missing(wanted: list[str], printed: str) -> str | None:
    """Return the first line of `wanted` that is not printed after the line before it; None if all are."""
    lines = iter(line.rstrip() for line in printed.splitlines())
    for want in wanted:
        pattern = re.compile(".*".join(map(re.escape, want.rstrip().split("..."))))
        if want.strip(". ") and not any(pattern.fullmatch(line) for line in lines):
            return want
    return None


class Checkout:
    """A scratch folder with links to the parts of a checkout that the pages use."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, site = folder, folder / ".site"
        (folder / "examples").mkdir(parents=True)
        for model in ("demo-model", "demo-model-small", "demo-model-head"):
            (folder / "examples" / model).symlink_to(ROOT / "examples" / model)
        for package in PACKAGES:
            skip = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
            shutil.copytree(ROOT / "examples" / package, folder / "examples" / package, ignore=skip)
        (folder / "tests").symlink_to(ROOT / "tests")
        path = os.pathsep.join(map(str, (site, ROOT, ROOT / "runtime")))
        scripts = Path(sys.executable).parent
        self.env = {
            "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "HOME": str(folder / ".home"),
            "PYTHONPATH": path,
            "LLMC_CACHE": str(cache),
            # Packages are built by what is installed, without a network, and put next to the environment.
            "PIP_TARGET": str(site), "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_UPGRADE": "1",
        }  # fmt: skip
        (folder / ".home").mkdir()

    def run(self, block: Block) -> None:
        """Run one block; raises AssertionError with the output if that differs from the page."""
        if block.language == "python":
            script = self.folder / f"block{block.line}.py"
            script.write_text(block.text)
            self._one(block, f"python {script.name}", [], 0)
            return
        commands = list(block.commands())
        if "serves" in block.words:
            self._serve(block, commands[0][0])
            return
        assert commands, f"{block.where}: a block that is run has no line that begins with '$ '"
        for i, (command, wanted) in enumerate(commands):
            last = i == len(commands) - 1
            self._one(block, command, wanted, int(block.word("exit") or 0) if last else 0)

    def _serve(self, block: Block, command: str) -> None:
        """Start a server, wait until it is ready, interrupt it, and check that it ends without an error."""
        words = [*shlex.split(command, comments=True), "--port", "0"]
        server = subprocess.Popen(
            words, cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        alarm = threading.Timer(LIMIT, server.kill)
        alarm.start()
        assert server.stdout is not None
        printed = []
        for line in server.stdout:
            printed.append(line)
            if READY in line:
                break
        server.send_signal(signal.SIGINT)
        printed.append(server.communicate()[0])
        alarm.cancel()
        text = "".join(printed)
        assert READY in text and server.returncode in (0, 130), f"{block.where}: {server.returncode}\n{text}"

    def _one(self, block: Block, command: str, wanted: list[str], code: int) -> None:
        argv = ["bash", "-o", "pipefail", "-c", command]
        r = subprocess.run(
            argv, cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        output = f"{block.where}: $ {command}\n{r.stdout}"
        assert r.returncode == code, f"exit code {r.returncode}, not {code}\n{output}"
        absent = missing(wanted, r.stdout)
        assert absent is None, f"this line was not printed, or not in its place: {absent}\n{output}"


def run_page(page: Path, folder: Path, cache: Path, slow: bool) -> int:
    """Run a page's blocks in order, in a new scratch folder; answer how many ran."""
    checkout = Checkout(folder, cache)
    todo = [b for b in blocks(page) if RUN & {*b.words} and (slow or "slow" not in b.words)]
    for block in todo:
        checkout.run(block)
    return len(todo)


def main(names: list[str]) -> int:
    pages = [p for p in PAGES if not names or p.stem in names or p.name in names]
    with tempfile.TemporaryDirectory(prefix="pages-") as scratch:
        cache = with_kernels(Path(scratch, "cache"))
        failed = 0
        for page in pages:
            begin = time.perf_counter()
            try:
                n = run_page(page, Path(scratch, page.stem), cache, slow=True)
            except (AssertionError, subprocess.TimeoutExpired) as e:
                print(f"  {page.name}: failed: {e}", flush=True)
                failed += 1
            else:
                print(f"  {page.name}: {n} blocks in {time.perf_counter() - begin:.1f} s", flush=True)
    return 1 if failed else 0 if pages else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
