"""The chat page at `/`: a single document built from three files, with restrictive security headers."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent


def page_route(needs_key: bool) -> Route:
    """Return the route GET /, which serves a chat with live metrics. `needs_key`: the server requires an API key."""
    body, headers = page(needs_key)

    async def show(request: Request) -> Response:
        return Response(body, headers=headers)

    return Route("/", show, methods=["GET"])


def page(needs_key: bool) -> tuple[bytes, dict[str, str]]:
    """Return the page as (HTML in UTF-8, headers).

    Style and script are inlined, and the content security policy contains their hashes: the browser runs nothing else,
    sends requests to this server only, and never interprets text as markup.
    """
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
