"""The list of Debian packages the training text comes from: only public-domain and permissively licensed text.

Every source names a package, the way its files are read (a key of
``extract.READERS``), which files are read, and the licence that Debian's
copyright file states for the text.  The text itself is never redistributed:
`prepare.py` fetches the packages from the Debian archive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One package and the files of it that hold prose."""

    package: str
    reader: str
    include: str
    licence: str
    exclude: str = r"(?!)"

    def wants(self, path: str) -> bool:
        """Whether the file at ``path`` (relative to the package) is read."""
        return bool(re.search(self.include, path)) and not re.search(self.exclude, path)


INDEX_PAGES = r"genindex|py-modindex|search\.html|bookindex|changelog|/toc|copyright|license"
HTML = r"\.html$"

DOCUMENTATION = [
    Source("python3.11-doc", "html", r"html/.*\.html$", "PSF-2", INDEX_PAGES),
    Source("postgresql-doc-15", "html", r"html/.*\.html$", "PostgreSQL", r"release-|bookindex"),
    Source("apache2-doc", "html", r"/manual/en/.*\.html$", "Apache-2.0"),
    Source("sqlite3-doc", "html", HTML, "public domain", r"c3ref|releaselog|changes|matrix"),
    Source("llvm-14-doc", "html", HTML, "Apache-2.0 with LLVM exception", INDEX_PAGES),
    Source("python-django-doc", "html", HTML, "BSD-3-Clause", INDEX_PAGES + "|releases/"),
    Source(
        "rust-doc",
        "html",
        r"html/(book|reference|nomicon|edition-guide|rust-by-example|rustc|rustdoc)"
        r"/.*\.html$",
        "MIT or Apache-2.0",
        r"print\.html",
    ),
    Source("krb5-doc", "html", HTML, "MIT", INDEX_PAGES),
    Source("clang-14-doc", "html", HTML, "Apache-2.0 with LLVM exception", INDEX_PAGES),
    Source("erlang-doc", "html", HTML, "Apache-2.0"),
    Source("python-sqlalchemy-doc", "html", HTML, "MIT", INDEX_PAGES),
    Source("python-scipy-doc", "html", HTML, "BSD-3-Clause", INDEX_PAGES + "|release"),
    Source("python-sympy-doc", "html", HTML, "BSD-3-Clause", INDEX_PAGES),
    Source("debmake-doc", "html", HTML, "MIT", r"\.(de|ja|zh|fr)[._]"),
    Source("libboost1.74-doc", "html", HTML, "BSL-1.0"),
    Source("sbcl-doc", "html", HTML, "public domain"),
    Source("ghc-doc", "html", r"users_guide/.*\.html$", "BSD-3-Clause", INDEX_PAGES),
    Source("sgt-puzzles", "html", HTML, "MIT", r"/(de|fr|it|es|pt|ru|zh|ja)/"),
    *[
        Source(f"{name}-doc", "html", HTML, "Apache-2.0", INDEX_PAGES + "|release")
        for name in "nova neutron keystone cinder ironic swift glance heat octavia".split()
    ],
    Source("nodejs-doc", "html", HTML, "MIT", r"/all\.html|changelog"),
    Source("python-sklearn-doc", "html", HTML, "BSD-3-Clause", INDEX_PAGES + "|whats_new"),
    Source("tomcat10-docs", "html", HTML, "Apache-2.0", "changelog"),
    Source("docutils-doc", "html", HTML, "public domain", "HISTORY|RELEASE|licenses|COPYING"),
    Source("renpy-doc", "html", HTML, "MIT", INDEX_PAGES),
    Source("sphinx-doc", "html", HTML, "BSD-2-Clause", INDEX_PAGES + "|changes"),
    Source("varnish-doc", "html", HTML, "BSD-2-Clause", INDEX_PAGES + "|changes|whats-new"),
    Source("nim-doc", "html", HTML, "MIT", INDEX_PAGES),
    Source("mypy-doc", "html", HTML, "MIT", INDEX_PAGES),
    Source("ant-doc", "html", r"manual/.*\.html$", "Apache-2.0", "/api/"),
    Source("python-flask-doc", "html", HTML, "BSD-3-Clause", INDEX_PAGES + "|changes"),
    Source("python-djangorestframework-doc", "html", HTML, "BSD-2-Clause", INDEX_PAGES + "|release-notes"),
    Source("twisted-doc", "html", HTML, "MIT", INDEX_PAGES + "|/api/"),
    Source("chezscheme-doc", "html", HTML, "Apache-2.0", INDEX_PAGES),
    Source("ganeti-doc", "html", HTML, "BSD-2-Clause", INDEX_PAGES + "|news"),
    Source("crystal-doc", "html", HTML, "Apache-2.0", INDEX_PAGES),
    Source("libbotan-2-doc", "html", HTML, "BSD-2-Clause", INDEX_PAGES + "|news"),
    Source("python-dask-doc", "html", HTML, "BSD-3-Clause", INDEX_PAGES),
    Source("python-bs4-doc", "html", HTML, "MIT", INDEX_PAGES + r"|\.(ja|ko|zh|ptbr|ru|es)"),
    Source("python-mako-doc", "html", HTML, "MIT", INDEX_PAGES),
    Source("python-tornado-doc", "html", HTML, "Apache-2.0", INDEX_PAGES + "|releases"),
    Source("cython-doc", "html", HTML, "Apache-2.0", INDEX_PAGES),
]

# Narrative text is scarce among the packages: every story is shown this often.
STORY_REPEATS = 3

STORIES = [
    Source("r-cran-janeaustenr", "rdata", r"data/Rdata\.rdb$", "public domain (package: MIT)"),
    Source(
        "golang-github-klauspost-compress-dev",
        "text",
        r"compress/testdata/Mark\.Twain-Tom\.Sawyer\.txt$",
        "public domain",
    ),
    Source("golang-github-andybalholm-brotli-dev", "text", r"testdata/Isaac\.Newton-Opticks\.txt$", "public domain"),
]

DICTIONARIES = [
    Source("dict-wn", "wordnet", r"wn\.dict\.dz$", "WordNet (permissive)"),
    Source("dict-jargon", "jargon", r"jargon\.dict\.dz$", "public domain"),
    Source("dict-devil", "devil", r"devil\.dict\.dz$", "public domain"),
]

SOURCES = DOCUMENTATION + STORIES + DICTIONARIES
