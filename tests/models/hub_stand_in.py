"""A stand-in for a model hub: an HTTP server over folders with the routes that huggingface_hub uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubStandIn:
    """repos: name -> folder. gated: names that need a token. asked: the requests, in order. sha: the commit that
    every revision means."""

    repos: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    revisions: tuple[str, ...] = ("main", "v1", COMMIT)
    sha: str = COMMIT
    asked: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def files(self) -> list[str]:
        """Names of the files that were fetched."""
        return [p.rpartition("/")[2] for m, p in (a.split(" ") for a in self.asked) if m == "GET" and "/resolve/" in p]


@contextmanager
def serving(hub: HubStandIn) -> Iterator[HubStandIn]:
    """Serve on a port of this machine until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self, hub, True)

        def do_HEAD(self) -> None:
            answer(self, hub, False)

        def log_message(self, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(to: BaseHTTPRequestHandler, hub: HubStandIn, body: bool) -> None:
    path = to.path.partition("?")[0].strip("/")
    hub.asked.append(f"{to.command} {path}")
    if path.startswith("api/models/"):
        name, _, revision = path.removeprefix("api/models/").partition("/revision/")
        send = describe
    else:
        name, _, rest = path.partition("/resolve/")
        revision, _, file = rest.partition("/")
        send = lambda *a: give(*a, file)  # noqa: E731
    if name not in hub.repos:
        fail(to, 401, "RepoNotFound")
    elif name in hub.gated:
        fail(to, 403, "GatedRepo")
    elif revision.replace("%2F", "/") not in hub.revisions:
        fail(to, 404, "RevisionNotFound")
    else:
        send(to, hub, hub.repos[name], body)


def fail(to: BaseHTTPRequestHandler, status: int, code: str) -> None:
    to.send_response(status)
    to.send_header("X-Error-Code", code)
    to.send_header("Content-Length", "0")
    to.end_headers()


def describe(to: BaseHTTPRequestHandler, hub: HubStandIn, folder: Path, body: bool) -> None:
    """Return the hub's description of a repository: its commit and all of its files."""
    names = sorted(p for p in folder.rglob("*") if p.is_file())
    files = [{"rfilename": str(p.relative_to(folder)), "size": p.stat().st_size} for p in names]
    data = json.dumps({"id": "x", "modelId": "x", "sha": hub.sha, "siblings": files, "tags": []}).encode()
    to.send_response(200)
    to.send_header("Content-Type", "application/json")
    to.send_header("Content-Length", str(len(data)))
    to.end_headers()
    to.wfile.write(data)


def give(to: BaseHTTPRequestHandler, hub: HubStandIn, folder: Path, body: bool, name: str) -> None:
    if not (folder / name).is_file():
        fail(to, 404, "EntryNotFound")
        return
    data = (folder / name).read_bytes()
    to.send_response(200)
    to.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
    to.send_header("X-Repo-Commit", hub.sha)
    to.send_header("Content-Length", str(len(data)))
    to.end_headers()
    if body:
        to.wfile.write(data)
