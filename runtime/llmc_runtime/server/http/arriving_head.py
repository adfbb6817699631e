"""Limits on the head of a request while it arrives: its target, its lines, and the bytes of all unfinished heads."""

from __future__ import annotations

from llmc_runtime.server.http.errors import ApiError, unavailable

MAX_LINES = 256  # of a head; longer heads are rejected before they are parsed
MAX_REQUEST_LINE = 8 << 10  # bytes; decoding 60 KB of percent-encoded characters would take 20 ms
MAX_BYTES = 4 << 20  # of all unfinished heads over FREE_BYTES
FREE_BYTES = 4 << 10  # heads up to this size are not counted


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
