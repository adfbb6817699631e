"""Request targets in absolute form (`GET http://host:port/path`), which proxies send and every server has to accept
(RFC 9112, section 3.2.2).
"""

from __future__ import annotations

from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send


class OriginForm:
    """The outermost ASGI middleware: rewrites targets in absolute form to origin form.

    Keys, routes and logs thus see a single path; the target's authority becomes the Host header. The scheme has to be
    the connection's own, and a Host header has to name the same authority. Other targets are unchanged; the guard
    rejects those that do not start with a slash.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Rewrite the target and handle the request."""
        if scope["type"] == "http" and not scope["path"].startswith("/"):
            _rewrite(scope)
        await self._app(scope, receive, send)


def _rewrite(scope: Scope) -> None:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    scheme, found, rest = raw.partition(b"://")
    authority, _, path = rest.partition(b"/")
    if not found or scheme.lower() != scope["scheme"].encode() or not authority or b"@" in authority:
        return
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if any(host.lower() != authority.lower() for host in hosts):
        return
    scope["headers"] = [*(one for one in scope["headers"] if one[0] != b"host"), (b"host", authority)]
    scope["raw_path"] = b"/" + path
    scope["path"] = unquote(scope["raw_path"].decode("latin-1"))
