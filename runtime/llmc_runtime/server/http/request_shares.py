"""A share of the open requests for each API key, so that a key that keeps many open leaves connections for others."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from llmc_runtime.fair_queue import KeyCounts
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.http.replies import as_error, record_error

SHARE = 4  # a key may have this many times as many open requests as there are connections without one


class RequestShares:
    """ASGI middleware behind `Guard`, for a server with at most `maximum` connections and several keys.

    `refusal` creates the ApiError for a request of a key that has too many open.
    """

    def __init__(self, app: ASGIApp, maximum: int, refusal: Callable[[], ApiError]) -> None:
        self._app, self._maximum, self._refusal = app, maximum, refusal
        self._by_key = KeyCounts()  # open requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request while it is open, or refuse it. Requests without a key are not limited."""
        key = scope.get("llmc.key", "")
        if not key:
            return await self._app(scope, receive, send)
        if self._by_key[key] and self._by_key[key] >= SHARE * (self._maximum - self._by_key.total() - 1):
            error = self._refusal()
            record_error(scope, error)
            return await as_error(error, scope["path"])(scope, receive, send)
        self._by_key.change(key, 1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._by_key.change(key, -1)
