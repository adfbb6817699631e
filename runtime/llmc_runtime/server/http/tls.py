"""TLS: its options, its context, and a context that reloads changed certificate files while the server runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.option_type import serve_option

log = logging.getLogger("llmc.serve")
_option = partial(serve_option, "keys and TLS")
# The group of the key exchange, which every client of TLS 1.3 has. OpenSSL's default also accepts ffdhe8192, with which
# a client that computes nothing itself makes the server compute for 200 ms. Python 3.11 can set a single group.
_GROUP = "prime256v1"
MAX_OVERHEAD = 16 << 10  # bytes that a client may send besides its data and a quarter more: 22 a record, 27 a new key
_FORGIVEN = 1 << 10  # bytes of them per second that do not count
# Bytes of a client's handshake. OpenSSL compares each offered key with each offered group: 64 KiB of them take 55 ms.
MAX_HANDSHAKE = 8 << 10
_CERTIFICATES = 100 << 10  # further bytes if the server requests the client's certificate: OpenSSL's own limit
_MAX_RETRY = 256  # bytes of a server's request for another hello; its certificate is longer
RELOAD_SECONDS = 0.25  # interval between checks of the files
_REMEDY = "pass --ssl-certfile with the certificate followed by its chain, and --ssl-keyfile with its key, both in PEM"


@dataclass(frozen=True)
class Tls:
    """TLS options; files are in PEM format."""

    certfile: Path = _option(  # noqa: RUF009
        None, "PEM file with the certificate and its chain; turns TLS on", flags=("--ssl-certfile",), read=Path,
        metavar="FILE",
    )  # fmt: skip
    keyfile: Path | None = _option(  # noqa: RUF009
        None, "PEM file with the private key (default: the certificate's file)", flags=("--ssl-keyfile",), read=Path,
        metavar="FILE",
    )  # fmt: skip
    ca_certs: Path | None = _option(  # noqa: RUF009
        None, "PEM file with the authorities that sign clients' certificates", flags=("--ssl-ca-certs",), read=Path,
        metavar="FILE",
    )  # fmt: skip
    cert_reqs: int = _option(
        0, "whether clients need a certificate: 0 no, 1 optional, 2 required (0)", flags=("--ssl-cert-reqs",), read=int,
        choices=(0, 1, 2),
    )  # fmt: skip
    ciphers: str | None = _option(
        None, "ciphers of TLS 1.2, in OpenSSL's notation (default: OpenSSL's)", flags=("--ssl-ciphers",), metavar="LIST"
    )
    refresh: bool = _option(
        False, "reload certificate files that change while serving", flags=("--enable-ssl-refresh",), read=None
    )

    def context(self) -> ssl.SSLContext:
        """Create a context for TLS 1.2 and newer. Raises LlmcError E649 if a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.set_ecdh_curve(_GROUP)
        context.options |= ssl.OP_NO_RENEGOTIATION  # in TLS 1.2 it takes a handshake's time; OpenSSL 1.1 allows it
        context.sslobject_class = BoundedTls
        for path in filter(None, (self.certfile, self.keyfile, self.ca_certs)):
            _check_readable(path)
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password=_no_password)
        except ssl.SSLError as e:
            files = f"{self.certfile}" if self.keyfile is None else f"{self.certfile} with {self.keyfile}"
            raise LlmcError("E649", f"{files}: {_reason(e)}", _REMEDY) from None
        except ValueError:  # raised by _no_password
            cause = f"the key of {self.certfile} is encrypted"
            raise LlmcError("E649", cause, "decrypt it: openssl pkey -in KEY -out PLAIN") from None
        try:
            if self.ca_certs is not None:
                context.load_verify_locations(self.ca_certs)
            elif self.cert_reqs:
                cause = "--ssl-cert-reqs without --ssl-ca-certs: no client could connect"
                raise LlmcError("E649", cause, "add --ssl-ca-certs FILE")
            context.verify_mode = ssl.VerifyMode(self.cert_reqs)
            if self.ciphers is not None:
                context.set_ciphers(self.ciphers)
        except ssl.SSLError as e:
            source = f"--ssl-ciphers {self.ciphers}" if "cipher" in str(e).lower() else str(self.ca_certs)
            remedy = "use certificates in PEM, and ciphers that `openssl ciphers` lists"
            raise LlmcError("E649", f"{source}: {_reason(e)}", remedy) from e
        return context


class BoundedTls(ssl.SSLObject):
    """TLS of a connection whose client may send little but data: a short handshake, and few records without any.

    A client may change its key with each record, which then has no data. Each change takes the server 30 us: 1 MB of
    them per second would take a processor.
    """

    _incoming: ssl.MemoryBIO
    _outgoing: ssl.MemoryBIO
    _excess, _counted = 0.0, 0.0  # bytes besides the data, and when they were counted (time.monotonic())
    _handshake = MAX_HANDSHAKE  # bytes that the client may still send before the end of the handshake

    @classmethod
    def _create(cls, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> Self:
        self: Self = super()._create(incoming, outgoing, *args, **options)  # type: ignore[misc]
        self._incoming, self._outgoing, self._counted = incoming, outgoing, time.monotonic()
        return self

    def do_handshake(self) -> None:
        """See ssl.SSLObject. Raises SSLError if the client has sent too much."""
        received, sent = self._incoming.pending, self._outgoing.pending
        try:
            super().do_handshake()
        finally:
            self._handshake -= received - self._incoming.pending
            if self.context.verify_mode and self._outgoing.pending - sent > _MAX_RETRY:
                self._handshake += _CERTIFICATES
            if self._handshake < 0:
                raise ssl.SSLError("the handshake of the client is too long")

    def read(self, size_limit: int = 1024, buffer: Any = None) -> Any:
        """See ssl.SSLObject. Raises SSLError if the client has sent too much that is no data."""
        before, size = self._incoming.pending, 0
        try:
            data = super().read(size_limit, buffer)
            size = data if isinstance(data, int) else len(data)
            return data
        finally:
            now, overhead = time.monotonic(), before - self._incoming.pending - 1.25 * size
            self._excess = max(0.0, self._excess - _FORGIVEN * (now - self._counted)) + overhead
            self._counted = now
            if self._excess > MAX_OVERHEAD:
                raise ssl.SSLError("the client sends too many records")


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
        loaded = previous = _file_versions(self.tls)
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            current = _file_versions(self.tls)
            if current != loaded and current == previous:
                loaded = current
                await self._reload()
            previous = current

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


def _file_versions(tls: Tls) -> tuple[Any, ...]:
    """Identify the current files, following links; None for a file that cannot be read."""
    return tuple(_file_version(path) for path in (tls.certfile, tls.keyfile, tls.ca_certs) if path is not None)


def _file_version(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _no_password() -> str:
    raise ValueError


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as e:
        raise LlmcError("E649", f"{path} cannot be read: {e.strerror}", _REMEDY) from None


def _reason(error: ssl.SSLError) -> str:
    reason = getattr(error, "reason", None)  # absent in some errors
    if reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
        return "the private key does not belong to the certificate"
    return (reason or "a certificate or a private key is missing or damaged").lower().replace("_", " ")
