"""examples/serving.ipynb, run unchanged against a server with a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nbformat
import pytest
from kit import CHAT, ROOT, Server, user
from nbclient import NotebookClient


def test_the_notebook(
    server: Server, truth: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", server.v1)
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(ROOT / "examples" / "serving.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    printed = ["".join(one.text for one in outputs if one.output_type == "stream") for outputs in cells]
    true = truth(messages=CHAT, max_tokens=100)["text"]
    assert printed[0] == "demo takes 1024 tokens\n"
    assert printed[1] == f"{true}\n"
    talk = [*CHAT, {"role": "assistant", "content": true}, *user("What is a lake?")]
    assert printed[2].startswith(truth(messages=talk, max_tokens=100)["text"] + "\n")
    assert cells[3][0].data["text/plain"].startswith("Animal(kind='")
    assert len(printed[4].splitlines()) == 5
