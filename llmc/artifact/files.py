"""Crash-safe file operations. Each one calls `hook` first, so that tests can stop the writer before any of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc.diagnostics import Diagnostic

Hook = Callable[[str, Path], None]
Write = Callable[[bytes | memoryview], None]


def no_hook(operation: str, path: Path) -> None:
    """The default hook; does nothing."""
    return


class Files:
    """Creates files below `root`. A file is on disk when its `create` block ends; `sync` does the same for folders."""

    def __init__(self, root: Path, hook: Hook = no_hook) -> None:
        """Create files below `root`, calling `hook(operation, path)` before every operation."""
        self.root = root
        self.hook = hook

    def folder(self, name: str = "") -> None:
        """Create a folder and its parents up to the root."""
        path = self.root / name
        if not path.is_dir():
            self.hook("mkdir", path)
            with writing(path):
                path.mkdir(parents=bool(name))

    @contextmanager
    def create(self, name: str, replace: bool = False) -> Iterator[Write]:
        """Create a file; the block receives a function that appends bytes to it."""
        path = self.root / name
        if "/" in name:
            self.folder(name.rpartition("/")[0])
        self.hook("create", path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if replace else os.O_EXCL)
        with writing(path):
            fd = os.open(path, flags, 0o644)
        try:

            def write(data: bytes | memoryview) -> None:
                self.hook("write", path)
                view = memoryview(data)
                with writing(path):
                    while len(view):
                        view = view[os.write(fd, view) :]

            yield write
            self.hook("fsync", path)
            with writing(path):
                os.fsync(fd)
        finally:
            os.close(fd)

    def put(self, name: str, data: bytes, replace: bool = False) -> None:
        """Write a small file at once."""
        with self.create(name, replace) as write:
            write(data)

    def remove(self, name: str) -> None:
        """Delete a file if it exists."""
        path = self.root / name
        self.hook("remove", path)
        with writing(path):
            path.unlink(missing_ok=True)

    def sync(self) -> None:
        """fsync all folders, the root last."""
        inner = sorted((p for p in self.root.rglob("*") if p.is_dir()), reverse=True)
        for path in [*inner, self.root]:
            self.hook("fsync", path)
            sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename, and fsync the folder of the new name."""
        self.hook("rename", new)
        with writing(new):
            os.rename(old, new)
        sync_folder(new.parent)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that its entries are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_writable(out: Path) -> None:
    """Raise Diagnostic E123 if `out` cannot be created: checked before the work whose result it is."""
    place = out.absolute().parent
    with writing(place):
        while not os.path.lexists(place):
            place = place.parent
        os.rmdir(tempfile.mkdtemp(prefix=".llmc-", dir=place))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError of the block into Diagnostic E123."""
    try:
        yield
    except OSError as error:
        why = os.strerror(error.errno or 0)
        remedy = (
            "make room on that disk, or write elsewhere with -o" if error.errno == 28 else "write elsewhere with -o"
        )
        raise Diagnostic("E123", f"cannot write {path}: {why}", remedy) from None
