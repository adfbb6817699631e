"""The listening socket, which is bound before the model is loaded."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from llmc_runtime.format.errors import LlmcError


@contextlib.contextmanager
def listening(host: str, port: int, uds: Path | None) -> Iterator[socket.socket]:
    """Yield a bound socket. A Unix socket at `uds` is accessible to this user only, and is removed at the end.

    Raises LlmcError E646 if the address cannot be used.
    """
    if uds is None:
        with _address(host, port) as bound:
            yield bound
        return
    with _unix(uds) as bound:
        inode = os.stat(uds).st_ino
        try:
            yield bound
        finally:
            with contextlib.suppress(OSError):
                if os.stat(uds).st_ino == inode:
                    os.unlink(uds)


def name_of(bound: socket.socket, tls: bool) -> str:
    """Return the URL of a bound socket, for display."""
    if bound.family == socket.AF_UNIX:
        return f"{'https' if tls else 'http'}+unix://{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"{'https' if tls else 'http'}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _address(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as e:
        cause = f"the server cannot listen on {host}:{port}: {getattr(e, 'strerror', None) or e}"
        raise LlmcError("E646", cause, "choose another --port, or for --host an address of this machine") from e
    return bound


def _unix(path: Path) -> socket.socket:
    remedy = "choose another --uds, of at most 100 characters, in a folder that you own"
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # inaccessible to others from the start
    try:
        _remove_stale(path)
        bound.bind(str(path))
    except (OSError, ValueError) as e:
        bound.close()
        cause = f"the server cannot listen on {path}: {getattr(e, 'strerror', None) or e}"
        raise LlmcError("E646", cause, remedy) from e
    finally:
        os.umask(before)
    return bound


def _remove_stale(path: Path) -> None:
    """Remove a socket file without a listener. Other files remain, and `bind` reports them."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
