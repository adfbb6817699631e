"""The documentation is correct: commands work, excerpts equal the files that they name, and links have targets.

`python tests/pages.py` runs all pages; here one random page runs without its slow blocks.
"""

from __future__ import annotations

import fcntl
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pages
import pytest
from draw import SEED
from kernel_cache import with_kernels
from pages import DOCS, FENCE, PAGES, ROOT, RUN, Block

TEXTS = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "DEVELOPING.md"])
DRAWN = Random(SEED).sample(PAGES, 1)
SHELLS = ("console", "sh", "bash", "")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """One cache for the pages of a run, in all of its workers, in which the demonstration model is compiled once."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    folder = shared / "pages-cache"
    with open(shared / "pages.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with_kernels(folder)
            first = Block(DOCS / "README.md", 0, "console", (), "$ llmc compile examples/demo-model -o demo.llmc\n")
            pages.Checkout(shared / "pages-first", folder).run(first)
    return folder


@pytest.mark.drawn
@pytest.mark.parametrize("page", DRAWN, ids=lambda p: p.stem)
def test_a_page_does_as_it_says(page: Path, tmp_path: Path, cache: Path) -> None:
    print(f"seed {SEED}")
    assert pages.run_page(page, tmp_path / "checkout", cache, slow=False)


@pytest.mark.slow
def test_the_debugger_prints_the_session_of_the_tutorial() -> None:
    """The session names a line by its number, and prints values of drawn operands."""
    (session,) = (b for b in pages.blocks(DOCS / "tutorial-triton.md") if "(Pdb)" in b.text)
    command, *lines = session.text.splitlines()
    typed = [line.removeprefix("(Pdb) ") for line in lines if line.startswith("(Pdb) ")]
    arguments = shlex.split(command.removeprefix("$ python "))
    run = subprocess.run(
        [sys.executable, *arguments], input="\n".join([*typed, "q", ""]), cwd=ROOT, capture_output=True, text=True
    )
    printed = [line for line in lines if not line.startswith("(Pdb) ")]
    assert len(printed) == 3 and not [line for line in printed if line not in run.stdout], run.stdout + run.stderr


def test_every_command_of_the_tutorials_and_how_tos_is_run() -> None:
    for page in PAGES:
        left = [b for b in pages.blocks(page) if b.language == "console" and not RUN & {*b.words}]
        assert not left, f"{left[0].where}: a console block that is not run"
        assert any("run" in b.words for b in pages.blocks(page)), f"{page.name} runs nothing"


def test_excerpts_are_of_the_files_they_name() -> None:
    named = [b for page in TEXTS for b in pages.blocks(page) if b.word("of")]
    assert len(named) >= 10
    for b in named:
        assert b.text in (ROOT / b.word("of")).read_text(), f"{b.where}: {b.word('of')} does not have this text"


def commands(text: str) -> Iterator[list[str]]:
    """The words of every llmc, llmc-run and llmc-serve command in the fenced blocks of a page."""
    for m in FENCE.finditer(text):
        if m[1] in SHELLS:
            text = m[3].replace("\\\n", " ")
            for line in re.findall(r"^\$ (.*)", text, re.M) if m[1] == "console" else text.splitlines():
                lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
                lexer.whitespace_split = True
                yield from simple(list(lexer))


def simple(words: list[str]) -> Iterator[list[str]]:
    """The commands between operators of a shell line; redirections end one."""
    part: list[str] = []
    for w in [*words, ";"]:
        if not set(w) <= set("();<>|&"):
            part += [w] if w != "..." else []
            continue
        if part and part[0] in ("do", "then"):
            part = part[1:]
        if part and part[0] in ("llmc", "llmc-run", "llmc-serve"):
            yield part
        part = []


@pytest.mark.parametrize("page", TEXTS, ids=lambda p: p.stem)
def test_every_command_in_a_text_has_options_that_exist(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmc_runtime.cli import bench_parser
    from llmc_runtime.cli import parser as run_parser
    from llmc_runtime.server.server_options import FormatNames, serve_parser

    from llmc.cli import _parser

    monkeypatch.setattr(FormatNames, "__contains__", lambda names, name: name in [*names, "arrow"])  # of examples/
    for words in commands(page.read_text()):
        runs = words[0] == "llmc-run" or words[1] == "run"
        parser = run_parser(words[0], words[0] == "llmc") if runs else _parser()
        parser = serve_parser() if words[0] == "llmc-serve" else bench_parser() if words[1] == "bench" else parser
        try:
            parser.parse_args(words[2:] if words[1] in ("run", "bench") else words[1:])
        except SystemExit:
            pytest.fail(f"{page.name}: {' '.join(words)}\n{capsys.readouterr().err}")


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


def test_links_lead_somewhere() -> None:
    for page in TEXTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
            name, _, anchor = target.partition("#")
            if "://" in name:
                continue
            at = page.parent / name if name else page
            assert at.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(at), f"{page.name} links to {target}"


def test_files_of_the_repository_that_a_text_names_are_there() -> None:
    named = {
        (p.name, m)
        for p in TEXTS
        for m in re.findall(r"`((?:llmc|runtime|tests|examples|docs|bench)/[^`\s]+)`", p.read_text())
    }
    assert not sorted((page, path) for page, path in named if not list(ROOT.glob(path.rstrip("/"))))


def test_every_page_is_in_the_table_of_contents() -> None:
    text = (DOCS / "README.md").read_text()
    assert not [p.name for p in DOCS.glob("*.md") if p.name != "README.md" and f"({p.name})" not in text]
    assert "docs/README.md" in (ROOT / "README.md").read_text()


def test_only_the_readme_names_the_distribution_that_no_index_has_yet() -> None:
    assert [p.name for p in TEXTS if "pip install 'llmc-aot" in p.read_text()] == ["README.md"]
    section = (ROOT / "README.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    extras = re.findall(r"^\| `?(\w+)`?,? .*\| \d+", section, re.M)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == {"none", *declared} - {"dev", "cuda13"}  # cuda13 stands next to cuda12


@pytest.mark.parametrize(
    "wanted, printed, absent",
    [
        (["a", "...", "c"], "a\nb\nc", None),
        (["a ... z"], "a b c z", None),
        (["c", "a"], "a\nb\nc", "a"),
        (["a"], "ab", "a"),
        (["a+"], "aa", "a+"),
    ],
)
def test_outputs_that_a_page_requires(wanted: list[str], printed: str, absent: str | None) -> None:
    assert pages.missing(wanted, printed) == absent


def test_a_page_that_lies_fails(tmp_path: Path) -> None:
    checkout = pages.Checkout(tmp_path / "checkout", tmp_path / "cache")
    good = Block(DOCS / "README.md", 1, "console", ("run",), "$ echo one \\\n  two\none two\n")
    checkout.run(good)
    for text, words in (("$ false\n", ()), ("$ true\n", ("exit=1",)), ("$ echo no\nyes\n", ()), ("echo\n", ())):
        with pytest.raises(AssertionError):
            checkout.run(Block(DOCS / "README.md", 1, "console", words, text))
    checkout.run(Block(DOCS / "README.md", 1, "console", ("exit=1",), "$ true\n$ false\n"))


def test_breakpoints_of_pages_are_at_the_lines_they_show() -> None:
    pattern = re.compile(r"^\(Pdb\) b (\S+):(\d+)\n(?:\(Pdb\) c\n)?-> (.+)$", re.M)
    shown = [m for page in TEXTS for m in pattern.finditer(page.read_text())]
    assert shown
    for m in shown:
        line = (ROOT / m[1]).read_text().splitlines()[int(m[2]) - 1]
        assert line.strip() == m[3], f"{m[1]}:{m[2]} is {line.strip()!r}"
