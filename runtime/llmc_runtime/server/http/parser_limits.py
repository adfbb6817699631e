"""Limits on what a client can make the HTTP parser do.

- The head of a request while it arrives: its target, its lines, and the bytes of all unfinished heads.
- Received data with many lines, such as a body in chunks of a byte, which takes 10 us a chunk to parse. A connection
  parses the first slice at once, and the others one after the other. `SliceTurns` gives all connections together one
  further slice per iteration of the event loop, so that they do not delay the tokens of open streams.
- Patterns that match lines in linear time. h11's own divide white space in all possible ways before they reject a line:
  30,000 spaces in front of a NUL take 2.6 s. HEADER and CHUNK match the same lines.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

import h11._abnf as abnf
import h11._readers as readers

from llmc_runtime.server.http.errors import ApiError, unavailable

MAX_LINES = 256  # maximum lines per head; longer heads are rejected before they are parsed
MAX_REQUEST_LINE = 8 << 10  # bytes; decoding 60 KB of percent-encoded characters would take 20 ms
MAX_BYTES = 4 << 20  # total of the unfinished heads over FREE_BYTES
FREE_BYTES = 4 << 10  # heads up to this size are not counted
SLICE_LINES = 96  # maximum lines per slice; a chunk of a body has two lines
_WORD = rf"{abnf.vchar_or_obs_text}++"
_VALUE = rf"(?P<field_value>(?:{_WORD}(?:[ \t]++{_WORD})*+)?)"
HEADER = re.compile(rf"(?P<field_name>{abnf.field_name}):[ \t]*+{_VALUE}[ \t]*+".encode())
CHUNK = re.compile(rf"(?P<chunk_size>{abnf.chunk_size})(?:(?P<chunk_ext>;[^\n]*)|[ \t]*+)\r\n".encode())


_REMEDIES: Mapping[str, str] = MappingProxyType(  # for h11's messages about heads
    {
        "Missing mandatory Host: header": "send a Host header", "Found multiple Host: headers": "send one Host header",
        "bad Content-Length": "Content-Length has to be the number of bytes of the body",
        "conflicting Content-Length headers": "send one Content-Length header",
        "multiple Transfer-Encoding headers": "send one Transfer-Encoding header",
        "Only Transfer-Encoding: chunked is supported": "of Transfer-Encoding, only chunked is supported",
    }
)  # fmt: skip


def invalid_head(error: BaseException | None) -> ApiError:
    """Return the error of a head that h11 rejects with `error`."""
    cause = _REMEDIES.get(str(error), "this is not an HTTP/1.1 request, or its head is too long")
    return ApiError(cause, code="invalid_http")


class HeadBudget:
    """The bytes of all unfinished heads over FREE_BYTES. Beyond `maximum`, a head that grows is refused.

    Clients are not known by their keys before their heads are complete, so they have no shares of it.
    """

    def __init__(self) -> None:
        self.maximum, self.used = MAX_BYTES, 0


class ArrivingHead:
    """The lines and bytes that a connection has received of its next head."""

    __slots__ = ("_budget", "_counted", "_lines", "_size")

    def __init__(self, budget: HeadBudget) -> None:
        self._budget, self._lines, self._size, self._counted = budget, 0, 0, 0

    def add(self, data: bytes) -> ApiError | None:
        """Count received data, which may end the head. Return the error if there is too much of it."""
        end = data.find(b"\r\n\r\n")
        line = data.find(b"\n")
        if not self._lines and self._size + (len(data) if line < 0 else line) > MAX_REQUEST_LINE:
            cause = f"the request target is too long: its line may have {MAX_REQUEST_LINE} bytes; send a body instead"
            return ApiError(cause, status=414, code="target_too_long")
        self._lines += data.count(b"\n") if end < 0 else data.count(b"\n", 0, end)
        if self._lines > MAX_LINES:
            cause = f"the head of the request has more than {MAX_LINES} lines; send fewer headers"
            return ApiError(cause, status=431, code="headers_too_large")
        self._size += len(data)
        if end < 0 and self._size > FREE_BYTES:
            self._budget.used += self._size - self._counted
            self._counted = self._size
            if self._budget.used > self._budget.maximum:
                return unavailable("the server receives too many large heads of requests", "too_many_connections")
        return None

    def clear(self) -> None:
        """Forget the head, which is complete or will not be."""
        self._budget.used -= self._counted
        self._lines = self._size = self._counted = 0


def first_slice(data: bytes, start: int) -> tuple[bytes, bytes]:
    """Divide data after the SLICE_LINES-th line from `start` on; the second part is empty if it has no more lines."""
    if data.count(b"\n", start) <= SLICE_LINES:
        return data, b""
    rest = data[start:].split(b"\n", SLICE_LINES)[-1]
    return data[: len(data) - len(rest)], rest


class SliceTurns:
    """Calls the functions of connections that have a slice to parse, in order, one per iteration of the event loop."""

    def __init__(self) -> None:
        self._waiting = deque[Callable[[], None]]()

    def add(self, parse: Callable[[], None]) -> None:
        """Call `parse` in a later iteration."""
        self._waiting.append(parse)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._waiting[0]()
        self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)


def use_linear_patterns() -> None:
    """Replace h11's patterns in this process."""
    readers.header_field_re, readers.chunk_header_re = HEADER, CHUNK
