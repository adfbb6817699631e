"""A server with tools and with a place for responses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import ROOT, Server, serving


@pytest.fixture(scope="session")
def store_server(keys: Path) -> Iterator[Server]:
    """With a key, a chat template that has a place for tools, and stored responses."""
    template = ROOT / "examples" / "tools" / "chat_template.jinja"
    with serving(keys, "--chat-template", template, "--response-store-bytes", "16MiB") as one:
        yield one
