"""Requests of web pages from other origins (the CORS protocol of the Fetch standard)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_PREFLIGHT_SECONDS = 600  # how long a browser may remember what is allowed
_EXPOSED = ("retry-after", "x-request-id")  # response headers that pages may read besides the safe ones


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return the app with CORS headers for these origins. Preflight requests are answered without an API key.

    Cookies are not allowed: the server has none, and pages send keys in a header.
    """
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",),
        expose_headers=_EXPOSED, max_age=_PREFLIGHT_SECONDS,
    )  # fmt: skip
