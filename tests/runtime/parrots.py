"""Servers over one engine whose model repeats scripts (see parrot_core), one server for each format of calls and
reasoning. The first part of a request's path selects the server.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from llmc_runtime import AsyncLLM
from llmc_runtime.api.async_front import Front
from llmc_runtime.engine.messages import Open
from llmc_runtime.server.app import application
from llmc_runtime.server.operations.admission import Admission
from llmc_runtime.server.operations.metrics_exporter import ServerMetrics
from llmc_runtime.server.serving import Serving

from tests.runtime.parrot_core import tokenizer

FOLDER = Path(__file__).parent / "chat_templates"
PROGRAM = Path(__file__).with_name("parrot_core.py")
TOK = tokenizer()
Ask = Callable[..., Any]  # see conftest
Servers = tuple[str, Mapping[str, Serving]]  # the address, to which a server's name is appended, and the servers
# name: the template, and the parsers unless they are detected
SERVERS: Mapping[str, tuple[str, str, str]] = {
    "hermes": ("qwen2.5", "auto", "none"),
    "llama": ("llama3", "auto", "none"),
    "mistral": ("mistral", "auto", "none"),
    "args": ("mistral_args", "auto", "auto"),
    "think": ("qwen3", "auto", "auto"),
    "opens": ("reasoner", "hermes", "auto"),
    "coder": ("qwen3_coder", "auto", "none"),
    "glm": ("glm45", "auto", "auto"),
    "python": ("pythonic", "auto", "none"),
    "deepseek": ("deepseek_v31", "auto", "auto"),
    "channels": ("channels", "auto", "auto"),
    "bare": ("chatml", "auto", "none"),
    "unknown": ("qwen2.5", "none", "none"),
    "quiet": ("qwen3", "auto", "auto"),
}
VARIABLES: Mapping[str, Mapping[str, Any]] = {"quiet": {"enable_thinking": False}}  # of the servers' templates


def client(servers: Servers, name: str) -> Any:
    """OpenAI's client of the server `name`."""
    import openai

    return openai.OpenAI(base_url=f"{servers[0]}/{name}/v1", api_key="none", max_retries=0)


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are their types."""
    found = []
    for block in text.strip().split("\n\n"):
        name, _, data = block.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def say(text: str) -> dict[str, str]:
    """Return a message that makes the parrot generate `text`, including special tokens."""
    return {"role": "user", "content": f"<|user|>{text}<|assistant|>"}


def template(name: str) -> str:
    """Return the text of a chat template."""
    return (FOLDER / f"{name}.jinja").read_text()


@contextmanager
def parrots() -> Iterator[Servers]:
    """Run the servers."""
    listening = socket.create_server(("127.0.0.1", 0))
    there, stop, found = threading.Event(), list[uvicorn.Server](), dict[str, Serving]()

    async def main() -> None:
        opening = Open("ok")
        front = Front([sys.executable, "-P", str(PROGRAM), "0"], opening, TOK)
        async with AsyncLLM.over(front, heartbeat_timeout=20.0, say=lambda line: None) as llm:
            apps = {}
            for name, (text, calls, thoughts) in SERVERS.items():
                metrics = ServerMetrics("parrot", llm.stats)
                admission = Admission(64, 1 << 20, None, metrics.refused)
                more: dict[str, Any] = {"store_bytes": 1 << 20, "variables": VARIABLES.get(name, {})}
                one = Serving(llm, ("parrot",), admission, metrics, template(text), calls, thoughts, **more)
                found[name], apps[name] = one, application(one)

            async def chosen(scope: Any, receive: Any, send: Any) -> None:
                _, name, rest = scope["path"].split("/", 2)
                await apps[name]({**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}, receive, send)

            config = uvicorn.Config(chosen, ws="none", lifespan="off", log_config=None)
            stop.append(uvicorn.Server(config))
            there.set()
            await stop[0].serve([listening])
            for one in found.values():
                one.close()

    thread = threading.Thread(target=asyncio.run, args=[main()], daemon=True)
    thread.start()
    assert there.wait(60)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", found
    finally:
        while not stop[0].started and thread.is_alive():
            thread.join(0.01)
        stop[0].should_exit = True
        thread.join(20)
