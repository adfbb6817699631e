"""Prints the benches' tables at the end of a session and writes them to build/bench/latest.md."""

from __future__ import annotations

from datetime import date
from typing import Any

from bench import kit


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not kit.TABLES:
        return
    head = f"{date.today()}, {kit.machine()}"
    text = "\n\n".join([head, *(t.text() for t in kit.TABLES)])
    terminalreporter.section("tables")
    terminalreporter.write_line(text)
    (kit.BUILD / "latest.md").write_text(text + "\n")
