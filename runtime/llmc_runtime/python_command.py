"""Starts a module of this package in a new Python process, and makes what both share: memory, a folder for sockets."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote_from_bytes, unquote_to_bytes

_MAX_SOCKET_NAME = 107  # bytes of a Unix socket's path
_FALLBACK_FOLDERS = ("/tmp", "/dev/shm")  # for sockets, if the default folder for temporary files is unsuitable
# The child imports the package from its parent's sys.path, never from its working directory.
_BOOT = (
    "import os; os.nice({nice}); import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from {module} import main; sys.exit(main(sys.argv[1:]))"
)


def module_command(module: str, nice: int = 0) -> list[str]:
    """Return the command that runs `main(argv)` of `module`; the caller appends the arguments.

    `nice` is added to the niceness before anything of the module is imported, which may take half a second.
    """
    return [sys.executable, "-P", "-c", _BOOT.format(module=module, nice=nice), json.dumps([*filter(None, sys.path)])]


class LinkedProcess:
    """A process that this one shares the socket `link` with.

    It inherits `descriptors` and standard error, and does not receive Ctrl-C. `close()` closes the link, kills the
    process and waits for its end; so does the end of this object. Raises OSError, and closes the link, if the process
    cannot be created.
    """

    def __init__(self, link: socket.socket, command: Sequence[str], descriptors: Sequence[int]) -> None:
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if sys.__stderr__ is None else None, pass_fds=descriptors, process_group=0,
            )  # fmt: skip
        except BaseException:
            link.close()
            raise
        self.close: weakref.finalize[Any, Any] = weakref.finalize(self, _end, link, self.process, os.getpid())


def _end(link: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    link.close()
    if os.getpid() != owner:  # a fork of the owner
        return
    with contextlib.suppress(OSError):
        process.kill()
        process.wait()


def memory_file(name: str, data: bytes) -> BinaryIO:
    """Return a file in memory with this content, positioned at the start."""
    file = os.fdopen(os.memfd_create(name), "wb+")
    file.write(data)
    file.seek(0)
    return file


def quoted(path: str | Path) -> str:
    """Return the absolute path, percent-encoded: file names are bytes, and messages to processes are Unicode."""
    return quote_from_bytes(os.fsencode(Path(path).resolve()))


def unquoted(name: str) -> str:
    """Return the path that `quoted` encoded."""
    return os.fsdecode(unquote_to_bytes(name))


def socket_folder(name: str) -> Path:
    """Make a folder for this user only, whose path is valid Unicode, and short enough for a socket with this name.

    Raises OSError or UnicodeEncodeError.
    """
    last: Exception | None = None
    for parent in (None, *_FALLBACK_FOLDERS):
        try:
            folder = tempfile.mkdtemp(prefix="llmc-", dir=parent)  # 0700
            if len(f"{folder}/{name}".encode()) <= _MAX_SOCKET_NAME:
                return Path(folder)
            last = OSError(f"{folder} is too long for the name of a socket")
        except OSError as e:
            last = e
            continue
        except UnicodeEncodeError as e:
            last = e
        os.rmdir(folder)
    assert last is not None
    raise last
