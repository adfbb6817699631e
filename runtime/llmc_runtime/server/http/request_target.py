"""Request targets in the forms that proxies send: with the scheme and host in front, or with a path prefix."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc_runtime.server.http.errors import ApiError

MAX_QUERY = 1 << 10  # bytes; 8 KiB of fields would take 3 ms to decode


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
