"""Safe access to an artifact's folder: names, sizes and hashes are checked, and links are not followed."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.hashing import sha256, wrong_blocks
from llmc_runtime.format.json_fields import REMEDY, check_name
from llmc_runtime.format.manifest import FileInfo, Manifest, WeightFile
from llmc_runtime.format.names import MANIFEST_FILE

MAX_MANIFEST = 16 << 20
CANARY = "canary.json"  # expected log-probabilities (see exec.canary)
_WRITTEN_FIRST = frozenset(("programs", "kernels", "weights", "ir"))  # folders of an artifact; the manifest is last
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Folder:
    """An artifact's folder. Relative names are opened part by part, so that no file outside can be opened."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            problem = "is not a folder" if self.root.exists() else "does not exist"
            raise LlmcError("E101", f"artifact {str(root)!r} {problem}", "pass a folder written by llmc compile")

    def open(self, name: str) -> tuple[int, int]:
        """Open a regular file. Returns the descriptor, which the caller closes, and the size in bytes.

        Raises LlmcError E104 for unsafe names and links, and E106 if the file is missing or unreadable.
        """
        check_name(name, str(self.root))
        at = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            *folders, last = name.split("/")
            for part in folders:
                inner = self._open(part, name, at, _FLAGS | os.O_DIRECTORY)
                os.close(at)
                at = inner
            fd = self._open(last, name, at, _FLAGS)
        finally:
            os.close(at)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise LlmcError("E104", f"{self.root / name} is not a regular file", REMEDY)
        return fd, info.st_size

    def _open(self, part: str, name: str, at: int, flags: int) -> int:
        try:
            return os.open(part, flags, dir_fd=at)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO) or self._is_link(part, at):
                cause = f"{self.root / name} is a link or a device; an artifact may contain only regular files"
                raise LlmcError("E104", cause, "copy the artifact with its links followed (cp -rL)") from None
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise LlmcError("E106", f"{self.root / name} is missing", REMEDY) from None
            reason = os.strerror(error.errno or 0)
            raise LlmcError("E106", f"{self.root / name} cannot be read: {reason}", "make it readable") from None

    @staticmethod
    def _is_link(part: str, at: int) -> bool:
        try:
            return stat.S_ISLNK(os.stat(part, dir_fd=at, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def read(self, name: str, cap: int) -> bytes:
        """Return the bytes of a small file; raise LlmcError E106 if it is larger than `cap`."""
        fd, size = self.open(name)
        with os.fdopen(fd, "rb") as file:
            if size > cap:
                raise LlmcError("E106", f"{self.root / name} has {size} bytes, expected at most {cap}", REMEDY)
            return file.read(cap + 1)

    def map(self, name: str) -> memoryview:
        """Map a file read-only and return its bytes."""
        fd, size = self.open(name)
        try:
            return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)) if size else memoryview(b"")
        finally:
            os.close(fd)

    def manifest(self) -> Manifest:
        """Load the manifest; raise LlmcError E101 if there is none, and the errors of `Manifest.load`."""
        if not (self.root / MANIFEST_FILE).exists():
            if (self.root / "config.json").exists():
                cause = f"{self.root} is a Hugging Face folder, not an artifact"
                raise LlmcError("E101", cause, f"compile it: llmc compile {self.root} -o model.llmc")
            cause, remedy = self._without_manifest()
            raise LlmcError("E101", cause, remedy)
        return Manifest.load(self.read(MANIFEST_FILE, MAX_MANIFEST), str(self.root / MANIFEST_FILE))

    def _without_manifest(self) -> tuple[str, str]:
        """Return the cause and the remedy of the error for a folder that has no manifest."""
        inside = {path.name for path in self.root.iterdir()}
        if inside & _WRITTEN_FIRST:
            remedy = "compile the model again; an artifact is complete when llmc compile has ended"
            return f"{self.root} is incomplete: it has no {MANIFEST_FILE}", remedy
        kind = f"not an artifact: it has no {MANIFEST_FILE}" if inside else "an empty folder"
        return f"{self.root} is {kind}", "pass a folder written by llmc compile"

    def sizes(self, manifest: Manifest) -> Iterator[LlmcError]:
        """Check names and sizes of all files, and yield one error per faulty file."""
        for name, size in manifest.sizes.items():
            try:
                fd, actual = self.open(name)
            except LlmcError as error:
                yield error
                continue
            os.close(fd)
            if actual != size:
                problem = "is truncated" if actual < size else "is too long"
                yield LlmcError("E106", f"{self.root / name} {problem}: {actual} bytes, expected {size}", REMEDY)

    def check_small(self, files: Mapping[str, FileInfo]) -> Iterator[LlmcError]:
        """Check the contents of small files, and yield one error per faulty file."""
        for name, info in files.items():
            try:
                data = self.read(name, info.bytes)
            except LlmcError as error:
                yield error
                continue
            if len(data) != info.bytes or sha256(data) != info.sha256:
                yield LlmcError("E107", f"{self.root / name} is damaged: its bytes do not match their hash", REMEDY)

    def check_weights(self, file: WeightFile, data: memoryview, threads: int) -> Iterator[LlmcError]:
        """Check the contents of a weight file, and yield one error per faulty block."""
        for i in wrong_blocks(data, file.blocks, file.block, threads):
            yield self.wrong_block(file, i)

    def wrong_block(self, file: WeightFile, index: int) -> LlmcError:
        """Return the error for a block of weights that differs from its hash."""
        block = f"block {index + 1} of {len(file.blocks)} (from byte {index * file.block})"
        return LlmcError("E107", f"{self.root / file.file} is damaged: {block} does not match its hash", REMEDY)
