"""A TLS context that reloads its certificate files while the server runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.http.listen import Tls

log = logging.getLogger("llmc.serve")
SECONDS = 0.25  # between checks of the files

Marks = tuple[tuple[int, int, int] | None, ...]


class ReloadingContext(ssl.SSLContext):
    """Uses the latest context of `tls` for new connections; open connections keep theirs."""

    tls: Tls
    latest: ssl.SSLContext

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Wrap a connection with the latest context."""
        return self.latest.wrap_bio(*args, **options)

    async def follow(self) -> None:
        """Watch the files forever, and reload them once they have changed and settled.

        A certificate and its key are not replaced at the same instant, so changed files are loaded only when they are
        unchanged since the check before. If they cannot be used, the error is logged and the previous context stays.
        """
        used = before = _marks(self.tls)
        while True:
            await asyncio.sleep(SECONDS)
            now = _marks(self.tls)
            if now != used and now == before:
                used = now
                await self._reload()
            before = now

    async def _reload(self) -> None:
        try:
            self.latest = await asyncio.to_thread(self.tls.context)
        except (LlmcError, OSError) as e:
            cause = e.cause if isinstance(e, LlmcError) else e.strerror
            log.error("the changed certificate files cannot be used, so the previous ones stay in use: %s", cause)
        else:
            log.info("certificates reloaded: new connections use %s", self.tls.certfile)


def context_of(tls: Tls | None) -> ssl.SSLContext | None:
    """Return the server's TLS context, or None without TLS. Raises LlmcError E649 if a file cannot be used."""
    if tls is None or not tls.refresh:
        return None if tls is None else tls.context()
    context = ReloadingContext(ssl.PROTOCOL_TLS_SERVER)
    context.tls, context.latest = tls, tls.context()
    return context


def _marks(tls: Tls) -> Marks:
    """Identify the current files, following links; None for a file that cannot be read."""
    return tuple(_mark(path) for path in (tls.certfile, tls.keyfile, tls.ca_certs) if path is not None)


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
