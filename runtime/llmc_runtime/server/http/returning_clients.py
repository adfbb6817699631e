"""Whether clients use a connection again after a refusal, or open a new one for each request."""

from __future__ import annotations

_AVERAGED = 16  # connections over which the estimate averages; one in so many is left open
_FEW = 0.25  # part of the connections


class ReturningClients:
    """Estimates which part of the new connections sends another request after their first one was refused.

    If few do, most are closed with the first refusal: the end of the connection leaves with the response, and nothing
    waits for the client's.
    """

    def __init__(self) -> None:
        self._part, self._count = 1.0, 0

    def saw(self, another: bool) -> None:
        """Record whether a connection sent another request after its first one was refused, or was closed."""
        self._part += (another - self._part) / _AVERAGED

    def next_closes(self) -> bool:
        """Return whether the next new connection is closed with its first refusal; some stay open, to be recorded."""
        self._count += 1
        return self._part < _FEW and self._count % _AVERAGED > 0
