"""The listening socket, which is bound before the model is loaded, and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.option_type import serve_option
from llmc_runtime.server.http.fair_selector import FairSelector
from llmc_runtime.server.http.light_connections import LightConnections

_GROUP = "keys and TLS"


@dataclass(frozen=True)
class Tls:
    """TLS options; files are in PEM format."""

    certfile: Path = serve_option(
        _GROUP, None, "the certificate and its chain, PEM: serve over TLS", flags=("--ssl-certfile",), read=Path,
        metavar="FILE",
    )  # fmt: skip
    keyfile: Path | None = serve_option(
        _GROUP, None, "the private key, PEM; may be in the certificate's file", flags=("--ssl-keyfile",), read=Path,
        metavar="FILE",
    )  # fmt: skip
    ca_certs: Path | None = serve_option(
        _GROUP, None, "who may sign certificates of clients, PEM", flags=("--ssl-ca-certs",), read=Path, metavar="FILE"
    )
    cert_reqs: int = serve_option(
        _GROUP, 0, "of clients: 0 none, 1 optional, 2 required", flags=("--ssl-cert-reqs",), read=int, choices=(0, 1, 2)
    )
    ciphers: str | None = serve_option(
        _GROUP, None, "of TLS 1.2, as OpenSSL names them", flags=("--ssl-ciphers",), metavar="LIST"
    )
    refresh: bool = serve_option(
        _GROUP, False, "take up new files of certificates while serving", flags=("--enable-ssl-refresh",), read=None
    )

    def context(self) -> ssl.SSLContext:
        """Create a context for TLS 1.2 and newer. Raises LlmcError E649 if a file cannot be used."""
        found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        found.minimum_version = ssl.TLSVersion.TLSv1_2
        found.set_alpn_protocols(["http/1.1"])
        for path in filter(None, (self.certfile, self.keyfile, self.ca_certs)):
            _check_readable(path)
        try:
            found.load_cert_chain(self.certfile, self.keyfile, password=_no_password)
        except ssl.SSLError as e:
            where = f"{self.certfile}" if self.keyfile is None else f"{self.certfile} with {self.keyfile}"
            raise LlmcError("E649", f"{where}: {_reason(e)}", _PAIR) from None
        except ValueError:  # raised by _no_password
            raise LlmcError(
                "E649", f"the key of {self.certfile} is encrypted", "openssl pkey -in KEY -out PLAIN"
            ) from None
        try:
            if self.ca_certs is not None:
                found.load_verify_locations(self.ca_certs)
            elif self.cert_reqs:
                raise LlmcError("E649", "--ssl-cert-reqs without --ssl-ca-certs: nobody could pass", "name the file")
            found.verify_mode = ssl.VerifyMode(self.cert_reqs)
            if self.ciphers is not None:
                found.set_ciphers(self.ciphers)
        except ssl.SSLError as e:
            where = f"--ssl-ciphers {self.ciphers}" if "cipher" in str(e).lower() else str(self.ca_certs)
            raise LlmcError(
                "E649", f"{where}: {_reason(e)}", "certificates in PEM; `openssl ciphers` lists names"
            ) from e
        return found


class ServerLoop(asyncio.SelectorEventLoop):
    """An event loop that accepts and serves few connections per iteration.

    Connections over the limit are thus detected before descriptors run out, and many clients that send at once do not
    delay the engine's tokens. TLS handshakes have a time limit; connections do not count before their handshake ends.
    """

    handshake_seconds = 10.0
    tls_buffer = 16 << 10  # bytes decrypted at a time
    at_once = 32  # connections accepted per turn; their heads are parsed in turns (see HeadTurns)
    light: LightConnections | None = None  # takes new connections without TLS while requests are refused

    def __init__(self) -> None:
        self.fair = FairSelector()
        super().__init__(self.fair)

    async def create_server(self, *args: Any, **options: Any) -> Any:
        """Extend asyncio's method for a bound `sock`; `backlog` is the length of the accept queue."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = self.handshake_seconds
        waiting, (soft, _) = options.pop("backlog", 100), resource.getrlimit(resource.RLIMIT_NOFILE)
        few = self.at_once if soft == resource.RLIM_INFINITY else max(1, min(self.at_once, soft // 16))
        server = await super().create_server(*args, **options, backlog=few)
        options["sock"].listen(waiting)  # asyncio uses one number for both
        return server

    def _accept_connection(
        self, factory: Any, sock: socket.socket, sslcontext: Any = None, server: Any = None, *args: Any, **options: Any
    ) -> None:
        """Extend asyncio's method, which accepts what waits at a listening socket, by light connections."""
        if self.light is not None and sslcontext is None:
            for _ in range(self.at_once):
                if not self.light.active():
                    break
                try:
                    conn, address = sock.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    return
                except OSError:  # asyncio's method reports it, and tries again later
                    break
                conn.setblocking(False)
                self.light.add(conn, partial(self._promote, factory, conn, {"peername": address}, server))
            else:
                return
        super()._accept_connection(factory, sock, sslcontext, server, *args, **options)  # type: ignore[misc]

    def _promote(self, factory: Any, conn: socket.socket, extra: Any, server: Any) -> None:
        """Make an accepted socket an ordinary connection."""
        self.create_task(self._accept_connection2(factory, conn, extra, None, server))  # type: ignore[attr-defined]

    def _make_ssl_transport(self, *args: Any, **options: Any) -> Any:
        """Create the transport with a smaller buffer than asyncio's 256 KiB per connection, to save memory and time."""
        transport = super()._make_ssl_transport(*args, **options)  # type: ignore[misc]
        protocol = transport._ssl_protocol
        protocol.max_size = self.tls_buffer
        protocol._ssl_buffer = bytearray(self.tls_buffer)
        protocol._ssl_buffer_view = memoryview(protocol._ssl_buffer)
        return transport


_PAIR = "--ssl-certfile with the certificate first, then its chain, and --ssl-keyfile with its private key, all in PEM"


def _no_password() -> str:
    raise ValueError


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as e:
        raise LlmcError("E649", f"{path} cannot be read: {e.strerror}", _PAIR) from None


def _reason(error: ssl.SSLError) -> str:
    reason = getattr(error, "reason", None)  # absent in some errors
    if reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
        return "the private key is another certificate's"
    return (reason or "a certificate or a private key is not there, or damaged").lower().replace("_", " ")


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
        cause = f"{host}:{port} cannot be listened on: {getattr(e, 'strerror', None) or e}"
        raise LlmcError("E646", cause, "choose another --port, or an address of this machine for --host") from e
    return bound


def _unix(path: Path) -> socket.socket:
    remedy = "choose another --uds, of 100 characters at most, in a folder of yours"
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # inaccessible to others from the start
    try:
        _remove_stale(path)
        bound.bind(str(path))
    except (OSError, ValueError) as e:
        bound.close()
        raise LlmcError("E646", f"{path} cannot be listened on: {getattr(e, 'strerror', None) or e}", remedy) from e
    finally:
        os.umask(before)
    return bound


def _remove_stale(path: Path) -> None:
    """Remove a socket file without a listener. Other files are left, so that `bind` reports them."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
