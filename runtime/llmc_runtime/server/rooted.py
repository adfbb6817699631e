"""A path in front of all routes, for proxies that leave it there: taken off before all else; it checks nothing."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


def tidy(root: str) -> str:
    """A root path with a slash in front and none at the end; "" for none."""
    return "/" + root.strip("/") if root.strip("/") else ""


class Rooted:
    """ASGI middleware around all others. Paths below `root` are those without it, whoever asks; others stay, as proxies
    may have taken it off. The bytes that came and their text lose the same, so that keys and routes see one path."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root, self._raw = app, root, root.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Rooted."""
        if scope["type"] == "http":
            path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
            if path.startswith(self._root + "/") and raw.startswith(self._raw + b"/"):
                scope["path"], scope["raw_path"] = path[len(self._root) :], raw[len(self._raw) :]
        await self._app(scope, receive, send)
