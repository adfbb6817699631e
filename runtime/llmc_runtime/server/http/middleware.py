"""ASGI middleware around the routes, and the parameters of requests outside of bodies.

The middleware normalizes request targets, answers web pages of other origins (CORS), and gives each API key a share of
the open requests, so that a key that keeps many open leaves connections for others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import unquote

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc_runtime.fair_queue import KeyCounts
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.http.replies import as_error, record_error

MAX_QUERY = 1 << 10  # bytes; 8 KiB of fields would take 3 ms to decode
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?([eE][+-]?[0-9]{1,2})?|\.[0-9]{1,9}", re.ASCII)
_PREFLIGHT_SECONDS = 600  # how long a browser may remember what is allowed
_EXPOSED = ("retry-after", "x-request-id")  # response headers that pages may read besides the safe ones
SHARE = 4  # a key may have this many times as many open requests as there are connections without one


def normalize_root(root: str) -> str:
    """Return a root path with a leading slash and without a trailing one; "" if it is empty."""
    return "/" + root.strip("/") if root.strip("/") else ""


def query_of(request: Request) -> Mapping[str, str]:
    """Return the fields of the query. Raises ApiError 400 if it is too long."""
    if len(request.scope["query_string"]) > MAX_QUERY:
        raise ApiError(f"the query has more than {MAX_QUERY} bytes; send fewer fields", code="query_too_long")
    return request.query_params


class NormalizeTarget:
    """The outermost ASGI middleware: reduces targets to a route's path, so that keys, routes and logs see one path.

    Absolute targets (`GET http://host:port/path`, RFC 9112, section 3.2.2) are rewritten if their scheme is the
    connection's own; their authority becomes the Host header, and a Host header has to name the same one. Then the
    prefix `root`, normalized, is stripped if it is there: a proxy may have stripped it. Other targets are unchanged;
    the guard rejects those that do not start with a slash.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root, self._raw_root = app, root, root.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Rewrite the target and handle the request."""
        if scope["type"] == "http":
            if not scope["path"].startswith("/"):
                _to_origin_form(scope)
            if self._root:
                self._strip_root(scope)
        await self._app(scope, receive, send)

    def _strip_root(self, scope: Scope) -> None:
        """Strip the prefix from the decoded and the raw path, if both have it."""
        path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
        if path.startswith(self._root + "/") and raw.startswith(self._raw_root + b"/"):
            scope["path"], scope["raw_path"] = path[len(self._root) :], raw[len(self._raw_root) :]


def _to_origin_form(scope: Scope) -> None:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    scheme, separator, rest = raw.partition(b"://")
    authority, _, path = rest.partition(b"/")
    if not separator or scheme.lower() != scope["scheme"].encode() or not authority or b"@" in authority:
        return
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if any(host.lower() != authority.lower() for host in hosts):
        return
    scope["headers"] = [*(header for header in scope["headers"] if header[0] != b"host"), (b"host", authority)]
    scope["raw_path"] = b"/" + path
    scope["path"] = unquote(scope["raw_path"].decode("latin-1"))


def seconds_of(text: str, maximum: float) -> float | None:
    """Parse decimal seconds above 0 and up to `maximum`, such as 30, 0.5 or 1e-3; return None for other text.

    Only ASCII digits are accepted. float() would also accept underscores, spaces, and digits of other scripts.
    """
    value = float(text) if _SECONDS.fullmatch(text) else 0.0
    return value if 0.0 < value <= maximum else None


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return the app with CORS headers for these origins. Preflight requests are answered without an API key.

    Cookies are not allowed: the server has none, and pages send keys in a header.
    """
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",),
        expose_headers=_EXPOSED, max_age=_PREFLIGHT_SECONDS,
    )  # fmt: skip


class RequestShares:
    """ASGI middleware after `Guard` that limits the open requests of each API key to a share of the free connections.

    `maximum` is the maximum number of connections of the server. `refusal` creates the ApiError for a request of a key
    that has too many open requests.
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
