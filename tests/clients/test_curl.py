"""curl, with the commands of docs/serving.md and docs/monitoring.md, in which only the port is replaced."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit import ROOT, Server

Truth = Callable[..., dict[str, Any]]
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.S | re.M)
HERE = "http://127.0.0.1:8000"


def commands() -> list[str]:
    """Every curl command of the pages."""
    pages = [(ROOT / "docs" / name).read_text() for name in ("serving.md", "monitoring.md")]
    text = "".join(block for page in pages for block in FENCE.findall(page)).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.startswith("curl ")]


def run(command: str, server: Server, folder: Path) -> str:
    """Return a command's output; it runs in the folder of the files with keys."""
    assert HERE in command, command
    there = command.replace(HERE, server.url).replace("curl ", "curl -sS --fail-with-body --max-time 60 ", 1)
    environment = {**os.environ, "KEY": server.key}
    ended = subprocess.run(["bash", "-c", there], cwd=folder, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    return ended.stdout + "".join(path.read_text() for path in folder.glob("*.json"))


def streamed(text: str) -> str:
    """The text of an event stream of a chat."""
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") for event in events[:-1]]
    return "".join(piece or "" for piece in pieces)


def test_the_commands_of_the_page(server: Server, open_server: Server, keys: Path, truth: Truth) -> None:
    kinds = set()
    for command in commands():
        words = shlex.split(command, comments=True)
        printed = run(command, server if "Authorization" in command else open_server, keys.parent)
        if "-d" not in words:
            assert printed, command
            continue
        body = json.loads(words[words.index("-d") + 1])
        chat, stream = "messages" in body, body.pop("stream", False)
        kinds.add((chat, stream))
        if body.get("temperature") != 0 or "tools" in body:
            continue
        true = truth(**body)["text"] if "max_tokens" in body else truth(**body, max_tokens=900)["text"]
        if stream:
            assert streamed(printed) == true
        else:
            choice = json.loads(printed)["choices"][0]
            assert (choice["message"]["content"] if chat else choice["text"]) == true
    assert kinds >= {(False, False), (True, True)}
