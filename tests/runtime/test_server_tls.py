"""TLS and Unix sockets: generated certificates, clients of several kinds, and invalid files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.cli import main_serve
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.http import event_loop, tls
from llmc_runtime.server.http.event_loop import ServerLoop
from llmc_runtime.server.http.fair_selector import Events, FairSelector
from llmc_runtime.server.http.listen import listening
from llmc_runtime.server.http.tls import Tls

from tests.runtime.test_server_load import Command

PROGRAM = str(Path(__file__).with_name("serve_fake.py"))
SOON = ("-days", "2", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with key.pem and cert.pem of localhost, other.pem (another key), locked.pem (encrypted)."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    folder = tmp_path_factory.mktemp("pem")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    openssl("req", "-x509", *SOON, "-keyout", key, "-out", cert, *name)
    openssl("genpkey", "-algorithm", "ed25519", "-out", str(folder / "other.pem"))
    openssl("pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", str(folder / "locked.pem"))
    return folder


@contextlib.contextmanager
def started(*words: str) -> Iterator[Command]:
    command = Command(PROGRAM, "0", "5", *words)
    try:
        yield command
    finally:
        command.process.terminate()
        code, log = command.end()
        assert code == 0 and "Traceback" not in log, log


def ask(client: httpx.Client, url: str) -> Any:
    body = {"prompt": [20, 30, 40], "max_tokens": 7, "ignore_eos": True, "temperature": 0}
    return client.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]


def test_a_server_over_tls(pem: Path) -> None:
    trusting = ssl.create_default_context(cafile=pem / "cert.pem")
    with started("--ssl-certfile", str(pem / "cert.pem"), "--ssl-keyfile", str(pem / "key.pem")) as command:
        url = command.url
        assert url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=trusting) as client:
            assert len(ask(client, url)) > 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        port = int(url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = plain.recv(1000)
            assert b"HTTP" not in received
            assert not received or plain.recv(1000) == b""  # at most an alert, then the end
        old = ssl.create_default_context(cafile=pem / "cert.pem")
        old.set_ciphers("DEFAULT@SECLEVEL=0")
        with pytest.warns(DeprecationWarning):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with socket.create_connection(("127.0.0.1", port), timeout=10) as link, pytest.raises(ssl.SSLError):
            old.wrap_socket(link, server_hostname="localhost")
        with httpx.Client(verify=trusting) as client:
            assert client.get(f"{url}/health").status_code == 200


def test_clients_show_certificates_where_they_must(pem: Path) -> None:
    files = ("--ssl-certfile", str(pem / "cert.pem"), "--ssl-keyfile", str(pem / "key.pem"))
    with started(*files, "--ssl-ca-certs", str(pem / "cert.pem"), "--ssl-cert-reqs", "2") as command:
        nobody = ssl.create_default_context(cafile=pem / "cert.pem")
        with pytest.raises(httpx.TransportError), httpx.Client(verify=nobody) as client:
            client.get(f"{command.url}/health")
        known = ssl.create_default_context(cafile=pem / "cert.pem")
        known.load_cert_chain(pem / "cert.pem", pem / "key.pem")
        with httpx.Client(verify=known) as client:
            assert client.get(f"{command.url}/health").status_code == 200


def test_unfinished_handshakes_are_disconnected(pem: Path) -> None:
    class Quick(ServerLoop):
        handshake_seconds = 0.3

    async def main() -> float:
        context = Tls(pem / "cert.pem", pem / "key.pem").context()
        listening = socket.create_server(("127.0.0.1", 0))
        loop = asyncio.get_running_loop()
        async with await loop.create_server(asyncio.Protocol, sock=listening, ssl=context):
            began = time.monotonic()
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
            return time.monotonic() - began

    with asyncio.Runner(loop_factory=Quick) as runner:
        assert 0.2 < runner.run(main()) < 5


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Return the version of TLS that both agree on. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    for side in (theirs, ours) * 3:
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return ours.version()


@pytest.mark.skipif(ssl.OPENSSL_VERSION_INFO < (3,), reason="older ones have no finite fields in TLS 1.3")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_clients_choose_no_expensive_key_exchange(pem: Path, version: ssl.TLSVersion) -> None:
    """A group of 8,192 bits takes the server 200 ms, in which no token is forwarded."""
    context = Tls(pem / "cert.pem", pem / "key.pem").context()
    for group in ("ffdhe8192", "ffdhe2048", "secp521r1"):
        costly = ssl.create_default_context(cafile=pem / "cert.pem")
        costly.minimum_version = costly.maximum_version = version
        costly.set_ecdh_curve(group)
        with pytest.raises(ssl.SSLError):
            handshake(context, costly)
    usual = ssl.create_default_context(cafile=pem / "cert.pem")
    usual.minimum_version = usual.maximum_version = version
    assert handshake(context, usual) == version.name.replace("_", ".")
    assert context.options & ssl.OP_NO_RENEGOTIATION, "a client of TLS 1.2 could begin again and again"


def test_clients_that_send_little_but_records_are_cut_off(pem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As new keys, which have no data at all, they take 30 us each."""
    now = 0.0
    monkeypatch.setattr(tls.time, "monotonic", lambda: now)

    def sent(pieces: int, size: int, pause: float) -> int:
        """How many pieces of data the server reads before it fails."""
        nonlocal now
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = Tls(pem / "cert.pem", pem / "key.pem").context()
        ours = context.wrap_bio(to_server, to_client, server_side=True)
        theirs = ssl.create_default_context(cafile=pem / "cert.pem").wrap_bio(to_client, to_server, False, "localhost")
        for side in (theirs, ours) * 3:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
        for number in range(pieces):
            theirs.write(b"x" * size)
            now += pause
            try:
                assert len(ours.read(20_000)) == size
            except ssl.SSLWantReadError:
                raise
            except ssl.SSLError:
                return number
        return pieces

    assert sent(5000, 100, 0.0) == 5000 and sent(600, 1, 0.0) == 600 and sent(3000, 1, 0.05) == 3000
    assert 600 < sent(3000, 1, 0.0) < 1000
    assert 600 < sent(3000, 1, 0.001) < 1000


def certificate_of(url: str, trusted: Path) -> bytes | None:
    """Return the server's certificate (DER) as a client that trusts only `trusted` sees it; None if that refuses it."""
    host, port = url.removeprefix("https://").split(":")
    context = ssl.create_default_context(cafile=trusted)
    try:
        with socket.create_connection((host, int(port)), timeout=10) as link:
            return context.wrap_socket(link, server_hostname="localhost").getpeercert(True)
    except ssl.SSLCertVerificationError:
        return None


def until_said(command: Command, words: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while words not in "".join(command.lines):
        assert time.monotonic() < end, command.lines
        time.sleep(0.05)


def test_handshakes_that_do_not_end_give_way(pem: Path) -> None:
    """They are no more than connections may be: the oldest are cut off, and descriptors are left for others."""
    trusting = ssl.create_default_context(cafile=pem / "cert.pem")
    words = ("--ssl-certfile", str(pem / "cert.pem"), "--ssl-keyfile", str(pem / "key.pem"), "--max-connections", "90")
    with (
        started(*words) as command,
        httpx.Client(verify=trusting, timeout=20) as client,
        contextlib.ExitStack() as stack,
    ):
        assert client.get(f"{command.url}/health").status_code == 200
        host, port = command.url.removeprefix("https://").split(":")
        silent = [stack.enter_context(socket.create_connection((host, int(port)), timeout=5)) for _ in range(150)]
        for link in silent[:50]:
            with contextlib.suppress(ConnectionError):
                assert link.recv(1) == b""
        silent[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)
        with httpx.Client(verify=trusting, timeout=20) as other:
            assert other.get(f"{command.url}/health").status_code == 200
        assert client.get(f"{command.url}/health").status_code == 200


def test_handshakes_at_the_same_time_take_turns(pem: Path) -> None:
    """Each takes milliseconds, in which no token of a stream is forwarded: one iteration of the event loop has one."""
    silent, reported = ssl.create_default_context(cafile=pem / "cert.pem"), []

    class Watched(FairSelector):
        def select(self, timeout: float | None = None) -> Events:
            began = {fd for fd, kind in self._client_epolls.items() if kind is self._handshakes}
            events = super().select(timeout)
            reported.append(len(began & {key.fd for key, _ in events}))
            return events

    def hello() -> bytes:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        with pytest.raises(ssl.SSLWantReadError):
            silent.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
        return outgoing.read()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        listening = socket.create_server(("127.0.0.1", 0), backlog=100)
        links = [socket.create_connection(listening.getsockname()) for _ in range(30)]
        for link in links:
            link.sendall(hello())
            link.setblocking(False)
        async with await loop.create_server(
            asyncio.Protocol, sock=listening, ssl=Tls(pem / "cert.pem", pem / "key.pem").context()
        ):
            answers = await asyncio.gather(*(loop.sock_recv(link, 100) for link in links))
            assert all(answers)
        for link in links:
            link.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_loop, "FairSelector", Watched)
        with asyncio.Runner(loop_factory=ServerLoop) as runner:
            runner.run(main())
    assert max(reported) == 1 and sum(reported) >= 30


def test_connections_that_give_way_are_closed_at_once(pem: Path) -> None:
    """Their clients do not end TLS, which closing would wait for while more and more descriptors are open."""
    careless = ssl.create_default_context(cafile=pem / "cert.pem")
    words = ("--ssl-certfile", str(pem / "cert.pem"), "--ssl-keyfile", str(pem / "key.pem"), "--max-connections", "20")
    with started(*words) as command, contextlib.ExitStack() as stack:
        host, port = command.url.removeprefix("https://").split(":")
        folder = Path(f"/proc/{command.process.pid}/fd")
        before = len(list(folder.iterdir()))
        for _ in range(80):
            link = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            stack.enter_context(careless.wrap_socket(link, server_hostname="localhost"))
        assert len(list(folder.iterdir())) - before < 40
        with httpx.Client(verify=careless, timeout=20) as other:
            assert other.get(f"{command.url}/health").status_code == 200


def test_new_certificates_are_taken_up_and_open_connections_go_on(pem: Path, tmp_path: Path) -> None:
    live, key, new = tmp_path / "live.pem", tmp_path / "key.pem", tmp_path / "new.pem"
    shutil.copy(pem / "cert.pem", live)
    shutil.copy(pem / "key.pem", key)
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    openssl("req", "-x509", *SOON, "-keyout", str(tmp_path / "new-key.pem"), "-out", str(new), *name)
    first, second = (ssl.PEM_cert_to_DER_cert(path.read_text()) for path in (live, new))
    with started("--ssl-certfile", str(live), "--ssl-keyfile", str(key), "--enable-ssl-refresh") as command:
        trusting = ssl.create_default_context(cafile=pem / "cert.pem")
        with httpx.Client(verify=trusting, timeout=30) as open_before:
            body = {"prompt": [20, 30], "max_tokens": 200, "ignore_eos": True, "stream": True}
            with open_before.stream("POST", f"{command.url}/v1/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                shutil.copy(new, live)  # its key is not there yet
                until_said(command, "cannot be used, so the previous ones stay in use: ")
                assert "does not belong to the certificate" in "".join(command.lines)
                assert certificate_of(command.url, pem / "cert.pem") == first
                os.replace(tmp_path / "new-key.pem", key)
                until_said(command, "certificates reloaded: ")
                assert certificate_of(command.url, new) == second
                assert certificate_of(command.url, pem / "cert.pem") is None
                assert [line for line in lines if line][-1] == "data: [DONE]"
            assert len(ask(open_before, command.url)) > 0  # over the same connection


@pytest.mark.parametrize(
    ("cert", "key", "words"),
    [
        ("no.pem", "key.pem", "no.pem cannot be read"),
        ("cert.pem", "no.pem", "no.pem cannot be read"),
        ("cert.pem", "other.pem", "does not belong to the certificate"),
        ("cert.pem", "locked.pem", "cert.pem is encrypted"),
        ("cert.pem", None, "cert.pem: a certificate or a private key is missing or damaged"),
        ("key.pem", "key.pem", "key.pem: a certificate or"),
        ("words.pem", "key.pem", "words.pem with"),
    ],
)
def test_bad_files_are_reported_before_anything_is_opened(cert: str, key: str | None, words: str, pem: Path) -> None:
    (pem / "words.pem").write_text("-----BEGIN CERTIFICATE-----\nno\n")
    with pytest.raises(LlmcError) as error:
        Tls(pem / cert, None if key is None else pem / key).context()
    assert error.value.code == "E649" and words in error.value.cause.lower()


def test_options_of_tls_that_cannot_be_meant(pem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--ssl-certfile", str(pem / "cert.pem"), "--ssl-keyfile", str(pem / "key.pem"))
    for words in (
        ("--ssl-keyfile", "k"),
        ("--enable-ssl-refresh",),
        (*files, "--ssl-cert-reqs", "2"),
        (*files, "--ssl-ciphers", "NO-SUCH"),
    ):
        assert main_serve(["nowhere.llmc", *words]) == 1
        assert "E649" in capsys.readouterr().err


def test_only_the_owner_can_open_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "serve.sock"
    with started("--uds", str(path), "--timeout-keep-alive", "1") as command:
        assert command.url == f"http+unix://{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert len(ask(client, "http://localhost")) > 0
            assert client.get("http://elsewhere.test/health").status_code == 421
        with socket.socket(socket.AF_UNIX) as idle:
            idle.settimeout(10)
            idle.connect(str(path))
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in idle.recv(1000) and idle.recv(1000) == b""  # it is closed when its time is over
        with pytest.raises(LlmcError) as error, listening("", 0, path):
            pass
        assert error.value.code == "E646"
    assert not path.exists()


def test_only_a_socket_without_a_listener_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "old.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    with listening("", 0, path) as bound:
        bound.listen()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()
    path.write_text("a file of somebody")
    for there in (path, tmp_path / ("x" * 200)):
        with pytest.raises(LlmcError) as error, listening("", 0, there):
            pass
        assert error.value.code == "E646"
    assert path.read_text() == "a file of somebody"
    mask = os.umask(0o22)
    os.umask(mask)
    assert mask != 0o177
