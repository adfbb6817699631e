"""An attacker's requests over blocking sockets, each on a separate connection, with a deadline."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmc_runtime.bench.http_client import Reply, WireError

from bench.attacks.watch import request

KEPT = 4096  # bytes at the end of an answer that are kept
STATUS_NONE = 0
LATE = "no answer before the deadline"


@dataclass
class Answer:
    """A response. Status 0: none arrived before the deadline, or the connection broke, as `error` says."""

    label: str
    status: int = STATUS_NONE
    seconds: float = 0.0
    error: str = ""
    size: int = 0
    retry_after: str = ""

    def json(self) -> dict[str, Any]:
        """Return the fields for the report."""
        return asdict(self)


def error_of(body: bytes) -> str:
    """Return the code and message of an error object, shortened; of another response, its beginning."""
    try:
        error = json.loads(body)["error"]
        return f"{error['code']}: {error['message']}"[:200]
    except (ValueError, KeyError, TypeError):
        return body[:80].decode(errors="replace")


@dataclass(frozen=True)
class Door:
    """The server's address and the attacker's API key; `until`: the time.monotonic() at which requests end."""

    host: str
    port: int
    key: str
    until: float

    def connect(self) -> socket.socket:
        """Open a connection."""
        return socket.create_connection((self.host, self.port), self.remaining)

    @property
    def remaining(self) -> float:
        """Return the seconds to the deadline, at least a few milliseconds."""
        return max(0.005, self.until - time.monotonic())

    def ask(self, label: str, path: str, body: Any = None) -> Answer:
        """Send one request and read its response. A body of bytes is sent unchanged."""
        return self.exchange(label, request(self.host, self.key, path, body))

    def exchange(self, label: str, data: bytes) -> Answer:
        """Send bytes, and read one response."""
        began, got = time.monotonic(), Answer(label)
        try:
            with self.connect() as link:
                link.settimeout(self.remaining)
                # A refusal before everything was sent breaks the connection; its response may have arrived.
                with contextlib.suppress(ConnectionError):
                    link.sendall(data)
                self._hear(link, got)
        except TimeoutError:
            got.error = got.error or LATE
        except (OSError, WireError) as e:
            got.error = got.error or type(e).__name__
        got.seconds = time.monotonic() - began
        return got

    def _hear(self, link: socket.socket, got: Answer) -> None:
        reply, tail = Reply(), b""
        while not reply.complete:
            link.settimeout(self.remaining)
            data = link.recv(1 << 18)
            if not data:
                break
            if not got.status and (at := data.lower().find(b"retry-after: ")) >= 0:
                got.retry_after = data[at + 13 :].partition(b"\r\n")[0].decode(errors="replace")
            body = reply.feed(data)
            got.status = reply.status
            got.size += len(body)
            tail = (tail + body)[-KEPT:]
        if got.status != 200:
            got.error = error_of(tail)
        elif (at := tail.find(b'{"error":')) >= 0:  # the last event of a stream
            got.error = error_of(tail[at:].partition(b"\n")[0])


def together(calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Call all functions at once, each in its own thread; return their responses in order."""
    answers: list[Answer | None] = [None] * len(calls)

    def run(number: int) -> None:
        answers[number] = calls[number]()

    threads = [threading.Thread(target=run, args=[i], daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answer for answer in answers if answer is not None]
