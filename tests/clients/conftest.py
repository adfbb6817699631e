"""The servers that the clients ask, and what the model answers without one."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kit import DEMO, PROJECT, ROOT, Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(secrets.token_hex(24) + "\n")
    with serving(keys) as one:
        yield one


@pytest.fixture(scope="session")
def open_server() -> Iterator[Server]:
    """Without one, as the documentation begins."""
    with serving() as one:
        yield one


@pytest.fixture(scope="session")
def truth() -> Iterator[Callable[..., dict[str, Any]]]:
    """What the model answers in process, see truth.py."""
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
