"""A TLS context that takes up new files of certificates while the server runs; it says nothing of whom to trust."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.listen import Tls

log = logging.getLogger("llmc.serve")
SECONDS = 0.25  # between two looks at the files

Marks = tuple[tuple[int, int, int] | None, ...]


class Renewed(ssl.SSLContext):
    """Gives every new connection the latest context of `tls`; those that are open keep the one they began with."""

    tls: Tls
    latest: ssl.SSLContext

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """As the latest context does."""
        return self.latest.wrap_bio(*args, **options)

    async def follow(self) -> None:
        """Look at the files for ever. Those that changed are taken up once they rest, as a certificate and its key do
        not change together; of what cannot be used the log tells, and the context before stays."""
        used = before = _marks(self.tls)
        while True:
            await asyncio.sleep(SECONDS)
            now = _marks(self.tls)
            if now != used and now == before:
                used = now
                await self._take_up()
            before = now

    async def _take_up(self) -> None:
        try:
            self.latest = await asyncio.to_thread(self.tls.context)
        except (LlmcError, OSError) as e:
            cause = e.cause if isinstance(e, LlmcError) else e.strerror
            log.error("the certificates changed and cannot be used, those before stay: %s", cause)
        else:
            log.info("the certificates changed: new connections get those of %s", self.tls.certfile)


def context_of(tls: Tls | None) -> ssl.SSLContext | None:
    """What to serve with. LlmcError E649 where a file cannot be used."""
    if tls is None or not tls.refresh:
        return None if tls is None else tls.context()
    made = Renewed(ssl.PROTOCOL_TLS_SERVER)
    made.tls, made.latest = tls, tls.context()
    return made


def _marks(tls: Tls) -> Marks:
    """Which files lie there now, behind links; None for one that cannot be seen."""
    return tuple(_mark(path) for path in (tls.certfile, tls.keyfile, tls.ca_certs) if path is not None)


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
