"""The output path: its lock, what may be replaced, and the atomic move of a finished folder to it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import CANARY, Folder
from llmc_runtime.format.names import MANIFEST_FILE

from llmc.artifact.files import Files, Hook, check_writable, no_hook, sync_folder, writing
from llmc.diagnostics import Diagnostic

PART = "manifest.json.part"
EVALUATION = "report/eval.json"  # written by llmc eval
OF_WEIGHTS = (CANARY, EVALUATION)  # files that describe what the weights compute
_AT_FDCWD, _EXCHANGE = -100, 2


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of an output path; raises Diagnostic E121 if another process holds it."""
    with writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    path = out.parent / f".{out.name}.writing"
    while True:
        with writing(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise Diagnostic("E121", f"{out} is being written by another process", "wait for it, or use -o") from None
        if _same(fd, path):
            break
        os.close(fd)  # the previous holder removed the file between our open and our lock
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def check_free(out: Path, force: bool) -> None:
    """Raise Diagnostic E120 if `out` exists and `force` is not set, E122 if it is not an artifact, E123 if it cannot be
    written.
    """
    check_writable(out)
    if not os.path.lexists(out) or _is_remains(out):
        return
    if out.is_symlink() or not out.is_dir() or not (out / MANIFEST_FILE).is_file():
        raise Diagnostic("E122", f"{out} exists and is not an artifact", "choose another -o; llmc does not remove it")
    if not force:
        raise Diagnostic("E120", f"{out} exists", "add --force to replace it, or choose another -o")
    foreign = foreign_files(out)
    if foreign:
        cause = f"{out} contains {len(foreign)} files that are not the artifact's, such as {foreign[0]}"
        raise Diagnostic("E122", cause, "move them away, or choose another -o")


def foreign_files(out: Path) -> list[str]:
    """Return files in an artifact's folder that its manifest does not list; Diagnostic E122 if it is unreadable."""
    try:
        manifest = Folder(out).manifest()
    except LlmcError as error:
        cause = f"{out} has a manifest that cannot be read ({error.code})"
        raise Diagnostic("E122", cause, f"remove it yourself: rm -r {out}") from None
    known = {MANIFEST_FILE, PART, CANARY, *manifest.files, *(w.file for w in manifest.weights.files)}
    paths = (p.relative_to(out).as_posix() for p in sorted(out.rglob("*")) if not p.is_dir() or p.is_symlink())
    return [n for n in paths if n not in known]


def _is_remains(path: Path) -> bool:
    """Whether a folder is empty or an incomplete artifact that a killed writer left behind."""
    if path.is_symlink() or not path.is_dir() or (path / MANIFEST_FILE).exists():
        return False
    return (path / PART).is_file() or not any(path.iterdir())


def sweep(out: Path) -> None:
    """Remove temporary folders that killed writers of `out` left next to it. The caller holds the lock."""
    for path in out.parent.glob(f".{out.name}.tmp-*"):
        if _is_remains(path) or (path / MANIFEST_FILE).is_file():
            shutil.rmtree(path)


@contextmanager
def temporary(out: Path, hook: Hook = no_hook) -> Iterator[Files]:
    """A temporary folder next to `out`, removed if the block fails."""
    files = Files(out.parent / f".{out.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}", hook)
    files.folder()
    try:
        yield files
    except BaseException:
        hook("remove", files.root)
        shutil.rmtree(files.root, ignore_errors=True)
        raise


def publish(files: Files, out: Path) -> None:
    """Move the finished folder `files.root`, whose manifest is still named `PART`, to `out`.

    A reader of `out` first sees nothing or an incomplete folder, then the new artifact; if an artifact is replaced, it
    sees the old one, then the new one.
    """
    temp = files.root
    if not os.path.lexists(out) or _is_remains(out):
        if out.exists():
            files.hook("remove", out)
            shutil.rmtree(out)
        files.rename(temp, out)
        files.rename(out / PART, out / MANIFEST_FILE)
        return
    files.rename(temp / PART, temp / MANIFEST_FILE)
    files.hook("exchange", out)
    if not _exchange(temp, out):
        aside = temp.with_name(temp.name + "-old")
        os.rename(out, aside)
        os.rename(temp, out)
        temp = aside
    sync_folder(out.parent)
    files.hook("remove", temp)
    shutil.rmtree(temp)


def _exchange(a: Path, b: Path) -> bool:
    """Atomically exchange two folders; returns False if the system does not support it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0
