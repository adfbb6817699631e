"""A service manager hears when the server accepts requests, and when it begins to end."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

pytest.importorskip("starlette")
import httpx
from llmc_runtime.server.run_server import READY, notify

from tests.runtime.test_server_load import Command

PROGRAM = str(Path(__file__).with_name("serve_fake.py"))


def manager(address: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(address)
    listening.settimeout(30)
    return listening


def test_a_server_tells_that_it_is_ready_and_that_it_ends(tmp_path: Path) -> None:
    with manager(str(tmp_path / "notify")) as listening:
        command = Command(PROGRAM, "0", "5", NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert listening.recv(100) == b"READY=1"
        assert httpx.get(f"{command.url}/ready").status_code == 200
        command.process.terminate()
        assert listening.recv(100) == b"STOPPING=1"
        code, text = command.end()
        assert code == 0 and "service manager" not in text


def test_names_of_the_abstract_namespace_begin_with_an_at_sign(tmp_path: Path) -> None:
    name = f"llmc-test-{tmp_path}"
    with manager(f"\0{name}") as listening:
        notify(f"@{name}", READY)
        assert listening.recv(100) == b"READY=1"


def test_a_manager_that_is_gone_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        notify("", READY)
        assert not caplog.text
        notify(str(tmp_path / "nobody"), READY)
    assert "service manager" in caplog.text and "READY=1" in caplog.text
