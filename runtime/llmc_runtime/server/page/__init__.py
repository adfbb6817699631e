"""The page at `/`: one document of three files, and the headers that let it do no more than it does; it has no data."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent


def page_route(needs_key: bool) -> Route:
    """GET /: a chat and figures, for a browser."""
    body, headers = page(needs_key)

    async def show(request: Request) -> Response:
        return Response(body, headers=headers)

    return Route("/", show, methods=["GET"])


def page(needs_key: bool) -> tuple[bytes, dict[str, str]]:
    """(HTML in UTF-8, headers). Style and script stand in the document, and the policy names their hashes: the browser
    runs nothing else, asks nobody but this server, and never makes markup of a text."""
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    text = (_FOLDER / "page.html").read_text(encoding="utf-8")
    text = text.replace("<body>", f'<body data-key="{"needed" if needs_key else "none"}">')
    text = text.replace("<style></style>", f"<style>{style}</style>")
    text = text.replace("<script type=module></script>", f"<script type=module>{script}</script>")
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return text.encode(), {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
