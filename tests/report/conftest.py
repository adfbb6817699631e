"""One small compiled model for all tests that look into artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from kernel_cache import with_kernels
from models.cases import LISTED
from models.kit import save

from llmc.cli import main


class Made(NamedTuple):
    """A checkpoint, its artifact, the build report that its compile wrote, and the cache of kernels."""

    model: Path
    artifact: Path
    page: Path
    cache: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("look")
    found = Made(folder / "tiny", folder / "tiny.llmc", folder / "tiny.html", with_kernels(folder / "cache"))
    save(LISTED[0], found.model)
    args = ["compile", str(found.model), "-o", str(found.artifact), "--cache", str(found.cache), "--max-num-seqs", "4"]
    assert main([*args, "--report"]) == 0
    return found
