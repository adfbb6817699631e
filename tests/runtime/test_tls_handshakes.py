"""TLS handshakes of clients that send too much, or that fail."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import socket
import ssl
from pathlib import Path

import pytest

pytest.importorskip("starlette")
from llmc_runtime.server.http import tls
from llmc_runtime.server.http.event_loop import ServerLoop
from llmc_runtime.server.http.tls import Tls

from tests.runtime.test_server_tls import SOON, handshake, openssl


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with key.pem and cert.pem of localhost, and chain.pem, which repeats the certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    folder = tmp_path_factory.mktemp("pem")
    key, cert = folder / "key.pem", folder / "cert.pem"
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    openssl("req", "-x509", *SOON, "-keyout", str(key), "-out", str(cert), *name)
    (folder / "chain.pem").write_bytes(cert.read_bytes() * 60)
    return folder


def test_long_handshakes_are_cut_off(pem: Path) -> None:
    """8,000 groups and 6,000 keys took the server 11 ms; they pass if the server requests certificates."""
    context = Tls(pem / "cert.pem", pem / "key.pem").context()
    asking = Tls(pem / "cert.pem", pem / "key.pem", ca_certs=pem / "cert.pem", cert_reqs=2).context()
    for ours in (context, asking):
        incoming = ssl.MemoryBIO()
        link = ours.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True)
        length = 60_000  # of a hello, which is sent in parts
        incoming.write(b"\x16\x03\x01" + (16384).to_bytes(2, "big") + b"\1" + length.to_bytes(3, "big"))
        for size in (4000, 4000):
            incoming.write(bytes(size))
            with pytest.raises(ssl.SSLWantReadError):
                link.do_handshake()
        incoming.write(bytes(4000))
        with pytest.raises(ssl.SSLError, match="too long"):
            link.do_handshake()
    client = ssl.create_default_context(cafile=pem / "cert.pem")
    client.load_cert_chain(pem / "chain.pem", pem / "key.pem")
    assert (pem / "chain.pem").stat().st_size > 2 * tls.MAX_HANDSHAKE
    assert handshake(asking, client) == "TLSv1.3"


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x10\x00\x01\x00\x0f\xfc" + bytes(2000)]
)
def test_failed_handshakes_leave_nothing(sent: bytes, pem: Path) -> None:
    """Their memory is freed at once, and not by a collection: these are rare."""

    def left() -> int:
        return sum(isinstance(one, asyncio.sslproto.SSLProtocol) for one in gc.get_objects())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        listening = socket.create_server(("127.0.0.1", 0))
        async with await loop.create_server(
            asyncio.Protocol, sock=listening, ssl=Tls(pem / "cert.pem", pem / "key.pem").context()
        ):
            for _ in range(5):
                with socket.create_connection(listening.getsockname()) as link:
                    link.setblocking(False)
                    await loop.sock_sendall(link, sent)
                    await asyncio.sleep(0.02)
            end = loop.time() + 10
            while left() and loop.time() < end:
                await asyncio.sleep(0.05)

    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=ServerLoop) as runner:
            runner.run(main())
        assert left() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("ending", ["client", "server", "abort"])
@pytest.mark.parametrize("encrypted", [True, False], ids=["tls", "plain"])
def test_closed_connections_leave_nothing(encrypted: bool, ending: str, pem: Path) -> None:
    """Their transports are freed without a collection, however the connection ends."""

    def left() -> int:
        return sum(issubclass(type(one), asyncio.Transport) for one in gc.get_objects())

    class Answer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(data)
            if ending != "client":
                (self.transport.abort if ending == "abort" else self.transport.close)()

    def ask(address: tuple[str, int]) -> None:
        with socket.create_connection(address) as link:
            if not encrypted:
                link.sendall(b"x")
                link.recv(1)
                return
            trusting = ssl.create_default_context(cafile=pem / "cert.pem")
            with trusting.wrap_socket(link, server_hostname="localhost") as secured:
                secured.sendall(b"x")
                secured.recv(1)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        listening = socket.create_server(("127.0.0.1", 0))
        context = Tls(pem / "cert.pem", pem / "key.pem").context() if encrypted else None
        async with await loop.create_server(Answer, sock=listening, ssl=context):
            before = left()
            for _ in range(3):
                with contextlib.suppress(OSError):  # of a connection that is aborted
                    await asyncio.to_thread(ask, listening.getsockname())
            end = loop.time() + 10
            while left() > before and loop.time() < end:
                await asyncio.sleep(0.02)
            assert left() == before

    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=ServerLoop) as runner:
            runner.run(main())
    finally:
        gc.enable()
