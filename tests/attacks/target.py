"""A server under attack: a process that is started, requested, watched and ended. Responses are searched for leaks.

`steady` is checked after every attack: the same processes, /health, and the same output for the golden prompt.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.attacks.fake_serve import ROUTES
from tests.attacks.oracle import GOLDEN, answer

ROOT = Path(__file__).resolve().parents[2]
SERVE = Path(__file__).with_name("fake_serve.py")
TEMPLATE = ROOT / "tests" / "runtime" / "chat_templates" / "qwen3.jinja"
TOOLS = ("--chat-template", str(TEMPLATE), "--max-model-len", "1024")  # calls, and reasoning apart
JSON = {"Content-Type": "application/json"}
LEAKS = re.compile(
    r"Traceback|\b0x[0-9a-f]{6,}|\bFile \"|\.py\b|site-packages|/(?:usr|home|root|proc|tmp|var|work|opt)/\w"
    r"|\bline \d+, in\b|<class '|<function |object at |\bb'\\\\+x"
)


def python_path() -> str:
    """Return the PYTHONPATH with which a child process finds the tests and the packages."""
    return os.pathsep.join(map(str, (ROOT, ROOT / "runtime", ROOT / "tests")))


def leaks(text: str, secrets: Sequence[str] = ()) -> list[str]:
    """Return what a response must not contain: places in code, addresses in memory, paths, the given secrets."""
    return [m[0] for m in LEAKS.finditer(text)] + [word for word in secrets if word in text]


class Reply:
    """An answer over HTTP."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error object, which it must be."""
        error = self.json["error"]
        if self.json.get("type") == "error":  # the form of /v1/messages
            assert error.keys() == {"type", "message"}, error
            return str(error["type"])
        assert error.keys() == {"message", "type", "param", "code"}, error
        return str(error["code"])

    def __repr__(self) -> str:
        return f"{self.status} {self.body[:300]!r}"


class Target:
    """llmc-serve over the simulated device; `options` are the command's, `keys` its API keys."""

    def __init__(
        self, *options: str, keys: Sequence[str] = (), admin: Sequence[str] = (), engine: dict[str, Any] | None = None,
        front: dict[str, Any] | None = None, environment: dict[str, str] | None = None, program: Sequence[str] = (),
        block: float = 0.0,
    ) -> None:  # fmt: skip
        settings = json.dumps({"engine": engine or {}, "front": front or {}, "block": block})
        command = [sys.executable, *(program or (str(SERVE), settings)), *options]
        env = {**os.environ, "PYTHONPATH": python_path(), **(environment or {})}
        if keys:
            command, env = [*command, "--api-key-env", "ATTACK_KEYS"], {**env, "ATTACK_KEYS": ",".join(keys)}
        if admin:
            command, env = [*command, "--admin-key-env", "ATTACK_ADMIN"], {**env, "ATTACK_ADMIN": ",".join(admin)}
        self.key = keys[0] if keys else ""
        self.lines: list[str] = []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, errors="replace")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until(lambda: self.url or self.process.poll() is not None, 60)
        assert self.url, "".join(self.lines)
        self.host, self.port = str(urlsplit(self.url).hostname), int(urlsplit(self.url).port or 0)
        self._links = threading.local()
        self.pids = self.lasting()
        self.golden = b""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def url(self) -> str:
        """The address that it listens on; "" before it does."""
        found = (re.search(r"https?://[^\s]+", line) for line in list(self.lines) if " at http" in line)
        return next((m[0] for m in found if m), "")

    @property
    def routes(self) -> list[tuple[str, list[str]]]:
        """The application's own list: paths and methods."""
        line = next(line for line in self.lines if line.startswith(ROUTES))
        return [(path, methods) for path, methods in json.loads(line.removeprefix(ROUTES))]

    def processes(self) -> dict[int, float]:
        """The server's and its children's ids, with when each began."""
        top = psutil.Process(self.process.pid)
        return {one.pid: one.create_time() for one in (top, *top.children(recursive=True))}

    def lasting(self) -> dict[int, float]:
        """Those of them that stay: processes for large bodies and for grammars come and go."""
        found = self.processes()
        for pid in list(found):
            with contextlib.suppress(psutil.Error):
                words = " ".join(psutil.Process(pid).cmdline())
                if "server.text_pool" in words or "grammar.host" in words:
                    del found[pid]
        return found

    @property
    def engine(self) -> int:
        """The engine's process id."""
        return max(self.lasting().keys() - {self.process.pid})

    def memory(self) -> int:
        """Resident bytes of the processes that stay; those for bodies and for grammars have limits of their own."""
        found = 0
        for pid in self.lasting():
            with contextlib.suppress(psutil.Error):
                found += psutil.Process(pid).memory_info().rss
        return found

    def ask(
        self, path: str, body: Any = None, *, method: str = "", key: str | None = None,
        headers: dict[str, str] | None = None, timeout: float = 60.0,
    ) -> Reply:  # fmt: skip
        """One request over this thread's link; a body that is not bytes goes as JSON. Answers are searched."""
        key = self.key if key is None else key
        sent = {**(JSON if body is not None else {}), **({"Authorization": f"Bearer {key}"} if key else {})}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        for again in (True, False):
            link = getattr(self._links, "link", None)
            if link is None:
                link = self._links.link = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
            try:
                link.request(method or ("GET" if body is None else "POST"), path, data, {**sent, **(headers or {})})
                got = link.getresponse()
                reply = Reply(got.status, got.headers, got.read())
                break
            except (ConnectionError, http.client.HTTPException):
                link.close()
                self._links.link = None
                if not again:
                    raise
        if reply.status != 200:
            found = leaks(reply.body.decode(errors="replace"), [self.key] if self.key else [])
            assert not found, f"{path}: the answer tells {found}: {reply}"
        return reply

    def steady(self, after: Any = "") -> None:
        """Check that the processes are the same and healthy, and that the golden prompt has the oracle's output."""
        for pid, began in self.pids.items():
            there = psutil.pid_exists(pid) and psutil.Process(pid).create_time() == began
            assert there, f"{pid} ended: {after!r:.500}; it said {self.words()}"
        health = self.ask("/health")
        assert health.status == 200, f"{health} after {after!r:.500}"
        reply = self.ask("/v1/completions", GOLDEN)
        assert reply.status == 200, f"{reply} after {after!r:.500}"
        output = json.dumps([reply.json["choices"], reply.json["usage"]["completion_tokens"]]).encode()
        self.golden = self.golden or output
        assert output == self.golden, f"another golden answer after {after!r:.500}"
        assert reply.json["choices"][0]["text"] == answer(GOLDEN["prompt"], GOLDEN["max_tokens"])

    def words(self) -> list[str]:
        """Return the end of its log, without lines of requests."""
        return [line for line in list(self.lines) if "llmc.request" not in line][-5:]

    def figure(self, name: str) -> float:
        """The sum of a metric over its labels."""
        reply = self.ask("/metrics")
        assert reply.status == 200, reply
        rows = reply.body.decode().splitlines()
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows if re.match(rf"llmc:{name}[{{ ]", row))

    def at_rest(self, seconds: float = 20.0, fresh: bool = True) -> None:
        """Nothing is open, and no page is held. Figures are a heartbeat old; `fresh`: a new one is waited for."""
        if fresh:
            time.sleep(0.25)
        names = ("num_requests_running", "num_requests_waiting", "num_requests_open", "kv_cache_usage_perc")
        until(lambda: not any(self.figure(name) for name in names), seconds)

    def end(self) -> str:
        """End it; return its log."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._reader.join(5)
        return "".join(self.lines)


def until(condition: Any, seconds: float = 20.0) -> None:
    """Wait for it, or fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@contextlib.contextmanager
def target(*options: str, **more: Any) -> Iterator[Target]:
    """A server until the block ends."""
    one = Target(*options, **more)
    try:
        yield one
    finally:
        one.end()


def draws(seed: int, name: str) -> Random:
    """Random numbers of one test of a run."""
    return Random(f"{seed} {name}")
