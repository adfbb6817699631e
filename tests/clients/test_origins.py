"""A web page of another origin in Chromium: it reads a stream if --allowed-origins names it, and nothing otherwise."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from kit import serving
from playwright.sync_api import Error, Page, sync_playwright

FETCH = """async ([url, key]) => {
    const reply = await fetch(url + "/v1/completions", {
        method: "POST",
        headers: {"Authorization": "Bearer " + key, "Content-Type": "application/json"},
        body: JSON.stringify({prompt: "The kernel", max_tokens: 5, temperature: 0, stream: true}),
    });
    return [reply.status, reply.headers.get("x-request-id"), await reply.text()];
}"""


class Blank(BaseHTTPRequestHandler):
    """Serves an empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>page</title>")

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def port() -> Iterator[int]:
    """The port of another site on this machine, which is both 127.0.0.1 and localhost: two origins."""
    site = ThreadingHTTPServer(("127.0.0.1", 0), Blank)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    yield site.server_address[1]
    site.shutdown()


@pytest.fixture
def page() -> Iterator[Page]:
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    assert found, "Chromium is needed, and was not found (Debian: apt-get install chromium)"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found[0])
        yield browser.new_page()
        browser.close()


def test_only_pages_of_allowed_origins_read_responses(port: int, page: Page, keys: Path) -> None:
    with serving(keys, "--allowed-origins", f"http://127.0.0.1:{port}") as server:
        page.goto(f"http://127.0.0.1:{port}/")
        status, request_id, text = page.evaluate(FETCH, [server.url, server.key])
        assert status == 200 and request_id and text.endswith("data: [DONE]\n\n")
        status, _, text = page.evaluate(FETCH, [server.url, "a-wrong-key"])
        assert status == 401 and "invalid_api_key" in text
        page.goto(f"http://localhost:{port}/")
        with pytest.raises(Error, match="Failed to fetch"):
            page.evaluate(FETCH, [server.url, server.key])
