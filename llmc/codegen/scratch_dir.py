"""Temporary folders, removed at the end of their use or, if the process is killed, by a later process."""

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
OWNER = ".owner"  # locked while the owner lives; folders without this file are never removed


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a temporary folder for the duration of the block; first remove those of dead processes."""
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
    """Keep a temporary folder, because an error message refers to it."""
    (folder / OWNER).unlink(missing_ok=True)


def sweep(root: Path) -> None:
    """Remove this user's temporary folders of processes that have ended."""
    for path in root.glob(f"{PREFIX}*/{OWNER}"):
        try:
            if path.parent.is_symlink() or path.parent.stat().st_uid != os.getuid():
                continue
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # the owner is alive, or has just finished
            continue


def check_cache(folder: Path) -> None:
    """Create a cache folder; raises Diagnostic E100 if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix=".probe-"):
            pass
    except OSError as e:
        raise Diagnostic(
            "E100",
            f"the cache {folder} cannot be written: {e.strerror or e}",
            "choose another folder with --cache DIR, or use --no-cache",
        ) from None
