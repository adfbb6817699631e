"""Raw bytes on a socket, for requests that no HTTP library would send."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
from typing import Any

from tests.attacks.target import Reply, Target

CLOSED = Reply(0, {}, b"")  # the link was closed without an answer


class Link(socket.socket):
    """A link to the server; answers are read one after the other."""

    def __init__(self, server: Target, timeout: float = 20.0) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.settimeout(timeout)
        self.connect((server.host, server.port))
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.makefile("rb")

    def answer(self, method: str = "GET") -> Reply:
        """Return the next response, which has a length or is a stream that ends the connection; CLOSED if none."""
        try:
            line = self._file.readline(1 << 16)
            if not line:
                return CLOSED
            status = int(line.split()[1])
            headers = http.client.parse_headers(self._file)
            if method == "HEAD" or status in (204, 304):
                return Reply(status, headers, b"")
            if headers.get("transfer-encoding") == "chunked":
                return Reply(status, headers, b"".join(self._chunks()))
            return Reply(status, headers, self._file.read(int(headers.get("content-length", "0"))))
        except ConnectionError:
            return CLOSED

    def _chunks(self) -> list[bytes]:
        found = []
        while size := int(self._file.readline(), 16):
            found.append(self._file.read(size))
            self._file.readline()
        self._file.readline()
        return found

    def send_some(self, data: bytes) -> bool:
        """Send it; whether the other side took it."""
        try:
            self.sendall(data)
        except OSError:
            return False
        return True

    def reset(self) -> None:
        """Close it with a reset, whatever is still on its way."""
        self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Close it at once, the answers unread."""
        with contextlib.suppress(OSError):
            self._file.close()
        super().close()


def raw(server: Target, data: bytes, method: str = "GET", timeout: float = 20.0) -> Reply:
    """The answer to some bytes."""
    with Link(server, timeout) as link:
        link.send_some(data)
        return link.answer(method)


def head(server: Target, path: str = "/v1/completions", method: str = "POST", **headers: Any) -> bytes:
    """The head of a request with the server's key, of JSON; names are spelled with underscores."""
    sent = {"Host": f"{server.host}:{server.port}", "Content-Type": "application/json"}
    if server.key:
        sent["Authorization"] = f"Bearer {server.key}"
    sent |= {name.replace("_", "-"): str(value) for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"
