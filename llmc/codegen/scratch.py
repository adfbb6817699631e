"""Folders for work in progress: gone when the work is done, or when somebody works after its owner was killed. What is
worth keeping lies in a cache, which is not made here."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir, mkdtemp

from llmc.diagnostics import Diagnostic

PREFIX = "llmc-"
OWNER = ".owner"  # locked as long as the owner lives; a folder without one is nobody's to remove


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder in the system's place for temporary files; the ones of dead owners are removed first."""
    root = Path(gettempdir())
    sweep(root)
    folder = Path(mkdtemp(prefix=PREFIX, dir=root))
    new = folder / f"{OWNER}.new"
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    new.rename(folder / OWNER)
    try:
        yield folder
    finally:
        if (folder / OWNER).exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def keep(folder: Path) -> None:
    """Leave a scratch folder where it is: its user is told where."""
    (folder / OWNER).unlink(missing_ok=True)


def sweep(root: Path) -> None:
    """Remove our own folders whose owner is gone."""
    for path in root.glob(f"{PREFIX}*/{OWNER}"):
        try:
            if path.parent.is_symlink() or path.parent.stat().st_uid != os.getuid():
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # its owner works on, or has just finished
            continue


def check_cache(folder: Path) -> None:
    """Make a cache folder; Diagnostic E100 where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix=".probe-"):
            pass
    except OSError as e:
        raise Diagnostic(
            "E100",
            f"the cache {folder} cannot be written: {e.strerror or e}",
            "name another folder with --cache DIR, or keep nothing with --no-cache",
        ) from None
