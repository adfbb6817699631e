"""The command llmc-serve over the simulated device, all of its options real: `fake_serve.py SETTINGS OPTION ...`.

SETTINGS is JSON: `engine`, see fake_engine.Settings, `front`, other options of AsyncLLM, `block`, seconds for which
every request to /v1/chat/completions stops the event loop, and `first_interval`, seconds until the first attempt to
start the engine again beyond `max_restarts`. It prints the routes of the application to stderr, so that tests can cover
them all.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import starlette.applications
from llmc_runtime.api import async_llm
from llmc_runtime.engine import supervisor
from llmc_runtime.engine.messages import Open
from llmc_runtime.engine_args import EngineArgs
from llmc_runtime.server import run_server

from tests.runtime.served import TOK

ENGINE = Path(__file__).with_name("fake_engine.py")
ROUTES = "attack routes: "


def over(settings: dict[str, Any]) -> Any:
    """Return the replacement of the class AsyncLLM."""
    original = async_llm.AsyncLLM

    def opened(model: str, *, say: Any = None, **options: Any) -> Any:
        args = EngineArgs(model, **options)
        opening = Open("ok", args.message())
        command = [sys.executable, "-P", str(ENGINE), json.dumps(settings.get("engine", {}))]
        return original.over(async_llm.Front(command, opening, TOK), say=say, **(options | settings.get("front", {})))

    return opened


def tell_routes() -> None:
    """Print the application's routes."""
    begin = starlette.applications.Starlette.__init__

    def init(self: Any, *args: Any, **more: Any) -> None:
        begin(self, *args, **more)
        found = [(route.path, sorted(getattr(route, "methods", None) or ())) for route in self.routes]
        print(ROUTES + json.dumps(found), file=sys.stderr, flush=True)

    starlette.applications.Starlette.__init__ = init  # type: ignore[method-assign]


def block_chats(seconds: float) -> None:
    """Stop the event loop in every request for a chat."""
    call = starlette.applications.Starlette.__call__

    async def blocked(self: Any, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/v1/chat/completions":
            time.sleep(seconds)
        await call(self, scope, receive, send)

    starlette.applications.Starlette.__call__ = blocked  # type: ignore[method-assign]


if __name__ == "__main__":
    from llmc_runtime.cli import main_serve

    settings = json.loads(sys.argv[1])
    run_server.AsyncLLM = over(settings)  # type: ignore[misc]
    if settings.get("block"):
        block_chats(settings["block"])
    if "first_interval" in settings:
        supervisor._FIRST_INTERVAL = settings["first_interval"]
    tell_routes()
    sys.exit(main_serve(["toy", "--port", "0", "--served-model-name", "toy", *sys.argv[2:]]))
