"""Builds the documentation site in build/site: `make docs`.

The pages link to each other and to files of the repository as plain files do. They are copied, with every file that
they link to, into a folder of the same layout, from which MkDocs builds in strict mode: a broken link, a missing anchor
or a page that the navigation does not have is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STAGE, SITE = ROOT / "build" / "site-pages", ROOT / "build" / "site"
FENCE = re.compile(r"^( *```)(\w*)[^\n]*\n(.*?)^( *```)$", re.S | re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A list that follows a line of text: Python-Markdown begins a list only after an empty line.
LIST = re.compile(r"^((?![ ]*(?:[-*]|\d+\.) )(?![ ]*$)(?!  )[^\n]+\n)(?=(?:[-*]|\d+\.) )", re.M)
# What a browser fetches from other hosts when it shows a page; links that a reader follows are not included.
FETCHED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*\s(?:src|href)=\"?https?:[^\s\">]*")


def linked(page: Path) -> list[Path]:
    """The files of the repository that a page links to."""
    names = (target.partition("#")[0] for target in LINK.findall(FENCE.sub("", page.read_text())))
    return [(page.parent / name).resolve() for name in names if name and "://" not in name]


def published() -> list[Path]:
    """README, the pages in docs/, and all files that these and the files that they link to link to."""
    todo, found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], set()
    while todo:
        path = todo.pop()
        if path in found or not path.is_file() or not path.is_relative_to(ROOT):
            continue  # MkDocs names the page whose link is broken
        found.add(path)
        todo += linked(path) if path.suffix == ".md" else []
    return sorted(found)


def staged(text: str) -> str:
    """A page for Python-Markdown: fences name only their language, and lists begin after an empty line."""
    parts, at = [], 0
    for m in FENCE.finditer(text):
        parts += [LIST.sub(r"\1\n", text[at : m.start()]), f"{m[1]}{m[2]}\n{m[3]}{m[4]}"]
        at = m.end()
    return "".join([*parts, LIST.sub(r"\1\n", text[at:])])


def main() -> int:
    shutil.rmtree(STAGE, ignore_errors=True)
    for path in published():
        to = STAGE / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            to.write_text(staged(path.read_text()))
        else:
            shutil.copyfile(path, to)
    config = Path(__file__).with_name("mkdocs.yml")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "-f", str(config)]  # not -q: no warnings
    code = subprocess.call(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})  # no advertisement
    if code:
        return code
    pages = sorted(SITE.rglob("*.html"))
    outside = {f"{page.relative_to(SITE)}: {m}" for page in pages for m in FETCHED.findall(page.read_text())}
    print(*sorted(outside), f"build/site: {len(pages)} pages", sep="\n")
    return int(bool(outside))


if __name__ == "__main__":
    sys.exit(main())
