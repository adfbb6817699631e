"""How many bytes of a response wait in the server, without counting, for a client that does not read."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
from llmc_runtime.server.http.connection_limit import MAX_UNCOUNTED, limit_unsent
from llmc_runtime.server.http.tls import Tls

from tests.runtime.test_server_tls import SOON, openssl


class Writer(asyncio.Protocol):
    """Writes until `pause_writing` reports that the client does not read, and records what the transport keeps."""

    def __init__(self, sizes: asyncio.Queue[int]) -> None:
        self.sizes, self.paused = sizes, False

    def connection_made(self, transport: Any) -> None:
        limit_unsent(transport, 30.0)
        for _ in range(1000):
            if not self.paused:
                transport.write(b"x" * 8192)
        self.sizes.put_nowait(transport.get_write_buffer_size())

    def pause_writing(self) -> None:
        self.paused = True


@pytest.mark.parametrize("encrypted", [False, True])
def test_few_bytes_wait_for_a_client_before_they_count(tmp_path: Path, encrypted: bool) -> None:
    """With TLS, asyncio keeps 512 KiB for each of thousands of connections before it reports that they do not read."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    context, options = None, dict[str, Any]()
    if encrypted:
        if shutil.which("openssl") is None:
            pytest.skip("openssl makes the certificates")
        name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        openssl("req", "-x509", *SOON, "-keyout", str(key), "-out", str(cert), *name)
        context = Tls(cert, key).context()
        options = {"ssl": ssl.create_default_context(cafile=cert), "server_hostname": "localhost"}

    async def main() -> None:
        sizes: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Writer(sizes), "127.0.0.1", 0, ssl=context)
        _, link = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1024, **options)
        assert 0 < await asyncio.wait_for(sizes.get(), 30) <= MAX_UNCOUNTED + 10_000
        link.transport.abort()
        server.close()

    asyncio.run(main())
