"""A path prefix in front of all routes, for proxies that do not strip it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


def tidy(root: str) -> str:
    """Return a root path with a leading slash and without a trailing one; "" if it is empty."""
    return "/" + root.strip("/") if root.strip("/") else ""


class Rooted:
    """The outermost ASGI middleware: strips the prefix `root` from paths.

    Other paths are unchanged, as a proxy may have stripped the prefix. The decoded and the raw path are changed
    together, so that keys and routes see the same path.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root, self._raw = app, root, root.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Strip the prefix and handle the request."""
        if scope["type"] == "http":
            path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
            if path.startswith(self._root + "/") and raw.startswith(self._raw + b"/"):
                scope["path"], scope["raw_path"] = path[len(self._root) :], raw[len(self._raw) :]
        await self._app(scope, receive, send)
