"""A server of the demonstration model, started as a user does. Shared by the tests of clients."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / os.environ.get("VENV", ".venv") / "bin"
DEMO = ROOT / "build" / "demo.llmc"
ADDRESS = re.compile(r" at (http[^\s\"]+)")
STARTS = 120  # seconds a process has to say its first line
CHAT = [{"role": "user", "content": "What is a river?"}]
QUESTIONS = ("What is a river?", "What does a cat eat?", "Where is the moon?", "What is a book?")
TEXTS = ("When the morning came,", "The ship", "She opened the door and", "There was once a king who")

# Clients find nothing outside this machine, and look for nothing there.
os.environ |= {
    "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false",
    "NO_PROXY": "127.0.0.1,localhost", "SCHEMATHESIS_TELEMETRY": "0",
}  # fmt: skip


@dataclass(frozen=True)
class Server:
    """A running server; `key` is "" if it needs none."""

    url: str
    key: str
    model: str = "demo"

    @property
    def v1(self) -> str:
        """The base URL that clients want."""
        return f"{self.url}/v1"

    def get(self, path: str) -> str:
        """A page of it, with the key."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            text: str = reply.read().decode()
            return text

    def get_json(self, path: str) -> Any:
        """A document of it."""
        return json.loads(self.get(path))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a JSON body."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    def figure(self, name: str) -> float:
        """One of its metrics; counters by their whole name, labels left out."""
        found = re.search(rf"^llmc:{name}\{{[^}}]*\}} (\S+)$", self.get("/metrics"), re.M)
        return float(found[1]) if found else 0.0

    def rest(self) -> None:
        """Wait until no request is open and no KV page is used; figures are a heartbeat old."""
        for _ in range(600):
            if not self.figure("num_requests_open") and not self.figure("kv_cache_usage_perc"):
                return
            time.sleep(0.1)
        raise AssertionError("requests stay open, or pages stay used")


def serving(keys: Path | None = None, *options: str | Path) -> AbstractContextManager[Server]:
    """llmc-serve over the demonstration model, on a port of its own."""
    command = [PROJECT / "llmc-serve", DEMO, "--port", "0", "--threads", "1", *options]
    key = keys.read_text().strip() if keys else ""
    return started([*command, "--api-key-file", keys] if keys else command, Server("", key))


def slow(seconds: float) -> AbstractContextManager[Server]:
    """The same server over a simulated device with this time per token, whose outputs are meaningless."""
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "runtime", "tests"))
    command = [PROJECT / "python", ROOT / "tests" / "runtime" / "serve_fake.py", str(seconds), "5"]
    return started(command, Server("", "", "toy"), PYTHONPATH=paths)


@contextmanager
def started(command: Sequence[str | Path], server: Server, **environment: str) -> Iterator[Server]:
    """The server, its address filled in once it listens; it has to end with 0 after SIGTERM."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert process.stderr is not None
    ready, log = threading.Event(), list[str]()

    def read() -> None:
        for line in process.stderr:
            log.append(line)
            if ADDRESS.search(line):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(STARTS) and log, "llmc-serve says nothing"
        found = ADDRESS.search("".join(log))
        assert found, "".join(log)
        yield replace(server, url=found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        reader.join(10)
    assert code == 0, "".join(log)
    assert not [line for line in log if "failed" in line or " 500" in line], "".join(log)


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def joined(pieces: Sequence[str | None]) -> str:
    """A stream's text; how many pieces it comes in depends on how fast the client reads."""
    return "".join(piece or "" for piece in pieces)


WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city, now.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Aachen", "Bonn", "Cologne"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TIME = {
    **WEATHER,
    "name": "get_time",
    "description": "The time of a city.",
    "parameters": {"type": "object", "properties": {}},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def enforced(model: str, **more: Any) -> dict[str, Any]:
    """A request that has to be answered with one call of one of two functions, always the same one."""
    tools = [{"type": "function", "function": one} for one in (WEATHER, TIME)]
    options = {"model": model, "messages": user("What is the weather in Bonn?"), "tools": tools, "temperature": 0}
    return {**options, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200, **more}


def call_of(function: Any) -> dict[str, Any]:
    """A call as a client has it, its arguments read."""
    return {"name": function.name, "arguments": json.loads(function.arguments)}
