"""openai-node: whole, streamed, structured outputs, an abort, errors; the AI SDK over its two APIs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from kit import QUESTIONS, ROOT, Server, enforced, joined, user

FOLDER = ROOT / "build" / "clients" / "node"


def client(server: Server, *words: str, program: str = "client.mjs") -> Any:
    """Return the program's output."""
    node = shutil.which("node")
    assert node is not None, "node is needed, and was not found (Debian: apt-get install nodejs npm)"
    command = [node, program, server.v1, server.key, *words]
    ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_tools(tool_server: Server) -> None:
    options = enforced("demo")
    true = tool_server.post("/v1/chat/completions", options)["choices"][0]["message"]["tool_calls"]
    named = [[call["function"]["name"], call["function"]["arguments"]] for call in true]
    assert client(tool_server, "", json.dumps(options)) == {
        "whole": named, "streamed": named, "end": ["tool_calls", "tool_calls"],
    }  # fmt: skip


def test_ai_sdk(tool_server: Server) -> None:
    """Over both of its APIs: the same texts and calls."""
    chat = {"model": "demo", "messages": user(QUESTIONS[0]), "temperature": 0, "max_tokens": 40}
    true = tool_server.post("/v1/chat/completions", chat)
    found = client(tool_server, QUESTIONS[0], program="ai_sdk.mjs")
    for one in (found["responses"], found["messages"]):
        assert one["whole"] == one["streamed"] == true["choices"][0]["message"]["content"]
        assert one["tokens"] == true["usage"]["completion_tokens"] and one["reason"] in ("stop", "length")
        ((name, arguments),) = one["calls"]
        assert name == "get_weather" and one["results"] == [f"clear in {arguments['city']}"] and one["answer"]
        assert one["parsed"]["size"] in ("small", "large")


def test_openai_node(server: Server, truth: Callable[..., dict[str, Any]]) -> None:
    for question in QUESTIONS[:2]:
        found = client(server, question)
        true = truth(messages=user(question), max_tokens=40)
        assert found["models"] == ["demo"]
        assert found["whole"] == true["text"] and found["tokens"] == len(true["token_ids"])
        assert joined(found["streamed"]["pieces"]) == true["text"]
        assert found["streamed"]["usage"]["completion_tokens"] == found["tokens"]
        assert found["helper"] == {"text": true["text"], "final": true["text"]}
        assert found["parsed"]["size"] in ("small", "large") and isinstance(found["parsed"]["deep"], bool)
        assert 2 <= found["aborted"] < 900
        assert found["wrong"] == {
            "kind": "BadRequestError", "status": 400, "code": "invalid_value", "param": "temperature",
        }  # fmt: skip
        assert found["unknown"]["code"] == "model_not_found" and found["unknown"]["kind"] == "NotFoundError"
        assert found["refused"]["kind"] == "AuthenticationError" and found["refused"]["status"] == 401
    server.rest()
