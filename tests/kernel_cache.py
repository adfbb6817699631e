"""A cache of compiled kernels that the tests of a checkout share: equal sources are compiled once."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / "build" / "test-cache"


def with_kernels(cache: Path) -> Path:
    """Make a cache without artifacts that has the kernels of CACHE, so that compiles reuse only kernels."""
    kernels = CACHE / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    cache.mkdir()
    (cache / "kernels").symlink_to(kernels)
    return cache


@cache
def library(text: str, *flags: str) -> bytes:
    """Return the shared library that the C++ compiler makes of a text with these flags.

    It is kept in CACHE, by a hash of both; a text that includes files of this repository must be preprocessed.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "the tests need a C++ compiler"
    key = hashlib.sha256("\0".join((compiler, *flags, text)).encode()).hexdigest()[:32]
    kept = CACHE / "libraries" / f"{key}.so"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            source, out = Path(folder, "x.cpp"), Path(folder, "x.so")
            source.write_text(text)
            subprocess.run([compiler, *flags, "-shared", "-fPIC", "-o", out, source, "-ldl"], check=True)
            os.replace(out, kept)  # other processes may do the same
    return kept.read_bytes()


def preprocessed(source: Path) -> str:
    """Return the text of a C++ file with the text of the files that it includes."""
    return subprocess.run(["g++", "-std=c++17", "-E", source], check=True, capture_output=True, text=True).stdout
