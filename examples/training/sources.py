"""The list of Debian packages the training text comes from.

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
    Source("linux-doc-6.1", "html", r"html/.*\.html$", "GPL-2", INDEX_PAGES + "|translations/"),
    Source("python3.11-doc", "html", r"html/.*\.html$", "PSF-2", INDEX_PAGES),
    Source("perl-doc", "pod", r"\.pod$", "GPL-1+ or Artistic", r"perl\w*delta|perl(ko|jp|cn|tw|api|intern|apio|toc)\."),
    Source("postgresql-doc-15", "html", r"html/.*\.html$", "PostgreSQL", r"release-|bookindex"),
    Source("harden-doc", "html", r"/en-US/.*\.html$", "GPL-2+"),
    Source("debian-policy", "html", HTML, "GPL-2+", INDEX_PAGES),
    Source("debian-reference-en", "html", HTML, "GPL-2+"),
    Source("developers-reference", "html", HTML, "GPL-2+", INDEX_PAGES),
    Source("debian-handbook", "html", r"/en-US/.*\.html$", "CC-BY-SA-3.0 or GPL-2+"),
    Source("debian-kernel-handbook", "html", HTML, "GPL-2+"),
    Source("debian-faq", "html", HTML, "GPL-2+"),
    Source("maint-guide", "html", HTML, "GPL-2+"),
    Source("aptitude-doc-en", "html", HTML, "GPL-2+"),
    Source("installation-guide-amd64", "html", r"/en/.*\.html$", "GPL-2+"),
    Source("live-manual-html", "html", r"\.en\.html$", "GPL-3+"),
    Source("doc-debian", "text", r"doc/debian/[^/]*(txt|manifesto)(\.gz)?$", "GPL-2+", r"constitution\.1|contract\.1"),
    Source("bash-doc", "html", HTML, "GFDL-1.3"),
    Source("apache2-doc", "html", r"/manual/en/.*\.html$", "Apache-2.0"),
    Source("git-doc", "html", HTML, "GPL-2", r"RelNotes"),
    Source("sqlite3-doc", "html", HTML, "public domain", r"c3ref|releaselog|changes|matrix"),
    Source("llvm-14-doc", "html", HTML, "Apache-2.0 with LLVM exception", INDEX_PAGES),
    Source("png-definitive-guide", "html", HTML, "GFDL-1.2"),
    Source("python-django-doc", "html", HTML, "BSD-3-Clause", INDEX_PAGES + "|releases/"),
    Source(
        "rust-doc",
        "html",
        r"html/(book|reference|nomicon|edition-guide|rust-by-example|embedded-book|rustc|rustdoc)"
        r"/.*\.html$",
        "MIT or Apache-2.0",
        r"print\.html",
    ),
    Source("racket-doc", "html", HTML, "LGPL-3 or MIT/Apache-2.0", INDEX_PAGES + "|doc-index"),
    Source("gimp-help-en", "html", HTML, "GFDL-1.2+"),
    Source("gnome-user-docs", "html", r"/C/.*\.page$", "CC-BY-SA-3.0"),
    Source("mate-user-guide", "html", r"/C/.*\.(xml|docbook)$", "GFDL-1.1+", r"fdl"),
    Source("libreoffice-help-en-us", "html", HTML, "MPL-2.0"),
    Source("kicad-doc-en", "html", HTML, "GPL-3+ or CC-BY-3.0+"),
    Source("krb5-doc", "html", HTML, "MIT", INDEX_PAGES),
    Source("bind9-doc", "html", HTML, "MPL-2.0", INDEX_PAGES),
    Source("postfix-doc", "html", HTML, "EPL-2.0 or IPL-1.0"),
    Source("clang-14-doc", "html", HTML, "Apache-2.0 with LLVM exception", INDEX_PAGES),
    Source("erlang-doc", "html", HTML, "Apache-2.0"),
    Source("exim4-doc-html", "html", HTML, "GPL-2+"),
    Source("wireshark-doc", "html", HTML, "GPL-2+"),
    Source("octave-doc", "html", HTML, "GPL-3+", INDEX_PAGES),
    Source("python-sqlalchemy-doc", "html", HTML, "MIT", INDEX_PAGES),
    Source("python-scipy-doc", "html", HTML, "BSD-3-Clause", INDEX_PAGES + "|release"),
    Source("python-pandas-doc", "html", HTML, "BSD-3-Clause", INDEX_PAGES + "|whatsnew"),
    Source("python-sympy-doc", "html", HTML, "BSD-3-Clause", INDEX_PAGES),
    Source("debmake-doc", "html", HTML, "MIT", r"\.(de|ja|zh|fr)[._]"),
    Source("ubuntu-packaging-guide-html", "html", HTML, "CC-BY-SA-3.0", INDEX_PAGES),
    Source(
        "openjdk-17-doc",
        "html",
        HTML,
        "GPL-2 with Classpath exception",
        r"class-use|legal|java\.desktop|/jdk\.|/java\.(sql|xml|naming|security)",
    ),
    Source("qtbase5-doc-html", "html", HTML, "GFDL-1.3", r"-members\."),
    Source("libboost1.74-doc", "html", HTML, "BSL-1.0"),
    Source("gap-doc", "html", HTML, "GPL-2+"),
    Source("maxima-doc", "html", HTML, "GPL-2+", r"/(de|es|pt|ja|ru)/"),
    Source("sbcl-doc", "html", HTML, "public domain"),
    Source("swi-prolog-doc", "html", HTML, "BSD-2-Clause"),
    Source("ghc-doc", "html", r"users_guide/.*\.html$", "BSD-3-Clause", INDEX_PAGES),
    Source("lilypond-doc-html", "html", HTML, "GFDL-1.3+", r"\.(ca|cs|de|es|fr|hu|it|ja|nl|pt|zh)\.html"),
    Source("zsh-doc", "html", HTML, "zsh (MIT-like)"),
    Source("debian-edu-doc-en", "html", HTML, "GPL-2+"),
    Source("gnucash-docs", "html", r"/C/.*\.(xml|docbook)$", "GFDL-1.1+"),
    Source("sgt-puzzles", "html", HTML, "MIT", r"/(de|fr|it|es|pt|ru|zh|ja)/"),
    Source("stellarium-data", "html", r"skycultures/.*\.en\.utf8$", "GPL-2+ and CC-BY-SA"),
]

# Narrative text is scarce among the packages: every story is shown this often.
STORY_REPEATS = 2

STORIES = [
    Source("r-cran-janeaustenr", "rdata", r"data/Rdata\.rdb$", "public domain (package: MIT)"),
    Source(
        "golang-github-klauspost-compress-dev",
        "text",
        r"compress/testdata/Mark\.Twain-Tom\.Sawyer\.txt$",
        "public domain",
    ),
    Source("golang-github-andybalholm-brotli-dev", "text", r"testdata/Isaac\.Newton-Opticks\.txt$", "public domain"),
    Source("endless-sky-data", "strings", r"data/.*\.txt$", "GPL-3+", r"keys|tips|credits"),
    Source("naev-data", "strings", r"(missions|events|assets)/.*\.(lua|xml)$", "GPL-3+"),
    Source("crawl-common", "entries", r"descript/[a-z]+\.txt$", "GPL-2+", r"quotes|FAQ|commands"),
    Source("freeorion-data", "strings", r"stringtables/en\.txt$", "GPL-2 and CC-BY-SA-3.0"),
    Source("freeciv-data", "strings", r"\.(ruleset|serv)$|helpdata", "GPL-2+"),
    Source(
        "cataclysm-dda-data",
        "strings",
        r"json/(items|furniture_and_terrain|vehicleparts)/.*\.json$",
        "CC-BY-SA-3.0",
        r"drug|obsolete",
    ),
    Source("freedroidrpg-data", "strings", r"(dialogs|data)/.*\.lua$|\.dialog$", "GPL-2+"),
    Source("widelands-data", "strings", r"(campaigns|scenarios|tribes|txts|world)/.*\.lua$", "GPL-2+"),
    Source("singularity", "strings", r"\.(dat|py|txt)$", "GPL-2+ and CC-BY-SA-3.0"),
    Source("fillets-ng-data", "strings", r"dialogs_en\.lua$", "GPL-2+"),
    Source("angband-data", "text", r"help/.*\.txt$", "GPL-2"),
    *[
        Source(f"wesnoth-1.16-{name}", "strings", r"\.cfg$", "GPL-2+")
        for name in ("data httt did nr sof dm thot trow utbs l ei low sotbe tsg dw sota ttb").split()
    ],
]

DICTIONARIES = [
    Source("apt-descriptions", "descriptions", r".", "each package's own"),
    Source("dict-wn", "wordnet", r"wn\.dict\.dz$", "WordNet (permissive)"),
    Source("dict-gcide", "gcide", r"gcide\.dict\.dz$", "GPL-3+ (1913 text: public domain)"),
    Source("dict-foldoc", "foldoc", r"foldoc\.dict\.dz$", "GFDL-1.1+"),
    Source("dict-jargon", "jargon", r"jargon\.dict\.dz$", "public domain"),
    Source("dict-devil", "devil", r"devil\.dict\.dz$", "public domain"),
    Source(
        "fortunes",
        "fortunes",
        r"fortunes/(computers|cookie|debian|definitions|education|food|goedel|humorists|kids|"
        r"knghtbrd|law|linux|linuxcookie|magic|medicine|miscellaneous|paradoxum|people|perl|"
        r"pets|platitudes|science|tao|wisdom|work|literature)$",
        "BSD (collection)",
    ),
]

SOURCES = DOCUMENTATION + STORIES + DICTIONARIES
