"""The servers that the clients use, and the model's outputs in process."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import DEMO, NAMED, PROJECT, ROOT, Server, enforced, serving, slow


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key."""
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text(secrets.token_hex(24) + "\n")
    return path


@pytest.fixture(scope="session")
def server(keys: Path) -> Iterator[Server]:
    """A server with a key, and another key for the routes under /admin/."""
    admin = keys.with_name("admin.txt")
    admin.write_text(secrets.token_hex(24) + "\n")
    with serving(keys, "--admin-key-file", admin) as one:
        yield one


@pytest.fixture(scope="session")
def tool_server(keys: Path) -> Iterator[Server]:
    """With a key, and a chat template that has a place for tools."""
    with serving(keys, "--chat-template", ROOT / "examples" / "tools" / "chat_template.jinja") as one:
        yield one


@pytest.fixture(scope="session")
def open_server() -> Iterator[Server]:
    """Without one, as the documentation begins."""
    with serving() as one:
        yield one


@pytest.fixture(scope="session")
def slow_server() -> Iterator[Server]:
    """Over a simulated device that takes a tenth of a second for each token."""
    with slow(0.1) as one:
        yield one


@pytest.fixture(scope="session")
def truth() -> Iterator[Callable[..., dict[str, Any]]]:
    """The model in process, see truth.py."""
    command = [PROJECT / "python", ROOT / "tests" / "clients" / "truth.py", DEMO]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        def ask(**asked: Any) -> dict[str, Any]:
            stdin.write(json.dumps(asked) + "\n")
            stdin.flush()
            line = stdout.readline()
            assert line, "truth.py ended"
            answer: dict[str, Any] = json.loads(line)
            return answer

        yield ask
        stdin.close()


@pytest.fixture(scope="session")
def call(tool_server: Server) -> dict[str, Any]:
    """The call that the server makes, asked without a client."""
    choice = tool_server.post("/v1/chat/completions", enforced("demo", tool_choice=NAMED))["choices"][0]
    (made,) = choice["message"]["tool_calls"]
    result = {"name": "get_weather", "arguments": json.loads(made["function"]["arguments"])}
    assert choice["finish_reason"] in ("tool_calls", "stop") and not choice["message"]["content"]
    assert made["type"] == "function" and made["function"]["name"] == result["name"]
    assert result["arguments"]["city"] in ("Aachen", "Bonn", "Cologne") and 1 <= result["arguments"]["days"] <= 9
    return result
